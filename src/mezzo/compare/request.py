"""What is compared, written down before the first run (`comparison.json`), and the frameworks of compared scripts.

Nothing that decides the runs or the verdict may change once a candidate has run: a margin chosen after the result
proves nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import mezzo
from mezzo.compare.measure import Metric
from mezzo.compare.runs import LAUNCH, FinishedRun
from mezzo.core.commands import DEFAULT_MARGIN
from mezzo.core.errors import UsageError
from mezzo.core.policy import policy
from mezzo.core.policy_text import is_toml
from mezzo.core.records import OWN, file_name
from mezzo.demos import DEMOS
from mezzo.keras.plan import plan
from mezzo.pytorch.run.session import check
from mezzo.runner.lifecycle import RunRequest
from mezzo.runner.script import locate

FILE = "comparison.json"
BASELINE = "fp32"
PERTURBED = "fp32-ulp"
SCHEMA = 1
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
MASTERS = ("split", "split8", "fp32")


def own_masters(precision: str) -> str | None:
    """The masters of a candidate ``own`` or ``own,masters=KIND``: empty without; None for any other candidate."""
    name, _, rest = precision.partition(",")
    if name != OWN:
        return None
    kinds = {"": "", **{f"masters={kind}": kind for kind in MASTERS}}
    if rest not in kinds:
        allowed = ", ".join(f"own,{kind}" for kind in kinds if kind)
        raise UsageError(f"precision {precision!r}: own is the script as it is. Use own, or {allowed}")
    return kinds[rest]


@dataclass(frozen=True)
class Framework:
    """What a script trains with."""

    launch: tuple[str, ...]  # the command that runs a request's file
    read: Callable[[str], tuple[str, bool]]  # a precision's name -> its fingerprint, and whether it is FP32
    packages: tuple[str, ...]  # those whose versions decide the runs
    emulates: bool  # whether Mezzo itself emulates a format that the device lacks
    untrained: str  # the error, after the script's name, if it recorded no loss
    mistaken: Callable[[FinishedRun], str | None]  # why an FP32 run was not this framework's; None if it was


def _pytorch_precision(name: str) -> tuple[str, bool]:
    if own_masters(name) is not None:
        return name, False
    value = policy(name)
    check(value)
    return value.fingerprint(), value.is_fp32


_KERAS = "trains with Keras. Add --framework keras"
# A package that a run imported, if Keras was not -> the error.
_NOT_KERAS = {
    "tf_keras": "trains with Keras 2 (tf_keras), which --framework keras does not support. Use Keras 3: import keras, "
    "and leave TF_USE_LEGACY_KERAS unset",
    "torch": "makes no Keras model, and imports torch. Leave --framework keras out",
    "tensorflow": "makes no Keras model. --framework keras compares scripts that train a Keras model; TensorFlow alone "
    "is not supported",
}


def _not_keras(run: FinishedRun) -> str | None:
    if run.losses or "keras" in run.machine:
        return None
    none = "makes no Keras model. Give a script that trains one, or leave --framework keras out"
    return next((why for package, why in _NOT_KERAS.items() if package in run.machine), none)


FRAMEWORKS = {
    "pytorch": Framework(
        LAUNCH,
        _pytorch_precision,
        ("torch",),
        True,
        "never called backward(), so there is no loss to compare; torch.autograd.grad and torch.func are not recorded. "
        "Give a script that trains with backward(). One that expects torchrun needs --nproc.",
        # Keras on its torch backend calls backward, and steps its own optimizer.
        lambda run: None if run.updates or "keras" not in run.machine else _KERAS,
    ),
    "keras": Framework(
        (sys.executable, "-m", "mezzo.keras.run"),
        lambda name: (plan(name).precision, plan(name).is_fp32),
        ("keras", "tensorflow", "jax", "torch"),
        False,
        "never called fit or train_on_batch, so there is no loss to compare. If it has its own training loop, put the "
        "step into train_step of its keras.Model and call model.fit. It must train in its own process.",
        _not_keras,
    ),
}


@dataclass(frozen=True)
class ScriptRequest:
    """A script that is run several times: its path, or a module's name if `is_module`, and its arguments."""

    target: str
    argv: tuple[str, ...] = ()
    is_module: bool = False

    def __post_init__(self) -> None:
        if not self.is_module:
            script_file(self.target)

    def child(self, folder: Path, name: str, policy: str, **options: Any) -> RunRequest:
        """One of its runs, under a policy, with the records in the folder's `runs/NAME.jsonl`."""
        path = (folder / "runs" / f"{name}.jsonl").resolve()
        return RunRequest(self.target, self.argv, self.is_module, policy, path, summary=False, **options)


