"""Journal: turns the events of a run into records, in order, without making a GPU wait at every step."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mezzo.core import records
from mezzo.core.commands import say
from mezzo.core.errors import UsageError
from mezzo.core.ranges import Merged, merge

_BATCH = 50
# What `torch.utils.tensorboard` writes with. It imports neither torch nor TensorFlow.
WRITER = "tensorboard.summary.writer.event_file_writer"


class Journal:
    """Counts and writes down one run; a `path` of None counts only, and `widen` turns the writer into the right one.

    If it `tells`, the first finding to fix is printed at once: the summary may be hours away.
    """

    def __init__(
        self,
        path: Path | None,
        started: Callable[[], records.RunStarted],
        widen: Callable[[records.RecordWriter | None], records.RecordWriter | None] | None = None,
        tells: bool = False,
    ) -> None:
        self._widen, self.tells, self._path = widen, tells, path
        try:
            self._writer = None if path is None else records.RecordWriter(path)
        except OSError as error:
            raise UsageError(
                f"can't write records to {str(path)!r}: {error.strerror}. Give a writable file in an existing folder. "
                "Example: --records run.jsonl"
            ) from error
        # Called with the first event: only then is the device known.
        self._make_started: Callable[[], records.RunStarted] | None = started
        self._zero = time.perf_counter()
        self._queue: list[tuple[records.Record, Any]] = []
        self._held = False
        self.losses = 0
        self.last_loss: Any = 0.0  # read at the end only: it may be on a device
        self.updates = self.skipped = 0
        self.first_updates = 0  # of the first optimizer
        self.ops: list[records.OpFormats] = []
        self.findings: list[records.OverflowRecord] = []
        self.ranges: Merged = {}  # of all watched updates
        self.notes: list[str] = []

    @property
    def writes(self) -> bool:
        """Whether records are written; until the first one is due, whether they may be."""
        return self._writer is not None or (self._widen is not None and self._make_started is not None)

    def note(self, text: str) -> None:
        """A message for the user; kept once."""
        if text not in self.notes:
            self.notes.append(text)

    def loss(self, value: Any, at: float | None = None) -> None:
        """An outermost backward on this loss: a float, or a 0-dim tensor that does not change; `at` if not now."""
        if self.writes:
            self._put(records.LossRecord(self.losses, math.nan, self.now() if at is None else at), value)
        self.losses += 1
        self.last_loss = value

    def update(
        self,
        optimizer: int,
        *,
        moved: bool,
        loss_scale: float,
        reason: str = "",
        observed: bool = False,
        at: float | None = None,
    ) -> None:
        """An optimizer's step that moved the parameters, or was skipped; `at` if not now."""
        if self.writes:
            index, at = self.updates, self.now() if at is None else at
            self._put(
                records.UpdateRecord(index, optimizer, moved, not moved, loss_scale, at, reason, observed)
            )
        self.count(optimizer)
        self.skipped += not moved

    def count(self, optimizer: int | None) -> None:
        """Count an update of this optimizer, where no records are written."""
        self.updates += 1
        self.first_updates += optimizer == 0

    def stop_after(self, wanted: int | None) -> None:
        """Raise `SystemExit` once the first optimizer has made so many updates, if that is wanted."""
        if wanted is not None and self.first_updates >= wanted:
            self.note(f"ended after {wanted} updates of the first optimizer, as requested")
            raise SystemExit(0)

    def observed(self, memory: records.MemoryRecord | None, ops: list[records.OpFormats] | None) -> None:
        """The measurements of the observed step."""
        if memory is not None:
            self._put(memory)
        if ops is not None:
            self.ops = ops
            self._put(records.OpsRecord(ops))

    def seen(self, found: Iterable[records.Record]) -> None:
        """Records of the observers."""
        for record in found:
            if isinstance(record, records.OverflowRecord):
                self.findings.append(record)
                if self.tells and record.finding.alarms:
                    self.tells = False
                    say(f"mezzo: update {record.update} skipped: {record.finding}")
            elif isinstance(record, records.RangesRecord):
                merge(self.ranges, record.rows)
            self._put(record)

    def end(self, status: int) -> None:
        """The script is over: write everything that waits, then the end."""
        self._put(records.RunEnded(status=status, seconds=self.now(), notes=list(self.notes)))
        self.close()

    def close(self) -> None:
        """Write everything that waits, without an end: the run was broken off."""
        self.flush()
        if self._writer is not None:
            self._writer.close()

    def give_way(self) -> None:
        """This process only started others, which trained: the records of the first of them take this file's name."""
        self._make_started = None
        if self._writer is not None and self._path is not None:
            self._writer.close()
            self._writer = None
            self._path.unlink()
            for first in ("rank0", "child1"):
                file = self._path.with_name(f"{self._path.stem}-{first}{self._path.suffix}")
                if file.exists() and not self._path.exists():
                    file.replace(self._path)

    def flush(self) -> None:
        """Write everything that waits; reads losses from the device."""
        queue, self._queue = self._queue, []
        self._held = False
        for record, value in queue:
            if isinstance(record, records.LossRecord):
                record = replace(record, loss=number(value))
            if self._writer is not None:
                self._writer.write(record)

    def begin(self) -> None:
        """Write the `run` record now, if it is not there yet."""
        if self._make_started is not None:
            make, self._make_started = self._make_started, None
            if self._widen is not None:
                self._writer = self._widen(self._writer)
            if self._writer is not None:
                self._writer.write(make())

    def _put(self, record: records.Record, value: Any = None) -> None:
        self.begin()
        if self._writer is None:
            return
        self._queue.append((record, value))
        device = getattr(value, "device", None)
        self._held = self._held or (device is not None and device.type != "cpu")
        if not self._held or len(self._queue) >= _BATCH:
            self.flush()

    def now(self) -> float:
        """Seconds since the run began, as records have them."""
        return time.perf_counter() - self._zero


def of_rank(path: Path, rank: int | None) -> Path:
    """The file of this rank's records, next to the run's own; of a process without a rank the first name that is free.

    >>> of_rank(Path("runs/run.jsonl"), 1).as_posix()
    'runs/run-rank1.jsonl'
    """
    if rank is not None:
        return path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
    for number in itertools.count(1):
        file = path.with_name(f"{path.stem}-child{number}{path.suffix}")
        with contextlib.suppress(FileExistsError):
            file.touch(exist_ok=False)
            break
    return file


def number(value: Any) -> float:
    """The value of a loss; NaN for a tensor without one."""
    try:
        return float(value)
    except (RuntimeError, ValueError, TypeError):  # a tensor without storage: meta, fake
        return math.nan


def check_events(folder: Path) -> None:
    """Make a folder for TensorBoard's events; UsageError if TensorBoard is missing or the folder can't be written."""
    try:
        importlib.import_module(WRITER)
    except Exception as error:  # also a folder called tensorboard, or a protobuf that does not go with it
        raise UsageError(
            f"--tensorboard {folder}: the package tensorboard can't be imported ({type(error).__name__}: {error}). "
            "Install it: pip install tensorboard"
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        why = "is a file" if folder.is_file() else error.strerror
        raise UsageError(f"--tensorboard {folder}: {why}. Choose a writable folder.") from error
