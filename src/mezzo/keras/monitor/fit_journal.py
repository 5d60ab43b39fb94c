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
from mezzo.keras.monitor import during_fit, exponents
from mezzo.keras.monitor.overflow import Skipped
from mezzo.keras.monitor.probe import Counted
from mezzo.keras.monitor.recent_losses import RecentLosses
from mezzo.keras.monitor.scale_gauge import Reading, ScaleGauge, gauges_of

_LOSSES_REPORTED = (
    "the losses are what the model's own training step reports of each batch: if that is a mean over its epoch so far, "
    "so are they"
)
_LOSSES_UNKNOWN = "no losses: the model's own training step reports none by the name of loss"
_SKIPS_WITHIN = (
    "several steps run in one execution (steps_per_execution): which of them was skipped is not known, the last "
    "are taken"
)
_NO_STEP = (
    "the optimizer that compile was given ({}) never stepped: its loss scale and its steps are not shown. "
)
_OTHERS_STEPPED = "Those that stepped are {}"
_NONE_STEPPED = (
    "No other optimizer that an attribute of the model holds was seen to step either: no updates are recorded"
)
_UNSCALED = (
    "{} ({}) steps without a loss scale, and layers compute in float16: gradients under 2^-24 become 0. Wrap it: "
    "mezzo.keras.LossScaleOptimizer({}(...)), and take the gradients of its scale_loss(loss)"
)
_SCALE_LOST = (
    "the loss scale of keras.optimizers.LossScaleOptimizer has become {}: it never comes back from there. "
    "mezzo.keras.LossScaleOptimizer has a floor and a ceiling"
)


