"""PrecisionMonitor: a Keras callback that shows and records what mixed precision does to a training."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from weakref import finalize

import keras
import numpy as np
import numpy.typing as npt

from mezzo.core.errors import LossScaleCollapseError, MezzoError, UsageError
from mezzo.core.overflow import OverflowReport
from mezzo.core.policy_text import print_loss_scale
from mezzo.core.ranges import BINS, NAN, ZERO, Histogram, RangeRow
from mezzo.core.records import OverflowRecord, RangesRecord, RunStarted
from mezzo.core.remedies import remedies as remedies_of
from mezzo.keras.hardware import describe
from mezzo.keras.loss_scale_optimizer import LossScaleOptimizer
from mezzo.keras.plan import NAMES, POLICIES, plan
from mezzo.keras.steps import Step, StepReader, Update, around, keep_losses, steps_per_call
from mezzo.runner.journal import Journal, now_text

DEFAULT_WATCH = 100
"""Updates from one that is watched to the next."""

EVERY = 16
"""Batches whose records are read and written together: reading waits for the device."""

NAMED = 12
"""Variables that a finding names at most."""

_NO_RATIOS = (
    "watch: several steps run in one execution (steps_per_execution), so how far a single update moves a weight is not "
    "seen: no update ratios"
)
_UNSCALED = (
    "{0} ({1}) steps without a loss scale, and layers compute in float16: gradients under 2^-24 become 0. Wrap it: "
    "mezzo.keras.LossScaleOptimizer({1}(...)), and take the gradients of its scale_loss(loss)"
)
_NEVER_STEPPED = (
    "the optimizer that compile was given ({}) never stepped: its loss scale and its steps are not shown. Optimizers "
    "in attributes of the model that stepped: {}"
)
_LOST = (
    "{path}{more} is NaN or infinite at the end of epoch {epoch}, and stays so; inference and validation read it. "
    "Train again, or from a checkpoint before it, without the batches that do this, in `bf16`, or with FP32 for "
    "{layer} and for the layer before it that overflows (`fp16,module.{layer}=fp32,module.LAYER=fp32` in "
    "`mezzo.keras.set_policy`; {layer} alone reads the infinities of the other)"
)


class PrecisionMonitor(keras.callbacks.Callback):
    """Progress, loss scale, skipped steps, ranges and records of each `fit`, from which ``mezzo report`` makes a page.

    ::

        model.fit(x, y, callbacks=[mezzo.keras.PrecisionMonitor("mezzo-run", watch=100)])

    Keras's progress bar and History show `loss_scale` and `skipped_steps` (of this `fit`) where there is a loss scale;
    between two readings the bar shows the last one. Each `fit` writes a file of its own,
    ``FOLDER/runs/fit001.jsonl`` and so on; one that is broken off leaves what it had.

    Args:
        folder: for the records.
        watch: how many updates from one whose ranges are counted to the next, beginning with the first: weights and how
            far they move. True is every hundredth, 0 or False none.
        every: batches after which records are read, the loss scale's patience is checked, and the numbers in the
            progress bar are renewed.
        verbose: whether to say at the end, in one line, where the records are; and at the end of an epoch, once,
            that moving statistics (or another variable that is not trained) have become NaN or infinite.

    Attributes:
        path: of the current, or last, file of records; None before the first `fit`.

    Raises:
        UsageError: an argument that is none of these.
        LossScaleCollapseError: out of `fit`, where `mezzo.keras.LossScaleOptimizer.check` raises it.
    """

    # What Keras may call from another thread (on JAX and PyTorch) is `on_train_batch_end`, which only adds numbers to
    # the logs. So the training need not wait for the losses of each batch because of this callback.
    async_safe = True

    def __init__(
        self,
        folder: str | os.PathLike[str] = "mezzo-run",
        *,
        watch: bool | int = False,
        every: int = EVERY,
        verbose: bool = True,
        probe: Any = None,
    ) -> None:
        super().__init__()
        if probe is not None:
            raise UsageError(
                "PrecisionMonitor(probe=...) was removed in version 0.2. watch=100 counts the ranges of weights and "
                "updates; for activations and gradients give mezzo.MixedPrecision(watch=...) a PyTorch model."
            )
        watch = DEFAULT_WATCH if watch is True else watch
        if not os.fspath(folder) or int(watch) != watch or watch < 0 or int(every) != every or every < 1:
            raise UsageError(
                f"PrecisionMonitor({folder!r}, watch={watch!r}, every={every!r}): give a folder for the records; watch "
                f"as True (every {DEFAULT_WATCH}th update), a whole number of updates, or 0 for none; every as a whole "
                "number of batches, 1 or more."
            )
        self.folder = Path(folder)
        self._watch, self._every, self._verbose = int(watch), int(every), verbose
        self._recorder: _Recorder | None = None
        self._lost = False
        self._masks: set[int] = set()  # variables in which infinities stood from the first

    @property
    def path(self) -> Path | None:
        """Of the current, or last, file of records; None before the first `fit`."""
        return None if self._recorder is None else self._recorder.path

    def on_train_begin(self, logs: Any = None) -> None:
        """A file for this `fit`."""
        if self._recorder is not None:
            self._recorder.close()  # if the last fit was broken off
        model = self.model
        self._lost = False
        self._masks = {id(one) for one, is_nan in not_finite(model) if not is_nan}
        if keep_losses(model):
            # Functions that were traced before hold the old tracker.
            model.train_function = model.test_function = None
            model.make_train_function()
        self._recorder = recorder = _Recorder(model, _new_file(self.folder), self._watch, self._every)
        finalize(self, recorder.close)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """What was done between two epochs is not a step's doing."""
        if self._recorder is not None:
            self._recorder.epoch_begins()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Numbers into the logs, which the callbacks after this one see too."""
        if self._recorder is not None and logs is not None:
            logs.update(self._recorder.numbers)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """What was left of the epoch, and its numbers into the logs."""
        recorder = self._recorder
        if recorder is None:
            return
        recorder.read()
        self._tell_lost(recorder, epoch + 1)
        if logs is not None:
            logs.update(recorder.numbers)

    def on_train_end(self, logs: Any = None) -> None:
        """The last record."""
        recorder = self._recorder
        if recorder is None:
            return
        recorder.end(0)
        if self._verbose:
            numbers = recorder.numbers
            scales = [f"{name} {numbers[name]:.6g}" for name in numbers if name.startswith("loss_scale")]
            journal = recorder.journal
            print(
                f"mezzo: {', '.join([f'{journal.updates} updates', f'{journal.skipped} skipped', *scales])}. "
                f"Records in {recorder.path}; the page: mezzo report {shlex.quote(str(self.folder))}"
            )

    def _tell_lost(self, recorder: _Recorder, epoch: int) -> None:
        """Say it the first time that moving statistics are not finite."""
        if self._lost:
            return
        found = [one for one, is_nan in not_finite(self.model) if is_nan or id(one) not in self._masks]
        if not found:
            return
        self._lost = True
        path, others = found[0].path, len(found) - 1
        more = f" (as {others} more)" if others else ""
        text = _LOST.format(path=path, layer=path.rpartition("/")[0] or "LAYER", epoch=epoch, more=more)
        recorder.journal.note(text)
        if self._verbose:
            print(f"\nmezzo: {text}.")


class _Recorder:
    """Records one `fit`. A model's train function holds it, and nothing in it holds the callback."""

    def __init__(self, model: Any, path: Path, watch: int, every: int) -> None:
        self.path = path
        self.journal = Journal(path, lambda: _started(model))
        self.journal.begin()
        self._reader = StepReader(model)
        self._model, self._watch, self._every = model, watch, every
        self._each = steps_per_call(model)
        self._ended = False
        self._steps = 0  # read
        self._look: tuple[int, list[tuple[Any, npt.NDArray[Any]]], list[RangeRow]] | None = None
        self._looks: dict[int, tuple[float, list[RangeRow], list[RangeRow]]] = {}
        self._numbers: dict[str, int] = {}  # optimizer's name -> its number, in the order of first steps
        self._skipped: dict[str, int] = {}
        self._unsettled: list[Skipped] = []
        self._inner = model.train_function
        self._outer = model.train_function = around(self._inner, self.before, self.after)

    @property
    def numbers(self) -> dict[str, float]:
        """What the logs show: loss scale and skipped steps; of each optimizer, by its name, where several step."""
        found: dict[str, float] = {}
        for one, scale in zip(self._reader.optimizers, self._reader.scales()):
            alone = not self._steps and len(self._reader.optimizers) == 1
            if (one.name in self._numbers or alone) and one.scales:
                end = f"_{one.name}" if len(self._numbers) > 1 else ""
                found[f"loss_scale{end}"] = scale
                found[f"skipped_steps{end}"] = self._skipped.get(one.name, 0)
        return found

    def epoch_begins(self) -> None:
        """The optimizers are looked at anew."""
        self.read()
        self._reader.forget()

    def before(self, args: Sequence[Any]) -> None:
        """A call of the train function begins."""
        if self._ended:
            return
        state = args[0] if keras.backend.backend() == "jax" else None
        if self._reader.waiting >= self._every:
            self.read(state)
        self._reader.begin(args)
        step = self._steps + self._reader.waiting
        if self._watch and -step % self._watch < self._each:
            variables = self._model.trainable_variables
            held = variables if state is None else state[0]
            weights = [(one, _array(value)) for one, value in zip(variables, held) if _is_floating(one)]
            rows = [_row(one, "weight", numbers) for one, numbers in weights]
            if self._each > 1:
                self.journal.note(_NO_RATIOS)
            self._look = (step, weights if self._each == 1 else [], rows)

    def after(self, made: Any) -> None:
        """It is over."""
        if self._ended:
            return
        self._reader.end(made)
        if self._look is None:
            return
        (step, weights, rows), self._look = self._look, None
        variables = self._model.trainable_variables
        held = made[1][0] if keras.backend.backend() == "jax" else variables
        now = {id(one): value for one, value in zip(variables, held)}
        moved = [_row(one, "update ratio", ratios(old, _array(now[id(one)]))) for one, old in weights]
        self._looks[step] = (self.journal.now(), rows, moved)

    def read(self, state: Any = None) -> None:
        """Write what waits, and check the patience of each optimizer; waits for the device.

        Raises:
            LossScaleCollapseError: as `LossScaleOptimizer.check`.
        """
        if self._ended or not self._reader.waiting:
            return
        self._write()
        optimizers = [one for one in self._reader.optimizers if one.name in self._numbers and one.is_mezzos]
        held = [] if state is None else list(zip(self._model.optimizer.variables, state[2]))
        try:
            with keras.StatelessScope(state_mapping=held) if held else nullcontext():
                for one in optimizers:
                    one.optimizer.check()
        except LossScaleCollapseError as error:
            self.journal.note(str(error))
            self.end(1)
            raise

    def end(self, status: int) -> None:
        """The last record."""
        if self._ended:
            return
        self.read()
        self._ended = True
        self.journal.seen(one.explained(None) for one in self._unsettled)
        for text in self._reader.notes:
            self.journal.note(text)
        self._note_optimizers()
        self._give_back()
        self.journal.end(status)

    def close(self) -> None:
        """The training was broken off: write what waits, and no end. Keras notifies callbacks of no exception."""
        if not self._ended:
            self._ended = True
            with suppress(Exception):  # of a failed device nothing can be read
                self._write()
            self._give_back()
            self.journal.close()

    def _give_back(self) -> None:
        if self._model.train_function is self._outer:
            self._model.train_function = self._inner

    def _write(self) -> None:
        late = self.journal.now() - time.perf_counter()
        for step in self._reader.read():
            at = step.at + late
            first = self.journal.updates
            for update in step.updates:
                self._update(step, update, at)
            if step.loss is not None:
                self.journal.loss(step.loss, at)
            self._write_ranges(step, first)
            self._steps += 1

    def _update(self, step: Step, update: Update, at: float) -> None:
        number = self._numbers.setdefault(update.name, len(self._numbers))
        index, scale = self.journal.updates, update.scale
        self.journal.update(number, moved=not update.skipped, loss_scale=scale, reason=update.reason, at=at)
        if update.skipped:
            self._skipped[update.name] = self._skipped.get(update.name, 0) + 1
            self._unsettled.append(Skipped(index, at, scale, step.loss, update.bad, number))
            return
        self.journal.seen(one.explained(scale) for one in self._unsettled if one.optimizer == number)
        self._unsettled = [one for one in self._unsettled if one.optimizer != number]

    def _write_ranges(self, step: Step, first: int) -> None:
        look = self._looks.pop(self._steps, None)
        if look is None:
            return
        at, rows, moved = look
        skipped = bool(step.updates) and all(one.skipped for one in step.updates)
        scale = step.updates[0].scale if step.updates else 1.0
        self.journal.seen([RangesRecord(first, 0, at, scale, rows if skipped else [*rows, *moved])])

    def _note_optimizers(self) -> None:
        """What the user should know of the optimizers that stepped, and of one that did not."""
        layers = self._model._flatten_layers(include_self=False)
        has_float16 = any(one.compute_dtype == "float16" and one.trainable_variables for one in layers)
        for one in self._reader.optimizers:
            steps_unscaled = one.name in self._numbers and not one.scales and one.optimizer is not None
            if steps_unscaled and has_float16:
                self.journal.note(_UNSCALED.format(one.name, type(one.optimizer).__name__))
        if self._steps and "optimizer" not in self._numbers:
            others = ", ".join(self._numbers) or "none"
            self.journal.note(_NEVER_STEPPED.format(type(self._model.optimizer).__name__, others))


