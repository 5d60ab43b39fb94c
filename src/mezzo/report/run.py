"""One run's records, taken apart: losses and updates in order, what was measured once, what was found out.

Tolerant by design: a report is wanted most when something went wrong. A run that crashed, was killed or left a
broken file is kept with what it has and a fault to be shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mezzo.core import records
from mezzo.core.errors import MezzoError, UsageError
from mezzo.core.loss_scale import StaticLossScale
from mezzo.core.policy import policy
from mezzo.report.numbers import counted, scale_text
from mezzo.report.ranges import Ranges
from mezzo.report.series import Array

LOG_LINES = 25
_LOST_A_LINE = 1000
LEFT_ALONE = "left alone: "
"""How the note of a run begins whose script chose its precision itself."""
_NAME = re.compile(r"(?P<precision>.+?)(?P<ulp>-ulp)?-(?P<seed>\d+)")


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    name: str  # of its file, without the ending
    precision: str  # the name of its policy
    seed: int  # what was added to the script's own seeds
    nudged: bool  # whether it is a one-ulp twin
    losses: Array  # of every outermost backward, unscaled; NaN at the places in `lost`
    lost: frozenset[int] = frozenset()  # places of losses whose lines were not read
    updates: tuple[records.UpdateRecord, ...] = ()
    started: records.RunStarted | None = None
    memory: records.MemoryRecord | None = None
    ops: tuple[records.OpFormats, ...] = ()
    ended: records.RunEnded | None = None
    overflows: tuple[records.OverflowRecord, ...] = ()  # one for each skipped update that was looked into
    ranges: Ranges = field(default_factory=Ranges)  # what was seen of the exponents of its tensors
    fault: str = ""  # what is wrong with the records
    records: int = 0  # how many lines of the file are records
    unread: int = 0  # how many are not, or were left unread after one that is not
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
        """Why the script was left to its own precision; ``""`` where it was not."""
        notes = self.ended.notes if self.ended else []
        return next((str(note).partition(": ")[2] for note in notes if str(note).startswith(LEFT_ALONE)), "")

    @property
    def ran_by(self) -> str:
        """What to head the run with: its policy, unless nothing ran by it."""
        return "left alone" if self.left_alone else self.precision

    @property
    def recorded_losses(self) -> int:
        """How many losses were read."""
        return len(self.losses) - len(self.lost)

    @property
    def finite_losses(self) -> list[float]:
        """The losses that are neither NaN nor infinite."""
        found: list[float] = self.losses[np.isfinite(self.losses)].tolist()
        return found

    @property
    def constant_scale(self) -> float | None:
        """The loss scale, if the run's policy has a constant one; None where it has another, or none is told."""
        try:
            found = policy(self.started.policy).make_loss_scale() if self.started else None
        except MezzoError:  # a newer version's, or no policy at all
            return None
        return found.scale if isinstance(found, StaticLossScale) else None

    @property
    def steady_scale(self) -> float | None:
        """The loss scale of every update, if a skipped one did not make it smaller; else None."""
        scales = {update.loss_scale for update in self.updates}
        return scales.pop() if len(scales) == 1 and any(u.skipped for u in self.updates[:-1]) else None

    @property
    def lasting(self) -> bool:
        """Whether a loss scale that is too large stays so: nothing made it smaller."""
        return self.constant_scale is not None or self.steady_scale is not None

    @property
    def too_high(self) -> str:
        """Why updates failed that a smaller loss scale would have kept."""
        if self.constant_scale is not None:
            return f"the constant loss scale {scale_text(self.constant_scale)} is too large for this step"
        if self.steady_scale is not None:
            return f"the loss scale, {scale_text(self.steady_scale)} in all of this run, is too large for this step"
        return (
            "the loss scale was finding its height (gradients overflow at this one, and not at a smaller one)"
        )

    @property
    def alarms(self) -> int:
        """How many failed updates no smaller loss scale would have kept."""
        return sum(record.finding.alarms for record in self.overflows)

    @property
    def skipped(self) -> list[int]:
        """Indices of the updates that were vetoed."""
        return [update.index for update in self.updates if update.skipped]