@dataclass
class Look:
    """One watched step.

    Args:
        step: its index.
        counted: on the device, of everything but ratios.
        ratios: likewise of update ratios, which count only if the update was not skipped.
        at: seconds since the run began.
    """

    step: int
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
        steps: of training, written so far.
        updates: written so far, of all optimizers.
        skipped: of those.
        scales: of each optimizer that steps and has a loss scale, by its name: what the next loss is multiplied by, as
            of the last reading.
        notes: for the end of the run.
        steps_of_epoch: where Keras knows it.
    """

    def __init__(
        self, path: Path, started: RunStarted, model: Any, losses: RecentLosses | None, steps: int
    ) -> None:
        self.path = path
        self.steps = self.updates = self.skipped = 0
        self.steps_of_epoch: int | None = None
        self.notes: list[str] = []
        self.gauges = gauges_of(model)
        self._model = model
        self._losses = losses
        self._each = steps
        self._writer = RecordWriter(path)
        self._zero = time.perf_counter()
        self._before: list[Any] = [None] * len(self.gauges)  # ahead of the first of `_after`
        self._after: list[tuple[float, list[Any]]] = []
        self._numbers: dict[
            int, int
        ] = {}  # place of a gauge -> number of its optimizer, in the order of first steps
        self._skipped_of: dict[str, int] = {}
        self._now = [one.read([one.take()])[0].scale for one in self.gauges]
        self._read = 0  # losses of this epoch
        self._epoch: tuple[int, int] = (0, 0)  # executions and steps written of this epoch
        self._looks: list[Look] = []
        self._unsettled: list[Skipped] = []
        self._reported: dict[int, float | None] = {}
        self._told_losses = self._told_before = 0
        self._ended = False
        self._writer.write(started)

    @property
    def stepping(self) -> list[ScaleGauge]:
        """Of the optimizers that have stepped; before the first reading the one of `compile`, if there is no other."""
        if not self.steps and len(self.gauges) == 1:
            return self.gauges
        return [self.gauges[place] for place in self._numbers]

    @property
    def numbers(self) -> dict[str, float]:
        """What the logs show: loss scale and skipped steps; of each optimizer, by its name, where several step."""
        scaled = [one for one in self.stepping if one.is_scaled]
        found: dict[str, float] = {}
        for one in scaled:
            end = f"_{one.name}" if len(self.stepping) > 1 else ""
            found[f"loss_scale{end}"] = self._now[self.gauges.index(one)]
            found[f"skipped_steps{end}"] = self._skipped_of.get(one.name, 0)
        return found

    @property
    def waiting(self) -> int:
        """Steps that were begun and are not written."""
        return len(self._after) * self._each

    def epoch_begins(self) -> None:
        """Whatever was done between two epochs (a callback that reset the loss scale) is no step's doing."""
        self._read = 0
        self._epoch = (0, 0)
        self._reported = {}
        self._told_before = self._told_losses
        self._before = [one.take() for one in self.gauges]

    def epoch_ends(self) -> None:
        """All of the epoch's logs were told."""
        if self._losses is None:
            self._write_reported()

    def executed(self) -> None:
        """One call of the training function is over: take what it left on the device."""
        self._after.append((self.now(), [one.take() for one in self.gauges]))

    def reported(self, batch: int, loss: Any) -> None:
        """What Keras's logs say of a batch; possibly from another thread."""
        wanted = self._losses is None or not self._read
        self._reported[batch] = loss if wanted and isinstance(loss, float) else None

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
        rows = [
            one.read([before, *(held[place] for _, held in taken)])
            for place, (one, before) in enumerate(zip(self.gauges, self._before, strict=True))
        ]
        if taken:
            self._before = taken[-1][1]
        self._now = [readings[-1].scale for readings in rows]
        losses = self._recent()
        steps = self._steps_of(len(taken), rows, losses, last=last)
        # Of a training that was broken off, or met the data's end, the tracker may have counted one more.
        if losses is not None and last and self._read:
            losses = losses[: sum(steps)]
        if losses is not None and len(losses) != sum(steps):
            self._losses = losses = (
                None  # a training step of the model's own, which leaves Keras's tracker out
            )
        where: dict[int, tuple[int, float, bool]] = {}
        for place, ((at, _), number) in enumerate(zip(taken, steps, strict=True)):
            mine = [losses.pop(0) for _ in range(number)] if losses is not None else [None] * number
            pairs = [(readings[place], readings[place + 1]) for readings in rows]
            movers = [one for one, pair in enumerate(pairs) if number and self.gauges[one].stepped(*pair)]
            gone = {one: self._gone(one, pairs[one], number) for one in movers}
            for step in range(number):
                index = self.updates
                for one in movers:
                    self._update(one, at, pairs[one], step >= number - gone[one], mine[step])
                all_skipped = bool(movers) and all(step >= number - gone[one] for one in movers)
                where[self.steps] = (
                    index,
                    pairs[0][0].scale,
                    all_skipped,
                )  # the probe takes the scale of `compile`
                self._loss(mine[step], at)
                self.steps += 1
        executions, written = self._epoch
        self._epoch = executions + len(taken), written + sum(steps)
        self._write_ranges(where)
        if last:
            self._note_optimizers()

    def _steps_of(
        self, taken: int, rows: list[list[Reading]], losses: list[float] | None, *, last: bool
    ) -> list[int]:
        """Steps of each of so many executions; the last of an epoch may have run fewer, or none."""
        steps = [self._each] * taken
        if not last or not taken:
            return steps
        heard = self._epoch[0] + taken <= len(self._reported)
        if self._each == 1 and not heard and not self._ended and keras.backend.backend() == "tensorflow":
            # There nobody tells of a batch later, and a step that has met the data's end in its graph may have
            # counted itself before.
            return [*steps[:-1], 0]
        # What Keras's tracker counted is exact, if it was told of the steps at all.
        if losses is not None and self._read and sum(steps[1:]) <= len(losses) <= sum(steps):
            return _shared(len(losses), steps)
        _, written = self._epoch
        if self.steps_of_epoch:
            return _shared(max(0, self.steps_of_epoch - written), steps)
        # The data's end is met inside of an execution that was begun. The logs of one that ran may come later.
        ran = heard or any(
            one.stepped(*readings[-2:]) for one, readings in zip(self.gauges, rows, strict=True)
        )
        return steps if ran else [*steps[:-1], 0]

    def _gone(self, place: int, pair: tuple[Reading, Reading], number: int) -> int:
        """Skipped steps of an optimizer in one execution; it has a number from here on."""
        self._numbers.setdefault(place, len(self._numbers))
        gone = self.gauges[place].skipped(*pair, number)
        if gone and number > 1:
            self.note(_SKIPS_WITHIN)
        return gone

    def end(self, status: int, *notes: str) -> None:
        """The last record."""
        for one in self._unsettled:
            self._writer.write(one.explained(None))
        self._unsettled.clear()
        for text in notes:
            self.note(text)
        self._ended = True
        self._note_no_step()
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
            self.epoch_ends()
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

    def _loss(self, loss: float | None, at: float) -> None:
        if loss is not None:
            self._writer.write(LossRecord(self._told_losses, loss, at))
            self._told_losses += 1

    def _update(
        self, place: int, at: float, pair: tuple[Reading, Reading], skipped: bool, loss: float | None
    ) -> None:
        """One optimizer's step."""
        gauge, number, (before, after) = self.gauges[place], self._numbers[place], pair
        bad = gauge.bad(after) if skipped else []
        reason = ""
        if skipped:
            named = f" of {bad[-1]}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "") if bad else ""
            reason = f"gradients{named} not finite"
        index = self.updates
        self._writer.write(
            UpdateRecord(
                index=index,
                optimizer=number,
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
            self._skipped_of[gauge.name] = self._skipped_of.get(gauge.name, 0) + 1
            self._unsettled.append(Skipped(index, at, before.scale, loss, tuple(bad), number))
            return
        for one in self._unsettled:
            if one.optimizer == number:
                self._writer.write(one.explained(before.scale))
        self._unsettled = [one for one in self._unsettled if one.optimizer != number]

    def _write_ranges(self, where: dict[int, tuple[int, float, bool]]) -> None:
        """Of the steps that were watched: their index -> that of the update, the probe's scale, whether skipped."""
        looks, self._looks = self._looks, []
        for look in looks:
            if look.step not in where:  # begun, and never run
                continue
            update, scale, is_skipped = where[look.step]
            counted = look.counted + ([] if is_skipped else look.ratios)
            found = exponents.read(
                [one.words for one in counted], [-shift_of(scale) if one.scaled else 0 for one in counted]
            )
            rows: dict[tuple[str, ...], RangeRow] = {}
            for one, histogram in zip(counted, found, strict=True):
                key = (one.module, one.what, one.name)
                if key in rows:  # a layer that is called more than once
                    histogram = rows[key].histogram.plus(histogram)
                rows[key] = RangeRow(one.module, one.what, one.format, histogram, one.name)
            self._writer.write(RangesRecord(update, 0, look.at, scale, list(rows.values())))

    def _write_reported(self) -> None:
        """Of a model that keeps no losses: those of its logs, when all of the epoch's are there."""
        known = [loss for _, loss in sorted(self._reported.items()) if loss is not None]
        self.note(_LOSSES_REPORTED if known else _LOSSES_UNKNOWN)
        # Some are there already, of an epoch in which the tracker stopped to count what the step does.
        for loss in known[self._told_losses - self._told_before :]:
            self._loss(loss, self.now())
        self._reported = {}
        self._told_before = self._told_losses

    def _note_optimizers(self) -> None:
        """What the user should know of those that stepped, and of one that did not."""
        for place in self._numbers:
            gauge, scale = self.gauges[place], self._now[place]
            if gauge.moves and (scale == 0 or math.isinf(scale)):
                self.note(_SCALE_LOST.format(scale))
            if not gauge.is_scaled and gauge.optimizer is not None and self._has_float16():
                kind = type(gauge.optimizer).__name__
                self.note(_UNSCALED.format(gauge.name, kind, kind))

    def _note_no_step(self) -> None:
        """At the end: who stepped in the place of the optimizer that `compile` was given."""
        if not self.steps or 0 in self._numbers:
            return
        others = ", ".join(one.name for one in self.stepping)
        kind = type(self.gauges[0].optimizer).__name__
        self.note(_NO_STEP.format(kind) + (_OTHERS_STEPPED.format(others) if others else _NONE_STEPPED))

    def _has_float16(self) -> bool:
        layers = self._model._flatten_layers(include_self=False)
        return any(one.compute_dtype == "float16" and one.trainable_variables for one in layers)


def _shared(total: int, steps: Sequence[int]) -> list[int]:
    """So many steps, shared out over executions, in order, that run at most so many each."""
    shared = []
    for most in steps:
        shared.append(min(most, total))
        total -= shared[-1]
    return shared