# Why a step was skipped


@dataclass(frozen=True)
class Skipped:
    """A skipped update whose cause is not known yet. The step is over and its batch is gone: it can't be run again.

    Backward goes from the last layer to the first, and what is not finite in one stays so in those before it: so the
    last layer with such a gradient is the nearest to where it began.

    Args:
        update: its index.
        at: seconds since the run began.
        loss_scale: that it used.
        loss: its loss, unscaled; None where it is not known.
        bad: paths of the variables whose gradients were not finite, in the model's order.
        optimizer: its number.
    """

    update: int
    at: float
    loss_scale: float
    loss: float | None
    bad: Sequence[str] = ()
    optimizer: int = 0

    def explained(self, kept_at: float | None) -> OverflowRecord:
        """With a cause; `kept_at` is the loss scale of the next update that was not skipped, None if there was none."""
        backward = [path.rpartition("/") for path in reversed(self.bad)]
        module = backward[0][0] if backward else ""
        named = [f"{layer}: gradient of {name}" for layer, _, name in backward[:NAMED]]
        if len(backward) > NAMED:
            named.append(f"and {len(backward) - NAMED} more")
        if self.loss is not None and not math.isfinite(self.loss):
            cause, module, note = "loss", "", f"the loss was {self.loss}"
            remedies = [*remedies_of(OverflowReport(cause)), *_OF_LOSS]
        elif kept_at is None:
            cause, note, remedies = "unknown", "no update after it was kept", list(_OF_UNKNOWN)
        else:
            note = f"the loss was finite, and the next update that was kept had loss scale {kept_at:.6g}"
            cause, remedies = "loss scale", list(_OF_SCALE)
        finding = OverflowReport(
            cause=cause,
            module=module,
            direction="forward" if cause == "loss" else "backward",
            propagators=named,
            how="Concluded from what followed; the step was not run again",
            remedies=[text.replace("LAYER", module or "LAYER") for text in remedies],
            note=note,
        )
        return OverflowRecord(self.update, self.optimizer, self.at, self.loss_scale, finding)


