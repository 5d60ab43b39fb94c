"""What is compared, as a value that is written down before the first run (`comparison.json`), and the frameworks whose
scripts are compared: how a child of each is started, and how its precisions are read.

A folder belongs to one comparison. What decides the runs (script, arguments, precisions, versions) and what
decides the verdict (seeds, margin, metric) are declared together, and may not change once a candidate has
been seen: a margin chosen after the result is no margin.

All that differs between frameworks stands in one table; nothing else of `mezzo compare` asks which framework it is.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import mezzo
from mezzo.compare.measure import Metric
from mezzo.compare.runs import LAUNCH, FinishedRun
from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.policy import policy
from mezzo.core.records import file_name
from mezzo.keras.plan import plan
from mezzo.pytorch.run.session import check
from mezzo.runner.lifecycle import RunRequest
from mezzo.runner.script import locate


@dataclass(frozen=True)
class Precision:
    """What a precision's name stands for: two of one fingerprint are the same; and whether it is FP32, the baseline."""

    fingerprint: str
    is_fp32: bool


@dataclass(frozen=True)
class Framework:
    """One framework.

    Args:
        name: the word of `--framework`.
        launch: the command that runs a request's file.
        read: a precision's name -> what it stands for. Raises UsageError for what no unmodified script can be run
            with.
        packages: those whose versions decide the runs.
        untrained: what is told of a script that recorded no loss, after its name.
        mistaken: why an FP32 run is not this framework's, and what to do; None where it is.
        emulates: whether Mezzo itself computes in a format that the device lacks; else the framework does, in its way.
        guessed: the same of a script's text, for a run that died without a record; None where nothing speaks for it.
    """

    name: str
    launch: tuple[str, ...]
    read: Callable[[str], Precision]
    packages: tuple[str, ...]
    untrained: str
    mistaken: Callable[[FinishedRun], str | None]
    emulates: bool
    guessed: Callable[[str], str | None] = lambda text: None


def framework(name: str) -> Framework:
    """The framework of that name.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in FRAMEWORKS:
        raise unknown_name("framework", name, FRAMEWORKS, where="--framework: ")
    return FRAMEWORKS[name]


def _of_pytorch(name: str) -> Precision:
    value = policy(name)
    check(value)
    return Precision(value.fingerprint(), value.is_fp32)


def _of_keras(name: str) -> Precision:
    value = plan(name)
    return Precision(value.precision, value.is_fp32)


def _is_keras(run: FinishedRun) -> str | None:
    """A run as PyTorch's in which only Keras trained: on its torch backend it calls backward, and steps itself."""
    if run.updates or "keras" not in run.machine:
        return None
    return "trains with Keras: give --framework keras"


def _looks_like_keras(text: str) -> str | None:
    imported = set(re.findall(r"^[ \t]*(?:import|from)[ \t]+(keras|tensorflow|torch)\b", text, re.MULTILINE))
    if not imported or "torch" in imported:
        return None
    return f"imports {' and '.join(sorted(imported))} and not torch. If it trains with Keras, give --framework keras"


def _is_not_keras(run: FinishedRun) -> str | None:
    if run.losses or "keras" in run.machine:
        return None
    if "tf_keras" in run.machine:
        return (
            "trains with Keras 2 (tf_keras), which --framework keras does not run. Use Keras 3: import keras, or leave "
            "TF_USE_LEGACY_KERAS unset"
        )
    if "torch" in run.machine:
        return "makes no Keras model, and imports torch: leave --framework keras out"
    if "tensorflow" in run.machine:
        return "makes no Keras model: --framework keras compares scripts that train with Keras, not TensorFlow alone"
    return "makes no Keras model. Compare a script that trains one, or leave --framework keras out"


FRAMEWORKS = {
    row.name: row
    for row in (
        Framework(
            "pytorch",
            LAUNCH,
            _of_pytorch,
            ("torch",),
            "ended without a call of backward(), so it has no loss to compare. Compare a script that trains; one that "
            "only evaluates, or trains in other processes, has none here.",
            _is_keras,
            True,
            _looks_like_keras,
        ),
        Framework(
            "keras",
            (sys.executable, "-m", "mezzo.keras.run"),
            _of_keras,
            ("keras", "tensorflow", "jax", "torch"),
            "ended without a training step that Mezzo sees (fit or train_on_batch), so it has no loss to compare. Put "
            "the step of a loop of its own into train_step of its keras.Model and call model.fit; a script that only "
            "evaluates, or trains in other processes, has no loss here.",
            _is_not_keras,
            False,
        ),
    )
}


def split_precisions(words: Sequence[str]) -> list[str]:
    """The precisions in the values of `--precision`, in order.

    A word is split at its commas, except that what holds an ``=`` belongs to the policy string before it.

    >>> split_precisions(["fp32,bf16", "bf16,op.softmax=fp32,fp16", "params=fp32,compute=bf16"])
    ['fp32', 'bf16', 'bf16,op.softmax=fp32', 'fp16', 'params=fp32,compute=bf16']
    """
    found: list[str] = []
    for word in words:
        parts: list[str] = []
        for piece in (piece.strip() for piece in word.split(",")):
            if not piece:
                continue
            if "=" in piece and parts and not parts[-1].endswith(".toml"):
                parts[-1] += f",{piece}"
            else:
                parts.append(piece)
        found += parts
    return found


FILE = "comparison.json"
BASELINE = "fp32"
TWIN = "fp32-ulp"
SCHEMA = 1


