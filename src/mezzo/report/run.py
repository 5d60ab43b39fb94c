"""The records of a run, and of a comparison's folder; what crashed or is damaged is kept with what it has."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mezzo.core import records
from mezzo.core.commands import compare_command
from mezzo.core.errors import MezzoError, UsageError
from mezzo.core.loss_scale import StaticLossScale
from mezzo.core.policy import policy
from mezzo.report.numbers import scale_text
from mezzo.report.ranges import Ranges
from mezzo.report.series import Array

SCHEMA = 1  # of verdict.json
LOG_LINES = 25
_NAME = re.compile(r"(?P<precision>.+?)(?P<ulp>-ulp)?-(?P<seed>\d+)")


@dataclass(frozen=True)
class Run:
    """The records of one run."""

    name: str  # of its file, without the ending
    precision: str  # the name of its policy
    seed: int  # what was added to the script's own seeds
    nudged: bool  # whether it is a run of the perturbed baseline
    losses: Array  # of every outermost backward, unscaled
    updates: tuple[records.UpdateRecord, ...] = ()
    started: records.RunStarted | None = None
    memory: records.MemoryRecord | None = None
    ops: tuple[records.OpFormats, ...] = ()
    ended: records.RunEnded | None = None
    overflows: tuple[records.OverflowRecord, ...] = ()  # one for each skipped update that was traced
    ranges: Ranges = field(default_factory=Ranges)
    fault: str = ""  # what is wrong with the records
    records: int = 0  # lines that were read
    log: str = ""  # the last lines that the script printed

    @property
    def failed(self) -> bool:
        """Whether the run was cut short or its script gave another exit status than 0."""
        return bool(self.fault) or (self.ended is not None and self.ended.status != 0)

    @property
    def notes(self) -> list[str]:
        return self.ended.notes if self.ended else []

    @property
    def exited(self) -> str:
        if self.ended is None:
            return "unknown"
        return "normally" if self.ended.status == 0 else f"exit status {self.ended.status}"

    @property
    def left_alone(self) -> str:
        """Why Mezzo applied no policy to the script; ``""`` if it did."""
        prefix = records.LEFT_ALONE
        return next((note.removeprefix(prefix) for note in self.notes if note.startswith(prefix)), "")

    @property
    def ran_by(self) -> str:
        return "left alone" if self.left_alone else self.precision

    @property
    def finite_losses(self) -> list[float]:
        found: list[float] = self.losses[np.isfinite(self.losses)].tolist()
        return found

    @property
    def constant_scale(self) -> float | None:
        """The loss scale, if the run's policy has a constant one; else None."""
        try:
            found = policy(self.started.policy).make_loss_scale() if self.started else None
        except MezzoError:  # of a newer version, or not a policy
            return None
        return found.scale if isinstance(found, StaticLossScale) else None

    @property
    def too_high(self) -> str:
        if self.constant_scale is not None:
            return f"the constant loss scale {scale_text(self.constant_scale)} is too large for this step"
        return "the loss scale was too large for this step (a smaller one keeps its gradients finite)"

    @property
    def alarms(self) -> int:
        """How many failed updates a loss scale of 1 would not have kept."""
        return sum(record.finding.alarms for record in self.overflows)

    @property
    def skipped(self) -> list[int]:
        return [update.index for update in self.updates if update.skipped]


def read_run(path: Path, known: Mapping[str, str] | None = None) -> Run:
    """Read a run's file of records; ``known`` maps `file_name` of a precision to the precision as the user wrote it."""
    found: defaultdict[str, list[Any]] = defaultdict(list)
    ranges = Ranges()
    read, fault = 0, ""
    try:
        for record in records.read(path):
            read += 1
            if isinstance(record, records.RangesRecord):
                ranges.add(record)  # a sum: the histograms of a long run would fill the memory
            else:
                found[record.kind].append(record)
    except (OSError, UsageError) as error:
        fault = str(error).replace(f"{path.parent}/", "")
        # A missing loss would shift all that follow.
        fault += "; this line and those after it were not read" * isinstance(error, UsageError)
    started, memory, ops, ended = (found[kind][-1:] for kind in ("run", "memory", "ops", "end"))
    of_a_loop = not started and bool(found["loss"] or found["update"])
    if not ended and not of_a_loop:
        fault = fault or "the run was cut short: its records have no end"
    named = _NAME.fullmatch(path.stem)
    precision = named["precision"] if named else started[0].policy if started else path.stem
    return Run(
        name=path.stem,
        precision=(known or {}).get(records.file_name(precision), precision),
        seed=int(named["seed"]) if named else started[0].seed_offset if started else 0,
        nudged=bool(named and named["ulp"]) or bool(started and started[0].nudged),
        losses=np.array([one.loss for one in found["loss"]], dtype=float),
        updates=tuple(found["update"]),
        started=next(iter(started), None),
        memory=next(iter(memory), None),
        ops=tuple(ops[0].ops) if ops else (),
        ended=next(iter(ended), None),
        overflows=tuple(found["overflow"]),
        ranges=ranges,
        fault=fault,
        records=read,
        log=_tail(path.with_suffix(".log")),
    )


def advice(folder: Path) -> dict[str, Any] | None:
    """What `mezzo calibrate` wrote in this folder, as texts; None if it wrote nothing, or an earlier version did."""
    try:
        found = json.loads((folder / "calibration.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("plain"), list) else None


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 20_000))
            return "\n".join(file.read().decode("utf-8", errors="replace").splitlines()[-LOG_LINES:])
    except OSError:
        return ""


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
        """The paired runs of one precision, by seed, without the perturbed baseline."""
        found = (run for run in self.runs if run.precision == precision and not run.nudged)
        return sorted(found, key=lambda run: run.seed)

    @property
    def perturbed(self) -> list[Run]:
        return sorted((run for run in self.runs if run.nudged), key=lambda run: run.seed)


def read(directory: Path) -> Comparison:
    """Read a comparison's folder; UsageError if `verdict.json` is missing or this version cannot read it."""
    path = directory / "verdict.json"
    try:
        verdict = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file. Give a folder that `mezzo compare --out DIR` wrote."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read ({error}). Run `mezzo compare` again.") from error
    if not isinstance(verdict, dict) or not isinstance(verdict.get("candidates"), dict):
        raise UsageError(f'{path}: not a verdict: it has no object "candidates". Run `mezzo compare` again.')
    schema = verdict.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise UsageError(
            f"{path}: has schema {schema!r}; this version of Mezzo reads schema {SCHEMA}. Use the version that wrote "
            "it, or run `mezzo compare` again."
        )
    candidates = {name: one if isinstance(one, dict) else {} for name, one in verdict["candidates"].items()}
    baseline = str(verdict.get("baseline", "fp32"))
    known = {records.file_name(name): name for name in (baseline, *candidates)}
    runs = tuple(read_run(file, known) for file in sorted((directory / "runs").glob("*.jsonl")))
    request = verdict.get("request")
    return Comparison(
        directory, verdict, candidates, baseline, runs, request if isinstance(request, dict) else {}
    )


def command_line(comparison: Comparison) -> str:
    """The ``mezzo compare ...`` that gives this comparison again, quoted for a POSIX shell."""
    given = {key: value for key, value in comparison.request.items() if value}
    request = {"target": "SCRIPT", "precisions": list(comparison.candidates), **given}
    # Without --fresh the finished runs would be kept.
    return compare_command(request, comparison.directory.resolve().name, "--fresh")