_OF_SCALE = (
    "nothing, if the loss scale is dynamic and it is rare: the next step has a smaller one",
    "if it happens often, let the scale grow less often: `fp16,loss_scale=dynamic(growth_interval=10000)` in "
    "`mezzo.keras.set_policy`, or `dynamic_growth_steps=10000` of the optimizer",
    "`mixed_bfloat16` where the device has bf16: it has FP32's range and needs no loss scale",
)
_OF_LOSS = (
    "look at the model before it, if every later loss is like this: a weight, or a moving statistic of a "
    "BatchNormalization, that is NaN or infinite stays so",
    "a loss that takes logits (`from_logits=True`), and no softmax or sigmoid before it",
    'the last layer in FP32: `dtype="float32"` for it, or `fp16,module.LAYER=fp32` with its name in '
    "`mezzo.keras.set_policy`",
)
_OF_UNKNOWN = (
    "a lower learning rate, or `global_clipnorm=1.0` of the inner optimizer, if the loss was growing",
    "this layer in FP32: `fp16,module.LAYER=fp32` in `mezzo.keras.set_policy`",
    "a layer whose slope has no finite value for some inputs (a root or a logarithm of 0, 0 / 0): clamp what goes in",
)


# Ranges and lost statistics


def _is_floating(variable: Any) -> bool:
    return str(keras.backend.standardize_dtype(variable.dtype)) in NAMES