@dataclass(frozen=True)
class ScriptRequest:
    """A script that is run several times.

    Args:
        target: the script's path, or a module's name where `is_module`.
        argv: the script's own arguments.
        is_module: whether `target` is a module's name, as after `python -m`.

    Raises:
        UsageError: the script is missing.
    """

    target: str
    argv: tuple[str, ...] = ()
    is_module: bool = False

    def __post_init__(self) -> None:
        if not self.is_module:
            script_file(self.target)

    def child(self, folder: Path, name: str, policy: str, **options: Any) -> RunRequest:
        """One of its runs, under a policy, with the records in the folder's `runs/NAME.jsonl`."""
        return RunRequest(
            self.target,
            self.argv,
            self.is_module,
            policy,
            (folder / "runs" / f"{name}.jsonl").resolve(),
            summary=False,
            **options,
        )


@dataclass(frozen=True)
class Request(ScriptRequest):
    """A comparison, fully declared.

    Args:
        precisions: the candidates: presets, policy strings or paths of `.toml` files; see `candidates`.
        seeds: how many pairs, >= 1.
        margin: of the loss, as a share of FP32's final loss.
        metric: where the final metric is found; None judges the loss alone.
        demo: the demo's name, if the script is one.
        framework: what the script trains with, by its name in `mezzo.compare.request`.

    Raises:
        UsageError: the script is missing, or a value is out of range.
        UnknownNameError: no such framework.
    """

    precisions: tuple[str, ...] = ("bf16", "fp16")
    seeds: int = 3
    margin: float = 0.005
    metric: str | None = None
    metric_better: str = "auto"
    metric_margin: float | None = None
    demo: str | None = None
    framework: str = "pytorch"
    schema: int = field(default=SCHEMA)

    def __post_init__(self) -> None:
        framework(self.framework)
        if self.seeds < 1:
            raise UsageError(f"--seeds {self.seeds}: give 1 or more (3 or more can prove equivalence)")
        if not 0.0 < self.margin < 1.0:
            raise UsageError(
                f"--margin {self.margin:g}: give a share of the final loss between 0 and 1, such as "
                "0.005 for 0.5 %"
            )
        if not self.precisions:
            raise UsageError("nothing to compare: give at least one precision, such as --precision bf16,fp16")
        super().__post_init__()
        files = [BASELINE, TWIN, *map(file_name, self.precisions)]
        for name in self.precisions:
            if files.count(file_name(name)) > 1:
                raise UsageError(
                    f"{name!r} and another precision would share the file runs/{file_name(name)}-0.jsonl. "
                    "Rename one of them, or compare them in two folders."
                )
        _ = self.how_metric

    @property
    def how_metric(self) -> Metric | None:
        """The metric's pattern, direction and margin."""
        return Metric(self.metric, self.metric_better, self.metric_margin) if self.metric else None

    def declared(self) -> dict[str, Any]:
        """What is written down: every field, what script and policies contain, and the versions that run."""
        its = framework(self.framework)
        return {
            **json.loads(json.dumps(asdict(self))),
            "script_sha256": "" if self.is_module else _digest(script_file(self.target)),
            "policies": {name: its.read(name).fingerprint for name in (BASELINE, *self.precisions)},
            "mezzo": mezzo.__version__,
            **{package: _version(package) for package in its.packages},
        }


def candidates(words: Sequence[str], by: str = "pytorch") -> tuple[tuple[str, ...], list[str]]:
    """The candidates that ``--precision`` names, as the framework `by` reads them, each once; and remarks on those left
    out.

    What a word names is `split_precisions`' to say. FP32 is the baseline and always runs, so it is left out,
    as is whatever is named twice.

    Raises:
        UsageError: an unknown precision, op, or format (with the nearest right one), what no unmodified script of this
            framework can be run with, or no candidate left.
    """
    its = framework(by)
    found = split_precisions(words)
    kept: dict[str, str] = {}
    remarks = []
    for name in found:
        value = its.read(name)
        if value.is_fp32:
            remarks.append(f"{name} is the baseline and runs anyway: left out of the candidates.")
        elif value.fingerprint in kept:
            remarks.append(f"{name} is the same as {kept[value.fingerprint]}: run once.")
        else:
            kept[value.fingerprint] = name
    if not kept:
        raise UsageError(
            f"--precision {' '.join(words) or '(empty)'}: no candidate is left to compare with fp32. "
            "Name at least one other, such as bf16."
        )
    return tuple(kept.values()), remarks


def differences(declared: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """What was declared before and is now declared otherwise, in words."""
    return [
        f"{key} was {before.get(key)!r} and is now {declared.get(key)!r}"
        for key in sorted({*declared, *before})
        if declared.get(key) != before.get(key)
    ]


def read_request(path: Path) -> dict[str, Any]:
    """The declaration in a `comparison.json`.

    Raises:
        UsageError: the file is no declaration.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or not {f.name for f in fields(Request)} & set(data):
            raise ValueError("not a comparison")
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path}: not readable ({error}). Start again with --fresh, or choose another --out."
        ) from error
    return data


def source_of(target: str) -> str:
    """The text of a script, as far as it can be read."""
    return script_file(target).read_text(encoding="utf-8", errors="replace")


def script_file(target: str) -> Path:
    """The file that runs: the script itself, or the `__main__.py` of a directory.

    Raises:
        UsageError: there is no such file, or it can't be read; or it is a pipe, which can't be run again.
    """
    file = Path(locate(target, is_module=False).file)
    if not file.is_file():
        raise UsageError(
            f"script {target!r}: no file that can be run again. Give the path of a Python script."
        )
    return file


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
