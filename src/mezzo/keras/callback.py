"""PrecisionMonitor: a Keras callback that shows and records what mixed precision does to a training."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any
from weakref import finalize

import keras
import numpy as np

from mezzo.core.errors import LossScaleCollapseError, MezzoError, UsageError, checks_keywords
from mezzo.core.overflow import OverflowReport
from mezzo.core.policy_text import print_loss_scale
from mezzo.core.records import OverflowRecord
from mezzo.core.remedies import remedies as remedies_of
from mezzo.keras.hardware import describe
from mezzo.keras.plan import NAMES, WORDS, plan
from mezzo.keras.steps import StepOptimizer, StepRecorder, Update, keep_losses
from mezzo.runner.journal import Journal
from mezzo.runner.lifecycle import RunRequest, started

EVERY = 16  # batches whose records are read and written together: reading waits for the device
NAMED = 12  # variables that a finding names at most

_UNSCALED = (
    "{0} ({1}) has no loss scale, but layers compute in float16: gradients below 2^-24 become 0. Use "
    "mezzo.keras.LossScaleOptimizer({1}(...)), and take the gradients of its scale_loss(loss)"
)
_LOST = (
    "{path}{more} is NaN at the end of epoch {epoch} and stays NaN; evaluate() and predict() read it. Go back to an "
    "earlier checkpoint. Then use `bf16`, or leave out the batches that overflow, or keep both {layer} and the layer "
    "before it in FP32: mezzo.keras.set_policy('fp16,module.{layer}=fp32,module.LAYER=fp32')"
)


class PrecisionMonitor(keras.callbacks.Callback):
    """Progress, loss scale, skipped steps and records of each `fit`, from which ``mezzo report`` makes a page.

    ::

        model.fit(x, y, callbacks=[mezzo.keras.PrecisionMonitor("mezzo-run")])

    Keras's progress bar and History show `loss_scale` and `skipped_steps` (of this `fit`) where there is a loss scale.
    Each `fit` writes a new file, ``FOLDER/runs/fit001.jsonl`` and so on. An interrupted `fit` leaves the records that
    were written until then.

    Args:
        folder: for the records.
        every: number of batches after which records are read, the loss scale's patience is checked, and the numbers in
            the progress bar change.
        verbose: print where the records are when `fit` ends; and print once, at the end of an epoch, that moving
            statistics (or another variable that is not trained) have become NaN.

    Raises:
        UsageError: an invalid argument.
        LossScaleCollapseError: out of `fit`, where `mezzo.keras.LossScaleOptimizer.check` raises it.
    """

    # `on_train_batch_end` may be called from another thread: it only adds numbers to the logs.
    async_safe = True

    @checks_keywords
    def __init__(
        self,
        folder: str | os.PathLike[str] = "mezzo-run",
        *,
        every: int = EVERY,
        verbose: bool = True,
    ) -> None:
        super().__init__()
        if not os.fspath(folder) or int(every) != every or every < 1:
            raise UsageError(
                f"PrecisionMonitor({folder!r}, every={every!r}): folder must be a path, and every an integer of 1 or "
                "more. Example: PrecisionMonitor('mezzo-run', every=16)."
            )
        self.folder = Path(folder)
        self._every, self._verbose = int(every), verbose
        self._recorder: Any = None  # a `_Recorder`, from the first `fit` on

    @property
    def path(self) -> Path | None:
        """Path of the current or last file of records; None before the first `fit`."""
        return self._recorder and self._recorder.path

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin a file for this `fit`."""
        if self._recorder is not None:
            self._recorder.close()  # if the last fit was broken off
        model = self.model
        self._lost = False
        if keep_losses(model):
            # Functions that were traced before hold the old tracker.
            model.train_function = model.test_function = None
            model.make_train_function()
        self._recorder = _Recorder(model, _new_file(self.folder), self._every)
        finalize(self, self._recorder.close)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Read the optimizers' state again: other callbacks may have changed it."""
        self._recorder.epoch_begins()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Add the numbers to the logs, which later callbacks see too."""
        if logs is not None:
            logs.update(self._recorder.numbers)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Read the rest of the epoch, and look for lost statistics."""
        recorder = self._recorder
        recorder.read()
        found = [] if self._lost else lost_statistics(self.model)
        if found:
            self._lost = True
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            layer = found[0].rpartition("/")[0] or "LAYER"
            text = _LOST.format(path=found[0], layer=layer, epoch=epoch + 1, more=more)
            recorder.journal.note(text)
            if self._verbose:
                print(f"\nmezzo: {text}.")
        if logs is not None:
            logs.update(recorder.numbers)

    def on_train_end(self, logs: Any = None) -> None:
        """Write the last record."""
        recorder = self._recorder
        recorder.end(0)
        if self._verbose:
            numbers = recorder.numbers.items()
            scales = [f", {name} {value:.6g}" for name, value in numbers if name.startswith("loss_scale")]
            print(
                f"mezzo: {recorder.journal.updates} updates, {recorder.journal.skipped} skipped{''.join(scales)}. "
                f"Records: {recorder.path}. Make the report: mezzo report {shlex.quote(str(self.folder))}"
            )


