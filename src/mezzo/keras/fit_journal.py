"""FitJournal: the records of one `fit`, gathered on the device and written some batches later."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from mezzo.core.ranges import RangeRow, shift_of
from mezzo.core.records import LossRecord, RangesRecord, RecordWriter, RunEnded, RunStarted, UpdateRecord
from mezzo.keras import during_fit, exponents
from mezzo.keras.overflow import Skipped
from mezzo.keras.probe import Counted
from mezzo.keras.recent_losses import RecentLosses
from mezzo.keras.scale_gauge import Reading, ScaleGauge

_LOSSES_REPORTED = (
    "the losses are what the model's own training step reports of each batch: if that is a mean over its epoch so far, "
    "so are they"
)
_LOSSES_UNKNOWN = "no losses: the model's own training step reports none by the name of loss"
_SKIPS_WITHIN = (
    "several steps run in one execution (steps_per_execution): which of them was skipped is not known, the last "
    "are taken"
)
_SCALE_LOST = (
    "the loss scale of keras.optimizers.LossScaleOptimizer has become {}: it never comes back from there. "
    "mezzo.keras.LossScaleOptimizer has a floor and a ceiling"
)


@dataclass
class Look:
    """One watched step.

    Args:
        update: index of its (first) update.
        counted: on the device, of everything but ratios.
        ratios: likewise of update ratios, which count only if the update was not skipped.
        at: seconds since the run began.
    """

    update: int
    counted: list[Counted]
    ratios: list[Counted] = field(default_factory=list)
    at: float = 0.0


class FitJournal:
    """Counts batches, and keeps what there is to write until `read`.

    Args:
        path: the file.
        started: its first record.
        model: that is fitted.
        losses: the model's tracker, if it keeps the last losses.
        steps: that one execution runs.

    Attributes:
        updates: written so far.
        skipped: of those.
        scale: by which the next loss is multiplied, as of the last reading.
        notes: for the end of the run.
    """

    def __init__(
        self, path: Path, started: RunStarted, model: Any, losses: RecentLosses | None, steps: int
    ) -> None:
        self.path = path
        self.updates = self.skipped = 0
        self.notes: list[str] = []
        self.gauge = ScaleGauge(model)
        self._model = model
        self._losses = losses
        self._steps = steps
        self._writer = RecordWriter(path)
        self._zero = time.perf_counter()
        self._before: Any = None  # of the gauge, ahead of the first of `_after`
        self._after: list[tuple[float, Any]] = []
        self._read = 0  # losses of this epoch
        self._looks: list[Look] = []
        self._unsettled: list[Skipped] = []
        self._reported: dict[int, float] = {}
        self._told_losses = 0
        self._ended = False
        self.scale = self.gauge.read([self.gauge.take()])[0].scale
        self._writer.write(started)

    @property
    def waiting(self) -> int:
        """Steps that were begun and are not written."""
        return len(self._after) * self._steps

    def epoch_begins(self) -> None:
        """Whatever was done between two epochs (a callback that reset the loss scale) is no step's doing."""
        self._read = 0
        self._reported = {}
        self._before = self.gauge.take()

    def executed(self) -> None:
        """One call of the training function is over: take what it left on the device."""
        self._after.append((self.now(), self.gauge.take()))

    def reported(self, batch: int, loss: Any) -> None:
        """What Keras's logs say of a batch; possibly from another thread."""
        if self._losses is None and isinstance(loss, float):
            self._reported[batch] = loss

    def looked(self, look: Look) -> None:
        """A watched step is over."""
        look.at = self.now()
        self._looks.append(look)

    def read(self, *, last: bool = False) -> None:
        """Write what waits; waits for the device.

        Args:
            last: of its epoch: the last execution may have run fewer steps than the others, or none.
        """
        taken, self._after = self._after, []
        readings = self.gauge.read([self._before, *(one for _, one in taken)])
        if taken:
            self._before = taken[-1][1]
        losses = self._recent()
        steps = [self._steps] * len(taken)
        if losses is not None and last:
            steps = _shared(len(losses), steps)
        first = self.updates
        skipped: set[int] = set()
        scales: dict[int, float] = {}
        for (at, _), number, before, after in zip(taken, steps, readings, readings[1:]):
            mine = losses[self.updates - first :][:number] if losses is not None else ()
            gone = self.gauge.skipped(before, after, number)
            if gone and number > 1:
                self.note(_SKIPS_WITHIN)
            for place in range(number):
                index, is_skipped = self.updates, place >= number - gone
                scales[index] = before.scale
                if is_skipped:
                    skipped.add(index)
                self._update(index, at, before, after, is_skipped, mine[place] if place < len(mine) else None)
        self.scale = readings[-1].scale
        self._write_ranges(scales, skipped)
        if last:
            self._write_reported()
            self._note_lost_scale()

    def end(self, status: int, *notes: str) -> None:
        """The last record."""
        for one in self._unsettled:
            self._writer.write(one.explained(None))
        self._unsettled.clear()
        for text in notes:
            self.note(text)
        self._ended = True
        self._writer.write(RunEnded(status, self.now(), list(self.notes)))
        self._writer.close()

    def abandon(self) -> None:
        """The training was broken off: write what waits, if it can still be read, and no end."""
        if self._ended:
            return
        self._ended = True
        # The interpreter may be going down, or the device have failed: the records so far are on disk.
        with suppress(Exception):
            self.read(last=True)
        self._writer.close()

    def note(self, text: str) -> None:
        """Something that the user should read; said once."""
        if text not in self.notes:
            self.notes.append(text)

    def now(self) -> float:
        """Seconds since the run began, as records have them."""
        return time.perf_counter() - self._zero

    def _recent(self) -> list[float] | None:
        """The losses since the last reading; None where the model keeps none."""
        if self._losses is None:
            return None
        recent, seen = during_fit.values(self._model, [self._losses.recent, self._losses.seen])
        values = np.asarray(keras.ops.convert_to_numpy(recent)).tolist()
        now = int(keras.ops.convert_to_numpy(seen))
        first, self._read = self._read, now
        return [values[place % len(values)] for place in range(max(first, now - len(values)), now)]

    def _update(
        self, index: int, at: float, before: Reading, after: Reading, skipped: bool, loss: float | None
    ) -> None:
        """One step's records."""
        if loss is not None:
            self._writer.write(LossRecord(self._told_losses, loss, at))
            self._told_losses += 1
        bad = self.gauge.bad(after) if skipped else []
        reason = ""
        if skipped:
            named = f" of {bad[-1]}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "") if bad else ""
            reason = f"gradients{named} not finite"
        self._writer.write(
            UpdateRecord(
                index=index,
                optimizer=0,
                moved=not skipped,
                skipped=skipped,
                loss_scale=before.scale,
                at=at,
                reason=reason,
            )
        )
        self.updates += 1
        if skipped:
            self.skipped += 1
            self._unsettled.append(Skipped(index, at, before.scale, loss, tuple(bad)))
            return
        for one in self._unsettled:
            self._writer.write(one.explained(before.scale))
        self._unsettled.clear()

    def _write_ranges(self, scales: dict[int, float], skipped: set[int]) -> None:
        looks, self._looks = self._looks, []
        for look in looks:
            if look.update not in scales:  # begun, and never run
                continue
            scale = scales[look.update]
            counted = look.counted + ([] if look.update in skipped else look.ratios)
            found = exponents.read(
                [one.words for one in counted], [-shift_of(scale) if one.scaled else 0 for one in counted]
            )
            rows: dict[tuple[str, ...], RangeRow] = {}
            for one, histogram in zip(counted, found, strict=True):
                key = (one.module, one.what, one.name)
                if key in rows:  # a layer that is called more than once
                    histogram = rows[key].histogram.plus(histogram)
                rows[key] = RangeRow(one.module, one.what, one.format, histogram, one.name)
            self._writer.write(RangesRecord(look.update, 0, look.at, scale, list(rows.values())))

    def _write_reported(self) -> None:
        """Of a model that keeps no losses: those of its logs, when all of the epoch's are there."""
        if self._losses is not None:
            return
        self.note(_LOSSES_REPORTED if self._reported else _LOSSES_UNKNOWN)
        for _, loss in sorted(self._reported.items()):
            self._writer.write(LossRecord(self._told_losses, loss, self.now()))
            self._told_losses += 1
        self._reported = {}

    def _note_lost_scale(self) -> None:
        if self.gauge.moves and (self.scale == 0 or math.isinf(self.scale)):
            self.note(_SCALE_LOST.format(self.scale))


def _shared(total: int, steps: Sequence[int]) -> list[int]:
    """So many steps, shared out over executions, in order, that run at most so many each."""
    shared = []
    for most in steps:
        shared.append(min(most, total))
        total -= shared[-1]
    return shared
