"""What `MixedPrecision` counts of its losses and updates, and writes down where records were asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from weakref import finalize

from torch import Tensor

from mezzo.core.records import LossRecord, Record, RecordWriter, UpdateRecord
from mezzo.pytorch.training.result import StepResult

EVERY = 16
"""Updates whose records are read and written together: reading one number waits for the device."""

_Entry = tuple[int, float, Tensor | StepResult]


class Journal:
    """Counts losses and updates, and keeps what there is to write until it is flushed.

    Args:
        writer: of a run's records; None to count only.
    """

    def __init__(self, writer: RecordWriter | None) -> None:
        self.losses = 0
        self.updates = 0
        self._writer = writer
        # Seconds since the run began, as records have them; whoever holds the clock does not hold the journal.
        self.now = partial(_since, time.monotonic())
        self._kept: list[_Entry] = []
        self._sources: list[Callable[[], list[Record]]] = []
        if writer is not None:
            # Whoever forgets close() has the records all the same.
            finalize(self, _write, writer, self._kept, self._sources)

    def loss(self, value: Tensor) -> None:
        """A loss was handed in: 0-dim, detached."""
        if self._writer is not None:
            self._kept.append((self.losses, self.now(), value))
        self.losses += 1

    def update(self, result: StepResult) -> None:
        """The optimizer's turn has come and gone."""
        if self._writer is not None:
            self._kept.append((self.updates, self.now(), result))
            if (self.updates + 1) % EVERY == 0:
                self.flush()
        self.updates += 1

    def flush(self) -> None:
        """Read and write what was kept; waits for the device once for all of it."""
        if self._writer is not None:
            _write(self._writer, self._kept, self._sources)

    def also(self, source: Callable[[], list[Record]]) -> None:
        """Write what this gives, whenever there is something to write."""
        self._sources.append(source)


def _since(start: float) -> float:
    return time.monotonic() - start


def _write(writer: RecordWriter, kept: list[_Entry], sources: list[Callable[[], list[Record]]]) -> None:
    entries, kept[:] = list(kept), []
    for index, at, what in entries:
        if isinstance(what, Tensor):
            writer.write(LossRecord(index, float(what), at))
            continue
        writer.write(
            UpdateRecord(
                index=index,
                optimizer=0,
                moved=what.moved,
                skipped=what.skipped,
                loss_scale=what.loss_scale,
                at=at,
                reason=what.reason,
            )
        )
    for source in sources:
        for record in source():
            writer.write(record)