class _Recorder(StepRecorder):
    """Records one `fit`. A model's train function holds it, and it does not hold the callback."""

    def __init__(self, model: Any, path: Path, every: int) -> None:
        self.path = path
        request = RunRequest(sys.argv[0] or "(interactive)", tuple(sys.argv[1:]))
        machine = describe(keras.backend.backend())
        journal = Journal(path, lambda: started(request, _precision_of(model), machine))
        journal.begin()
        super().__init__(model, journal, every)
        self._numbers: dict[str, int] = {}  # optimizer's name -> its number, in the order of first steps
        self._skipped: Counter[str] = Counter()
        # The skipped updates of unknown cause: the optimizer's number, and `_explained` but for its last argument.
        self._unsettled: list[tuple[int, Callable[[float | None], OverflowRecord]]] = []

    @property
    def numbers(self) -> dict[str, float]:
        """Next loss scale and skipped steps for the logs; with the optimizer's name where several step."""
        found: dict[str, float] = {}
        for one, row in zip(self.optimizers, self._rows or repeat([])):
            alone = not self.journal.losses and len(self.optimizers) == 1
            if (one.name in self._numbers or alone) and one.scales:
                end = f"_{one.name}" if len(self._numbers) > 1 else ""
                found[f"loss_scale{end}"] = one.scale(row)
                found[f"skipped_steps{end}"] = self._skipped[one.name]
        return found

    def read(self, state: Any = None) -> None:
        """Write what waits, and check the patience of each optimizer; waits for the device."""
        super().read(state)
        held = [] if state is None else list(zip(self.model.optimizer.variables, state[2]))
        try:
            with keras.StatelessScope(state_mapping=held) if held else nullcontext():
                for one in self.optimizers:
                    if one.name in self._numbers and one.is_mezzos:
                        one.optimizer.check()
        except LossScaleCollapseError as error:
            self.journal.note(str(error))
            self.end(1)
            raise

    def end(self, status: int) -> None:
        """Write the last record."""
        if self.ended:
            return
        super().read()
        self.restore()
        self.journal.seen(explained(None) for _, explained in self._unsettled)
        self._note_optimizers()
        self.journal.end(status)

    def close(self) -> None:
        """The training was broken off: write what waits, and no end. Keras notifies callbacks of no exception."""
        if not self.ended:
            self.restore()
            with suppress(Exception):  # of a failed device nothing can be read
                super().read()
            self.journal.close()

    def write(self, at: float, loss: float | None, updates: list[Update]) -> None:
        at += self.journal.now() - time.perf_counter()
        for update in updates:
            self._update(at, loss, update)
        if loss is not None:
            self.journal.loss(loss, at)

    def _update(self, at: float, loss: float | None, update: Update) -> None:
        number = self._numbers.setdefault(update.of.name, len(self._numbers))
        index, scale = self.journal.updates, update.scale
        self.journal.update(number, moved=not update.skipped, loss_scale=scale, reason=update.reason, at=at)
        if update.skipped:
            self._skipped[update.of.name] += 1
            self._unsettled.append((number, partial(_explained, index, number, at, loss, update)))
        else:
            self.journal.seen(explained(scale) for of, explained in self._unsettled if of == number)
            self._unsettled = [waiting for waiting in self._unsettled if waiting[0] != number]

    def _note_optimizers(self) -> None:
        layers = self.model._flatten_layers(include_self=False)
        if not any(one.compute_dtype == "float16" and one.trainable_variables for one in layers):
            return
        for one in self.optimizers:
            if one.name in self._numbers and not one.scales and one.optimizer is not None:
                self.journal.note(_UNSCALED.format(one.name, type(one.optimizer).__name__))