def _array(value: Any) -> npt.NDArray[Any]:
    """A copy on the host: JAX gives the buffer away with the next step."""
    with np.errstate(over="ignore"):
        return np.array(keras.ops.convert_to_numpy(value), dtype=np.float32, copy=True)


def histogram(numbers: npt.NDArray[Any]) -> Histogram:
    """How often each FP32 exponent occurs; FP64 numbers are counted as FP32."""
    pattern = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32).ravel() & 0x7FFFFFFF
    infinity = 0xFF << 23
    index = np.where(pattern == 0, ZERO, np.where(pattern > infinity, NAN, pattern >> 23))
    largest = np.max(pattern, initial=0, where=pattern < infinity)
    bins = np.bincount(index, minlength=BINS).tolist()
    return Histogram.from_bins(bins, float(np.uint32(largest).view(np.float32)))


def ratios(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``abs(after - before) / abs(before)``; 0 where nothing moved, infinite where something did from 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        moved = np.abs(after - before)
        return np.where(moved == 0, np.float32(0), moved / np.abs(before))


def _row(variable: Any, what: str, numbers: npt.NDArray[Any]) -> RangeRow:
    module, _, name = variable.path.rpartition("/")
    form = NAMES[str(keras.backend.standardize_dtype(variable.dtype))]
    return RangeRow(module, what, "fp32" if what == "update ratio" else form, histogram(numbers), name)


def not_finite(model: Any) -> list[tuple[Any, bool]]:
    """Floating variables of a model that are not trained, and are not finite now; waits for the device.

    A step that the loss scale skips has run forward all the same: the moving mean of a `BatchNormalization` takes the
    batch's own, and one that is infinite or NaN stays so.

    Returns:
        Each with whether it holds NaN; else it holds infinities alone, as a mask may.
    """
    found = []
    for one in model.non_trainable_variables:
        if not _is_floating(one):
            continue
        held = getattr(one.value, "values", None)  # of a TensorFlow strategy: what each replica holds
        parts = [_array(part) for part in (held if isinstance(held, tuple) else (one.value,))]
        if not all(np.isfinite(part).all() for part in parts):
            found.append((one, any(bool(np.isnan(part).any()) for part in parts)))
    return found


# The file


def _new_file(folder: Path) -> Path:
    """An empty file ``FOLDER/runs/fit001.jsonl``, or the next number that is free.

    Raises:
        UsageError: it can't be made.
    """
    runs = folder / "runs"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        path = next(path for n in count(1) if not (path := runs / f"fit{n:03}.jsonl").exists())
        path.touch()
    except OSError as error:
        raise UsageError(
            f"PrecisionMonitor({str(folder)!r}): no records can be written there: {error}. Name a folder, new or not."
        ) from error
    return path


def _started(model: Any) -> RunStarted:
    return RunStarted(
        script=sys.argv[0] or "(interactive)",
        argv=sys.argv[1:],
        policy=_precision_of(model),
        seed_offset=0,
        nudged=False,
        machine=describe(keras.backend.backend()),
        started=now_text(),
    )


def _precision_of(model: Any) -> str:
    """A compiled model's precision in Mezzo's words: of most of its layers, of the others, the loss scale."""
    words = {name: word for word, name in POLICIES.items()}
    layers = [layer for layer in model._flatten_layers() if layer._trainable_variables] or [model]
    policies = {layer.path or layer.name: layer.dtype_policy.name for layer in layers}
    default = Counter(policies.values()).most_common(1)[0][0]
    parts = [words.get(default, default)]
    parts += [f"module.{path}={words.get(name, name)}" for path, name in policies.items() if name != default]
    optimizer = model.optimizer
    if isinstance(optimizer, LossScaleOptimizer):
        parts.append(f"loss_scale={print_loss_scale(optimizer._machine)}")  # as it was given
    elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        parts.append(f"loss_scale=dynamic(init={optimizer.initial_scale:.17g})")
    elif factor := getattr(optimizer, "loss_scale_factor", None):
        parts.append(f"loss_scale={factor:.17g}")
    text = ",".join(parts)
    try:
        return plan(text).precision
    except MezzoError:  # float16 throughout, a quantised layer, a name that can't stand in a policy
        return text
