"""What `MixedPrecision` counts of its losses and updates, and writes down where records were asked for."""

from __future__ import annotations

import time

from torch import Tensor

from mezzo.core.records import LossRecord, RecordWriter, UpdateRecord
from mezzo.pytorch.training.result import StepResult


class Journal:
    """Counts losses and updates; each is read and written if there is a writer, which waits for the device.

    Args:
        writer: of a run's records; None to count only.
    """

    def __init__(self, writer: RecordWriter | None) -> None:
        self.losses = 0
        self.updates = 0
        self._writer = writer
        self._started = time.monotonic()

    def loss(self, value: Tensor) -> None:
        """A loss was handed in: 0-dim, detached."""
        if self._writer is not None:
            self._writer.write(LossRecord(self.losses, float(value), self._now()))
        self.losses += 1

    def update(self, result: StepResult) -> None:
        """The optimizer's turn has come and gone."""
        if self._writer is not None:
            self._writer.write(
                UpdateRecord(
                    index=self.updates,
                    optimizer=0,
                    moved=result.moved,
                    skipped=result.skipped,
                    loss_scale=result.loss_scale,
                    at=self._now(),
                    reason=result.reason,
                )
            )
        self.updates += 1

    def _now(self) -> float:
        return time.monotonic() - self._started
