"""One run's records: losses and updates in order, what was measured once, overflow reports, ranges.

A report is wanted most when something went wrong, so reading is tolerant: a run that crashed, was killed or left a
broken file is kept with what it has, and `Run.fault` says what is wrong.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mezzo.core import records
from mezzo.core.errors import MezzoError, UsageError
from mezzo.core.loss_scale import StaticLossScale
from mezzo.core.policy import policy
from mezzo.report.numbers import scale_text
from mezzo.report.ranges import Ranges
from mezzo.report.series import Array

LOG_LINES = 25
LEFT_ALONE = "left alone: "
"""The note of a run begins so if its script uses mixed precision itself."""
_NAME = re.compile(r"(?P<precision>.+?)(?P<ulp>-ulp)?-(?P<seed>\d+)")


@dataclass(frozen=True)
class Run:
    """The records of one run."""

    name: str  # of its file, without the ending
    precision: str  # the name of its policy
    seed: int  # what was added to the script's own seeds
    nudged: bool  # whether it is a one-ulp twin
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
    def exited(self) -> str:
        """The script's exit status in words."""
        if self.ended is None:
            return "not told"
        return "well" if self.ended.status == 0 else f"exit status {self.ended.status}"

    @property
    def left_alone(self) -> str:
        """Why Mezzo applied no policy to the script; ``""`` if it did."""
        notes = self.ended.notes if self.ended else []
        return next((str(note).partition(": ")[2] for note in notes if str(note).startswith(LEFT_ALONE)), "")

    @property
    def ran_by(self) -> str:
        """The run's heading: its policy, unless none was applied."""
        return "left alone" if self.left_alone else self.precision

    @property
    def finite_losses(self) -> list[float]:
        """The losses that are neither NaN nor infinite."""
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
        """Why updates failed that a smaller loss scale would have kept."""
        if self.constant_scale is not None:
            return f"the constant loss scale {scale_text(self.constant_scale)} is too large for this step"
        return "the loss scale was too large for this step (a smaller one keeps its gradients finite)"

    @property
    def alarms(self) -> int:
        """How many failed updates no smaller loss scale would have kept."""
        return sum(record.finding.alarms for record in self.overflows)

    @property
    def skipped(self) -> list[int]:
        """Indices of the skipped updates."""
        return [update.index for update in self.updates if update.skipped]


def read_run(path: Path, known: Mapping[str, str] | None = None) -> Run:
    """Read a run's file of records. A file that is cut off or broken gives a run with a `fault`.

    Reading stops at the first line that is not a record: a missing loss would shift all that follow. The records of a
    user's own loop (``MixedPrecision(records=...)``) have neither a start nor an end; that is not a fault.

    Args:
        path: the ``.jsonl`` file.
        known: `file_name` of a precision -> the precision as the user wrote it.
    """
    found: defaultdict[str, list[Any]] = defaultdict(list)
    ranges = Ranges()
    read, fault = 0, ""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                if not line.endswith("\n"):  # only the last line can: its writer was killed
                    break
                try:
                    record = records.from_line(line.rstrip("\r\n"))
                except UsageError as error:
                    unread = 1 + sum(rest.endswith("\n") for rest in file)
                    were = "line from there on was" if unread == 1 else "lines from there on were"
                    fault = f"{path.name}:{read + 1}: {error}; {unread:,} {were} not read"
                    break
                read += 1
                if isinstance(record, records.RangesRecord):
                    ranges.add(record)  # a sum: the histograms of a long run would fill the memory
                else:
                    found[record.kind].append(record)
    except OSError as error:
        fault = str(error).replace(f"{path.parent}/", "")
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


def _tail(path: Path) -> str:
    """The last lines of what the script printed, or nothing."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 20_000))
            return "\n".join(file.read().decode("utf-8", errors="replace").splitlines()[-LOG_LINES:])
    except OSError:
        return ""