def read_run(path: Path, known: Mapping[str, str] | None = None) -> Run:
    """The run that a file of records tells of; a file that breaks off or is broken is a run with a fault.

    Lines that are not records are left out, and the fault says how many. For a comparison, whose runs are laid over
    one another step by step, nothing after the first of them is read: one loss less would shift all that follow.

    The records of a loop of one's own (``MixedPrecision(records=...)``) have neither a beginning nor an end, and
    that is not a fault.

    Args:
        path: the ``.jsonl`` file.
        known: `file_name` of a precision -> the precision as it was asked for.
    """
    losses: list[float] = []
    lost: list[int] = []
    updates: list[records.UpdateRecord] = []
    overflows: list[records.OverflowRecord] = []
    ranges = Ranges()
    once: dict[str, Any] = {}
    lines = _Lines(path, stops=known is not None)
    for record in lines:
        if isinstance(record, records.LossRecord):
            # A line that was cut may have swallowed those behind it; an index beyond that is itself broken. Without any
            # such line there is no gap: several loops may share a file.
            if 0 < record.index - len(losses) <= _LOST_A_LINE * lines.unread - len(lost):
                lost += range(len(losses), record.index)
                losses += [np.nan] * (record.index - len(losses))
            losses.append(record.loss)
        elif isinstance(record, records.UpdateRecord):
            updates.append(record)
        elif isinstance(record, records.RangesRecord):
            ranges.add(record)
        elif isinstance(record, records.OverflowRecord):
            overflows.append(record)
        elif isinstance(record, records.OpsRecord):
            once["ops"] = tuple(record.ops)
        elif not isinstance(record, records.SensitivityRecord):  # `mezzo calibrate` shows those
            once[{"run": "started", "memory": "memory", "end": "ended"}[record.kind]] = record
    fault = lines.fault
    of_a_loop = "started" not in once and bool(losses or updates)
    if "ended" not in once and not of_a_loop:
        fault = fault or "the run was cut short: its records have no end"
    found = _NAME.fullmatch(path.stem)
    started: records.RunStarted | None = once.get("started")
    precision = found["precision"] if found else started.policy if started else path.stem
    return Run(
        name=path.stem,
        precision=(known or {}).get(records.file_name(precision), precision),
        seed=int(found["seed"]) if found else started.seed_offset if started else 0,
        nudged=bool(found and found["ulp"]) or bool(started and started.nudged),
        losses=np.array(losses, dtype=float),
        lost=frozenset(lost),
        updates=tuple(updates),
        overflows=tuple(overflows),
        ranges=ranges,
        fault=fault,
        records=lines.good,
        unread=lines.unread,
        log=_tail(path.with_suffix(".log")),
        **once,
    )


class _Lines:
    """The records of a file, in order; iterated once. With ``stops`` none after a line that is not a record."""

    def __init__(self, path: Path, *, stops: bool) -> None:
        self.path = path
        self.stops = stops
        self.good = 0
        self.unread = 0
        self._unreadable = ""
        self._first = ""

    def __iter__(self) -> Iterator[records.Record]:
        try:
            with self.path.open(encoding="utf-8", errors="replace", newline="\n") as file:
                yield from self._of(file)
        except OSError as error:
            self._unreadable = str(error).replace(f"{self.path.parent}/", "")

    def _of(self, file: Iterator[str]) -> Iterator[records.Record]:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):  # only the last can: its writer was killed
                return
            try:
                record = None if self.stops and self.unread else records.from_line(line.rstrip("\r\n"))
            except UsageError as error:
                record, self._first = None, self._first or f"{self.path.name}:{number}: {error}"
            if record is None:
                self.unread += 1
            else:
                self.good += 1
                yield record

    @property
    def fault(self) -> str:
        """What is wrong, or nothing."""
        if self._unreadable or not self.unread:
            return self._unreadable
        lines, were = counted(self.unread, "line"), "was" if self.unread == 1 else "were"
        if self.stops:
            return f"{self._first}; {lines} from there on {were} not read"
        which = "" if self.unread == 1 else ", the first"
        return (
            f"{lines} of its records {were} not read{which}: {self._first}; a loss or an update among them is missing "
            "from the curves; what follows stands at its step"
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
