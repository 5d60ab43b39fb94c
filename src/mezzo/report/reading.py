"""What a comparison's folder holds, as values: the verdict, and every run that left records.

Tolerant by design: a report is wanted most when something went wrong. Only a verdict that is missing or is
no JSON is an error; a run that crashed, was killed or left a broken file is kept with what it has and a
fault to be shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from statistics import median
from typing import Any

import numpy as np

from mezzo.core import records
from mezzo.core.errors import UsageError
from mezzo.report.numbers import finite
from mezzo.report.series import Array

SCHEMA = 1
LOG_LINES = 25
_NAME = re.compile(r"(?P<precision>.+?)(?P<ulp>-ulp)?-(?P<seed>\d+)")


@dataclass(frozen=True)
class Run:
    """One run's records, taken apart: losses in order, updates in order, and what was measured once."""

    name: str
    precision: str
    seed: int
    nudged: bool
    losses: Array
    updates: tuple[records.UpdateRecord, ...] = ()
    started: records.RunStarted | None = None
    memory: records.MemoryRecord | None = None
    ops: tuple[records.OpFormats, ...] = ()
    ended: records.RunEnded | None = None
    fault: str = ""
    log: str = ""

    @property
    def failed(self) -> bool:
        """Whether the run was cut short or its script gave another exit status than 0."""
        return bool(self.fault) or self.ended is None or self.ended.status != 0

    @property
    def skipped(self) -> list[int]:
        """Indices of the updates that were vetoed."""
        return [update.index for update in self.updates if update.skipped]


@dataclass(frozen=True)
class Comparison:
    """A comparison's folder: `verdict.json` as it stands, the candidates in it, and the runs."""

    directory: Path
    verdict: Mapping[str, Any]
    candidates: Mapping[str, Mapping[str, Any]]
    baseline: str = "fp32"
    runs: tuple[Run, ...] = ()
    request: Mapping[str, Any] = field(default_factory=dict)

    def of(self, precision: str) -> list[Run]:
        """The paired runs of one precision, by seed, without the one-ulp twins."""
        return sorted(
            (run for run in self.runs if run.precision == precision and not run.nudged),
            key=lambda run: run.seed,
        )

    @property
    def twins(self) -> list[Run]:
        """FP32 runs whose initial weights were moved by one ulp, by seed."""
        return sorted((run for run in self.runs if run.nudged), key=lambda run: run.seed)

    def peak(self, precision: str) -> float | None:
        """Peak memory of one precision in bytes: the median over its runs; None where none recorded it."""
        found = [float(run.memory.peak_bytes) for run in self.of(precision) if run.memory]
        return median(found) if found else None

    def metrics(self, precision: str) -> dict[int, float]:
        """The final metric of each run of one precision, by seed, from the pairs that the verdict lists."""
        found: dict[int, float] = {}
        for values in (
            self.candidates.values() if precision == self.baseline else [self.candidates.get(precision, {})]
        ):
            pairs = values.get("pairs")
            for one in pairs if isinstance(pairs, list) else []:
                key = f"{self.baseline}_metric" if precision == self.baseline else "metric"
                seed, value = (
                    (finite(one.get("seed")), finite(one.get(key))) if isinstance(one, dict) else (None, None)
                )
                if seed is not None and value is not None:
                    found[int(seed)] = value
        return dict(sorted(found.items()))


def read(directory: Path) -> Comparison:
    """Read a comparison's folder.

    Raises:
        UsageError: there is no `verdict.json`, or it is no verdict that this version can read.
    """
    path = directory / "verdict.json"
    try:
        verdict = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file. A report is made from the folder that `mezzo compare --out DIR` wrote."
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a readable verdict ({error}). Run `mezzo compare` again.") from error
    if not isinstance(verdict, dict) or not isinstance(verdict.get("candidates"), dict):
        raise UsageError(f'{path}: not a verdict: it has no object "candidates". Run `mezzo compare` again.')
    schema = verdict.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise UsageError(
            f"{path}: schema {schema!r}, and this version of Mezzo reads schema {SCHEMA}. "
            "Use the version that wrote it, or run `mezzo compare` again."
        )
    candidates = {
        str(name): values if isinstance(values, dict) else {}
        for name, values in verdict["candidates"].items()
    }
    baseline = str(verdict.get("baseline", "fp32"))
    known = {_slug(name): name for name in (baseline, *candidates)}
    runs = tuple(_read_run(file, known) for file in sorted((directory / "runs").glob("*.jsonl")))
    return Comparison(directory, verdict, candidates, baseline, runs, _request(directory, verdict))


def _slug(name: str) -> str:
    """A precision as it stands in the name of a run's files: of a policy's file, its stem."""
    name = PurePath(name).stem if name.endswith(".toml") else name
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-").lower()


def _request(directory: Path, verdict: Mapping[str, Any]) -> Mapping[str, Any]:
    inside = verdict.get("request")
    if isinstance(inside, dict):
        return inside
    try:
        found = json.loads((directory / "comparison.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_run(path: Path, known: Mapping[str, str]) -> Run:
    losses: list[float] = []
    updates: list[records.UpdateRecord] = []
    once: dict[str, Any] = {}
    fault = ""
    try:
        for record in records.read(path):
            if isinstance(record, records.LossRecord):
                losses.append(record.loss)
            elif isinstance(record, records.UpdateRecord):
                updates.append(record)
            elif isinstance(record, records.OpsRecord):
                once["ops"] = tuple(record.ops)
            else:
                once[{"run": "started", "memory": "memory", "end": "ended"}[record.kind]] = record
    except (UsageError, OSError, UnicodeDecodeError) as error:
        fault = str(error).replace(f"{path.parent}/", "")
    if not fault and "ended" not in once:
        fault = "the run was cut short: its records have no end"
    found = _NAME.fullmatch(path.stem)
    started: records.RunStarted | None = once.get("started")
    precision = found["precision"] if found else started.policy if started else path.stem
    return Run(
        name=path.stem,
        precision=known.get(_slug(precision), precision),
        seed=int(found["seed"]) if found else started.seed_offset if started else 0,
        nudged=bool(found and found["ulp"]) or bool(started and started.nudged),
        losses=np.array(losses, dtype=float),
        updates=tuple(updates),
        fault=fault,
        log=_tail(path.with_suffix(".log")),
        **once,
    )


def _tail(path: Path) -> str:
    """The last lines of what the script printed, or nothing."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 20_000))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-LOG_LINES:])
