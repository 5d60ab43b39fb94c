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
from mezzo.report.numbers import counted
from mezzo.report.ranges import Ranges
from mezzo.report.series import Array

LOG_LINES = 25
_LOST_A_LINE = 1000
LEFT_ALONE = "left alone: "
"""How the note of a run begins whose script chose its precision itself."""
_NAME = re.compile(r"(?P<precision>.+?)(?P<ulp>-ulp)?-(?P<seed>\d+)")


@dataclass(frozen=True)
class Run:
    """What a run left behind.

    Args:
        name: of its file, without the ending.
        precision: the name of its policy.
        seed: what was added to the script's own seeds.
        nudged: whether it is a one-ulp twin.
        losses: of every outermost backward, unscaled; NaN at the places in `lost`.
        lost: places of losses whose lines were not read.
        overflows: a record for each skipped update that was looked into.
        ranges: what was seen of the exponents of its tensors.
        fault: what is wrong with the records; ``""`` where nothing is.
        records: how many lines of the file are records.
        unread: how many are none, or were left unread after one that is none.
        log: the last lines that the script printed.
    """

    name: str
    precision: str
    seed: int
    nudged: bool
    losses: Array
    lost: frozenset[int] = frozenset()
    updates: tuple[records.UpdateRecord, ...] = ()
    started: records.RunStarted | None = None
    memory: records.MemoryRecord | None = None
    ops: tuple[records.OpFormats, ...] = ()
    ended: records.RunEnded | None = None
    overflows: tuple[records.OverflowRecord, ...] = ()
    ranges: Ranges = field(default_factory=Ranges)
    fault: str = ""
    records: int = 0
    unread: int = 0
    log: str = ""

    @property
    def failed(self) -> bool:
        """Whether the run was cut short or its script gave another exit status than 0."""
        return bool(self.fault) or (self.ended is not None and self.ended.status != 0)

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
    def skipped(self) -> list[int]:
        """Indices of the updates that were vetoed."""
        return [update.index for update in self.updates if update.skipped]


def read_run(path: Path, known: Mapping[str, str] | None = None) -> Run:
    """The run that a file of records tells of; a file that breaks off or is broken is a run with a fault.

    Lines that are no record are left out, and the fault says how many. For a comparison, whose runs are laid over
    one another step by step, nothing after the first of them is read: one loss less would shift all that follow.

    The records of a loop of one's own (``MixedPrecision(records=...)``) have neither a beginning nor an end, and
    that is no fault.

    Args:
        path: the ``.jsonl`` file.
        known: `file_name` of a precision -> the precision as it was asked for.
    """
    losses = _Losses()
    updates: list[records.UpdateRecord] = []
    overflows: list[records.OverflowRecord] = []
    ranges = Ranges()
    once: dict[str, Any] = {}
    faults: list[str] = []
    lines = _Lines(path, stops=known is not None)
    try:
        for record in lines:
            if isinstance(record, records.LossRecord):
                losses.add(record, lines.unread)
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
    except OSError as error:
        faults.append(str(error).replace(f"{path.parent}/", ""))
    faults += lines.fault
    of_a_loop = "started" not in once and bool(losses.values or updates)
    if "ended" not in once and not of_a_loop and not faults:
        faults.append("the run was cut short: its records have no end")
    found = _NAME.fullmatch(path.stem)
    started: records.RunStarted | None = once.get("started")
    precision = found["precision"] if found else started.policy if started else path.stem
    return Run(
        name=path.stem,
        precision=(known or {}).get(records.file_name(precision), precision),
        seed=int(found["seed"]) if found else started.seed_offset if started else 0,
        nudged=bool(found and found["ulp"]) or bool(started and started.nudged),
        losses=np.array(losses.values, dtype=float),
        lost=frozenset(losses.lost),
        updates=tuple(updates),
        overflows=tuple(overflows),
        ranges=ranges,
        fault="; ".join(faults),
        records=lines.good,
        unread=lines.unread,
        log=_tail(path.with_suffix(".log")),
        **once,
    )


class _Losses:
    """Losses by their own index: behind a line that was not read, each still stands at its step."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.lost: list[int] = []

    def add(self, record: records.LossRecord, unread: int) -> None:
        """One more.

        Args:
            record: of it.
            unread: lines that were not read so far. Without any there is no gap: several loops may share a file.
        """
        place = len(self.values)
        # A line that was cut may have swallowed those behind it; an index beyond that is itself broken.
        if 0 < record.index - place <= _LOST_A_LINE * unread - len(self.lost):
            self.lost += range(place, record.index)
            self.values += [np.nan] * (record.index - place)
        self.values.append(record.loss)


class _Lines:
    """The records of a file, in order; iterated once.

    Args:
        path: the file.
        stops: whether to read nothing after a line that is no record; its lines are counted still.
    """

    def __init__(self, path: Path, *, stops: bool) -> None:
        self.path = path
        self.stops = stops
        self.good = 0
        self.unread = 0
        self._first = ""

    def __iter__(self) -> Iterator[records.Record]:
        with self.path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):  # only the last can: its writer was killed
                    return
                if self.stops and self.unread:
                    self.unread += 1
                    continue
                try:
                    record = records.from_line(line.rstrip("\r\n"))
                except UsageError as error:
                    self.unread += 1
                    self._first = self._first or f"{self.path.name}:{number}: {error}"
                    continue
                self.good += 1
                yield record

    @property
    def fault(self) -> list[str]:
        """What is wrong, as no sentence or one."""
        if not self.unread:
            return []
        if self.stops:
            return [
                f"{self._first}; {counted(self.unread, 'line')} from there on {_were(self.unread)} not read"
            ]
        which = "" if self.unread == 1 else ", the first"
        told = f"{counted(self.unread, 'line')} of its records {_were(self.unread)} not read{which}: {self._first}"
        return [
            f"{told}; a loss or an update among them is missing from the curves; what follows stands at its step"
        ]


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


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