@dataclass(frozen=True)
class Request(ScriptRequest):
    """A comparison, fully declared. A wrong value, or a script that is missing, raises UsageError."""

    precisions: tuple[str, ...] = ("bf16", "fp16")  # presets, policy strings or paths of `.toml` files
    seeds: int = 3  # how many pairs
    margin: float = DEFAULT_MARGIN  # of the loss, as a share of FP32's final loss
    metric: str | None = None  # the pattern of `Metric`; None judges the loss alone
    metric_better: str = "auto"
    metric_margin: float | None = None
    own: str = ""  # the first FP32 run's words on the script's mixed precision, which FP32 runs switch off
    demo: str | None = None  # its name, if the script is one
    framework: str = "pytorch"  # a key of `FRAMEWORKS`
    nproc: int | None = None  # ranks of each run, which torchrun starts; rank 0 is compared
    schema: int = field(default=SCHEMA)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise UsageError(f"--seeds {self.seeds} is below the minimum of 1. A proof needs 3 or more.")
        if self.nproc is not None and self.framework != "pytorch":
            raise UsageError(
                f"--nproc {self.nproc}: torchrun starts PyTorch scripts only. Leave --nproc or --framework "
                f"{self.framework} out."
            )
        super().__post_init__()
        files = [BASELINE, PERTURBED, *map(file_name, self.precisions)]
        for name in self.precisions:
            if files.count(file_name(name)) > 1:
                raise UsageError(
                    f"{name!r} and another precision would both write runs/{file_name(name)}-0.jsonl. Rename one, or "
                    "compare them in two folders (--out)."
                )
        _ = self.how_metric

    @property
    def how_metric(self) -> Metric | None:
        return Metric(self.metric, self.metric_better, self.metric_margin) if self.metric else None

    @property
    def launch(self) -> tuple[str, ...]:
        """The command that runs a request's file: once, or on each rank of a new process group."""
        python, *module = FRAMEWORKS[self.framework].launch
        ranks = [] if self.nproc is None else [*TORCHRUN, "--nproc-per-node", str(self.nproc)]
        return (python, *ranks, *module)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The module patterns of all candidates; Keras checks its own when a model is built."""
        if self.framework != "pytorch":
            return ()
        others = (name for name in self.precisions if own_masters(name) is None)
        return tuple(dict.fromkeys(path for name in others for path, _ in policy(name).modules))

    def with_own(self, cause: str) -> Request:
        """The comparison of a script that has its own mixed precision: that is a candidate, too."""
        trained = re.search(r"(has|trains) \S*16\S* parameters", cause)  # not those that are frozen
        names = [OWN, f"{OWN},masters=split"] if trained else [OWN]
        others = [name for name in self.precisions if name not in names]
        return replace(self, own=cause, precisions=(*names, *others))

    def asked(self) -> dict[str, Any]:
        """What a command line has to say: every field, without the metric that belongs to a demo."""
        known = self.demo is not None and DEMOS[self.demo].metric == self.metric
        return {**asdict(self), "metric": None if known else self.metric}

    def declared(self) -> dict[str, Any]:
        """What is written down: every field, what script and policies contain, and the versions that run."""
        its = FRAMEWORKS[self.framework]
        script = "" if self.is_module else hashlib.sha256(script_file(self.target).read_bytes()).hexdigest()
        return {
            **json.loads(json.dumps(asdict(self))),
            "script_sha256": script,
            "policies": {name: its.read(name)[0] for name in (BASELINE, *self.precisions)},
            "mezzo": mezzo.__version__,
            **{name: next((one.version for one in distributions(name=name)), "") for name in its.packages},
        }


def split_precisions(words: Sequence[str]) -> list[str]:
    """The precisions in the values of `--precision`. A part with an ``=`` belongs to the policy string before it.

    >>> split_precisions(["fp32,bf16", "bf16,op.softmax=fp32,fp16", "Mine.TOML,params=fp32"])
    ['fp32', 'bf16', 'bf16,op.softmax=fp32', 'fp16', 'Mine.TOML', 'params=fp32']
    """
    found: list[str] = []
    for word in words:
        parts: list[str] = []
        for piece in filter(None, map(str.strip, word.split(","))):
            if "=" in piece and parts and not is_toml(parts[-1]):
                parts[-1] += f",{piece}"
            else:
                parts.append(piece)
        found += parts
    return found


def candidates(words: Sequence[str], by: str = "pytorch") -> tuple[tuple[str, ...], list[str]]:
    """The candidates that ``--precision`` names, and remarks on those left out: FP32, and what is named twice."""
    kept: dict[str, str] = {}
    remarks = []
    for name in split_precisions(words):
        fingerprint, is_fp32 = FRAMEWORKS[by].read(name)
        if is_fp32:
            remarks.append(f"{name} is the baseline, which always runs; it is not listed as a candidate.")
        elif fingerprint in kept:
            same = "was named twice" if name == kept[fingerprint] else f"is the same as {kept[fingerprint]}"
            remarks.append(f"{name} {same}; it runs once.")
        else:
            kept[fingerprint] = name
    if not kept:
        raise UsageError(
            f"--precision {' '.join(words) or '(empty)'}: nothing to compare with fp32. Name at least one other. "
            "Example: --precision bf16"
        )
    return tuple(kept.values()), remarks


def differences(declared: dict[str, Any], before: dict[str, Any]) -> dict[str, str]:
    """The changes from an earlier declaration: each key, and the change in words."""
    changed = [key for key in sorted({*declared, *before}) if declared.get(key) != before.get(key)]
    if "target" in changed:
        changed = [key for key in changed if key != "script_sha256"]  # another script, not an edited one
    since = {"script_sha256": declared["target"]}
    if "policies" in changed:  # other precisions have other policies: a change is one of the same name
        ours, theirs = ({**one.get("policies", {})} for one in (declared, before))
        edited = [name for name, policy in ours.items() if theirs.get(name, policy) != policy]
        since["policies"] = f"policy {', '.join(edited)}"
        changed = [key for key in changed if edited or key != "policies"]
    names = {field.name: f"--{field.name.replace('_', '-')}" for field in fields(Request)}
    names |= {"own": "the script's own mixed precision", "target": "the script", "precisions": "--precision"}
    mine = {word.partition("=")[0] for word in declared["argv"]} & {"--fresh", "--out", *names.values()}
    passed = f" ({' '.join(sorted(mine))} after -- is passed to the script)" if mine else ""
    names["argv"] = f"the script's argument list{passed}"
    return {
        key: f"{since[key]} has changed since"
        if key in since
        else f"{names.get(key, key)} was {_text(before.get(key))} and is now {_text(declared.get(key))}"
        for key in changed
    }


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def read_request(path: Path) -> dict[str, Any]:
    """The declaration in a `comparison.json`; UsageError if it is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or not {f.name for f in fields(Request)} & set(data):
            raise ValueError("not a comparison")
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path}: not readable ({error}). Start over with --fresh (deletes its runs), or choose another --out."
        ) from error
    return data


def script_file(target: str) -> Path:
    """The file that runs: the script itself, or the `__main__.py` of a directory."""
    file = Path(locate(target, is_module=False).file)
    if not file.is_file():
        raise UsageError(
            f"script {target!r} is not a file, so it cannot be run several times. Give the path of a Python script."
        )
    return file
