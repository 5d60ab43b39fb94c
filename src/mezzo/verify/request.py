"""What is compared, as a value that is written down before the first run: `comparison.json`.

A folder belongs to one comparison. What decides the runs (script, arguments, precisions, versions) and what
decides the verdict (seeds, margin, metric) are declared together, and may not change once a candidate has
been seen: a margin chosen after the result is no margin.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import mezzo
from mezzo.core.errors import UsageError
from mezzo.core.records import file_name
from mezzo.verify.frameworks import framework
from mezzo.verify.metric import Metric
from mezzo.verify.precisions import split_precisions

FILE = "comparison.json"
BASELINE = "fp32"
TWIN = "fp32-ulp"
SCHEMA = 1


@dataclass(frozen=True)
class Request:
    """A comparison, fully declared.

    Args:
        target: the script's path, or a module's name where `is_module`.
        argv: the script's own arguments.
        precisions: the candidates: presets, policy strings or paths of `.toml` files; see `candidates`.
        seeds: how many pairs, >= 1.
        margin: of the loss, as a share of FP32's final loss.
        metric: where the final metric is found; None judges the loss alone.
        demo: the demo's name, if the script is one.
        framework: what the script trains with, by its name in `mezzo.verify.frameworks`.

    Raises:
        UsageError: the script is missing, or a value is out of range.
        UnknownNameError: no such framework.
    """

    target: str
    argv: tuple[str, ...] = ()
    is_module: bool = False
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
        if not self.is_module:
            _script(Path(self.target))
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
            "script_sha256": "" if self.is_module else _digest(_script(Path(self.target))),
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


def _script(path: Path) -> Path:
    """The file that runs: the script itself, or the `__main__.py` of a directory."""
    inner = path / "__main__.py" if os.path.isdir(path) else path
    if not os.path.isfile(inner):
        near = sorted(p.name for p in path.parent.glob("*.py")) if os.path.isdir(path.parent) else []
        hint = f" In {path.parent} there is: {', '.join(near[:8])}." if near else ""
        why = "a directory without a __main__.py" if os.path.isdir(path) else "no such file"
        raise UsageError(
            f"script {str(path)!r}: {why}.{hint} Give the path of a Python script, or --demo NAME."
        )
    if not os.access(inner, os.R_OK):
        raise UsageError(f"script {str(path)!r}: it can't be read. Check its permissions.")
    return inner


def source_of(target: str) -> str:
    """The text of a script, as far as it can be read."""
    return _script(Path(target)).read_text(encoding="utf-8", errors="replace")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