def _explained(
    index: int, optimizer: int, at: float, loss: float | None, update: Update, kept_at: float | None
) -> OverflowRecord:
    """A skipped update with its cause, concluded from what followed: its batch is gone, so it can't be run again.

    `kept_at` is the loss scale of the optimizer's next update that was not skipped, None if there was none.
    """
    # Backward carries NaN from the last layer to the first, so the last layer with a bad gradient is the origin's.
    backward = [path.rpartition("/") for path in reversed(update.bad)]
    module = backward[0][0] if backward else ""
    named = [f"{layer}: gradient of {name}" for layer, _, name in backward[:NAMED]]
    if len(backward) > NAMED:
        named.append(f"and {len(backward) - NAMED} more")
    if loss is not None and not math.isfinite(loss):
        cause, module, note = "loss", "", f"the loss was {loss}"
    elif kept_at is None:
        cause, note = "unknown", "no later update was taken"
    else:
        cause = "loss scale"
        note = f"the loss was finite, and the next update that was taken had loss scale {kept_at:.6g}"
    finding = OverflowReport(
        cause=cause,
        module=module,
        direction="forward" if cause == "loss" else "backward",
        propagators=named,
        how="Concluded from the following steps; the step was not repeated",
        remedies=[
            *remedies_of(OverflowReport(cause), scaling=getattr(update.of.optimizer, "_loss_scale", None)),
            *(text.replace("LAYER", module or "LAYER") for text in _REMEDIES[cause]),
        ],
        note=note,
    )
    return OverflowRecord(index, optimizer, at, update.scale, finding)


# Cause -> what to try with Keras, after what helps in every framework.
_REMEDIES = {
    "loss scale": (
        "with Keras, give such a policy to `mezzo.keras.set_policy`, or `dynamic_growth_steps=10000` to the optimizer",
        "`mixed_bfloat16` where the device has bf16: it has FP32's range and needs no loss scale",
    ),
    "loss": (
        "if every later loss is NaN too, look at the model: a weight, or a moving statistic of a BatchNormalization, "
        "that is NaN or infinite stays so",
        "a loss that takes logits (`from_logits=True`), and no softmax or sigmoid before it",
        'the last layer in FP32: `dtype="float32"` for it, or `fp16,module.LAYER=fp32` with its name in '
        "`mezzo.keras.set_policy`",
    ),
    "unknown": (
        "a lower learning rate, or `global_clipnorm=1.0` of the inner optimizer, if the loss was growing",
        "this layer in FP32: `fp16,module.LAYER=fp32` in `mezzo.keras.set_policy`",
        "a layer whose slope has no finite value for some inputs (a root or a logarithm of 0, 0 / 0): clamp its input",
    ),
}


def lost_statistics(model: Any) -> list[str]:
    """The paths of variables that are not trained and hold NaN (infinities may be meant); waits for the device."""
    found = []
    for one in model.non_trainable_variables:
        if str(keras.backend.standardize_dtype(one.dtype)) not in NAMES:
            continue
        held = getattr(one.value, "values", None)  # under a TensorFlow strategy: one per replica
        parts = held if isinstance(held, tuple) else (one.value,)
        if any(np.isnan(np.asarray(keras.ops.convert_to_numpy(part), np.float32)).any() for part in parts):
            found.append(one.path)
    return found


def _new_file(folder: Path) -> Path:
    """An empty file ``FOLDER/runs/fit001.jsonl``, or the next number that is free."""
    runs = folder / "runs"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        path = next(path for n in count(1) if not (path := runs / f"fit{n:03}.jsonl").exists())
        path.touch()
    except OSError as error:
        raise UsageError(
            f"PrecisionMonitor({str(folder)!r}): cannot write records there: {error}. Give another folder."
        ) from error
    return path


def _precision_of(model: Any) -> str:
    """A compiled model's precision in Mezzo's words: of most of its layers, of the others, the loss scale."""
    layers = [layer for layer in model._flatten_layers() if layer._trainable_variables] or [model]
    policies = {layer.path or layer.name: layer.dtype_policy.name for layer in layers}
    default = Counter(policies.values()).most_common(1)[0][0]
    parts = [WORDS.get(default, default)]
    parts += [f"module.{path}={WORDS.get(name, name)}" for path, name in policies.items() if name != default]
    optimizer = StepOptimizer(model.optimizer, "optimizer")
    if optimizer.is_mezzos:
        parts.append(f"loss_scale={print_loss_scale(model.optimizer._loss_scale)}")  # as it was given
    elif optimizer.scales:
        text = "dynamic(init={:.17g})" if optimizer.has_dynamic else "{:.17g}"
        parts.append(f"loss_scale={text.format(optimizer.first_scale)}")
    text = ",".join(parts)
    try:
        return plan(text).precision
    except MezzoError:  # float16 throughout, a quantized layer, a name that can't stand in a policy
        return text
