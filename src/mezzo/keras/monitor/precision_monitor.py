"""PrecisionMonitor: a Keras callback that shows and records what mixed precision does to a training."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any
from weakref import finalize

import keras

from mezzo.core.errors import LossScaleCollapseError, UsageError
from mezzo.keras.monitor import during_fit, exponents, lost_state, recent_losses, run_file
from mezzo.keras.monitor.fit_journal import FitJournal, Look
from mezzo.keras.monitor.probe import Counted, Probe

DEFAULT_WATCH = 100
"""Updates from one that is watched to the next."""

EVERY = 16
"""Batches whose records are read and written together: reading waits for the device."""

_OF_PROBE = (
    "activations and gradients in the ranges are those of the probe's batch, with the weights and the loss scale that "
    "the training had at that update; weights and update ratios are the training's own"
)
_NO_RATIOS = (
    "watch: several steps run in one execution (steps_per_execution), so how far a single update moves a weight is not "
    "seen: no update ratios"
)


class PrecisionMonitor(keras.callbacks.Callback):
    """Progress, loss scale, skipped steps, ranges and records of each `fit`, from which ``mezzo report`` makes a page.

    ::

        model.fit(x, y, callbacks=[mezzo.keras.PrecisionMonitor("mezzo-run", watch=100, probe=(x[:32], y[:32]))])

    Keras's progress bar and History show `loss_scale` and `skipped_steps` (of this `fit`) where there is a loss scale;
    between two readings the bar shows the last one. Each `fit` writes a file of its own,
    ``FOLDER/runs/fit001.jsonl`` and so on; one that is broken off leaves what it had.

    Args:
        folder: for the records.
        watch: how many updates from one whose ranges are counted to the next, beginning with the first: weights and how
            far they move, and with `probe` activations and gradients. True is every hundredth, 0 or False none;
            None is True with a probe, and none without.
        probe: one batch ``(x, y)`` or ``(x, y, sample_weight)`` on which activations and gradients are looked at.
        every: batches after which records are read, the loss scale's patience is looked at, and the numbers in the
            progress bar are renewed.
        verbose: whether to say at the end, in one line, where the records are; and at the end of an epoch, once,
            that moving statistics (or another variable that is not trained) have become NaN or infinite.

    Attributes:
        path: of the current, or last, file of records; None before the first `fit`.

    Raises:
        UsageError: an argument that is none of these.
        LossScaleCollapseError: out of `fit`, where `mezzo.keras.LossScaleOptimizer.check` raises it.
    """

    # What Keras may call from another thread (on JAX and PyTorch) is `on_train_batch_end`, which only adds two numbers
    # to the logs. So the training need not wait for the losses of each batch on this callback's account.
    async_safe = True

    def __init__(
        self,
        folder: str | os.PathLike[str] = "mezzo-run",
        *,
        watch: bool | int | None = None,
        probe: Any = None,
        every: int = EVERY,
        verbose: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
            raise UsageError(
                f"PrecisionMonitor({folder!r}): give a folder for the records, 'mezzo-run' for one."
            )
        self.folder = Path(folder)
        self._probe = None if probe is None else Probe(probe)
        self._watch = _interval(watch, has_probe=probe is not None)
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UsageError(f"every={every!r}: give a whole number of batches, 1 or more.")
        self._every = every
        self._verbose = verbose
        self._journal: FitJournal | None = None
        self._abandon: Any = None
        self._steps = 1
        self._begun = False
        self._epoch = 0
        self._is_lost = False
        self._masks: set[int] = set()  # variables in which infinities stood from the first
        self._look: Look | None = None
        self._weights: list[tuple[Any, Any]] = []

    @property
    def path(self) -> Path | None:
        """Of the current, or last, file of records; None before the first `fit`."""
        return None if self._journal is None else self._journal.path

    # Where Keras calls: all but `on_train_batch_end` in the training's own thread

    def on_train_begin(self, logs: Any = None) -> None:
        """A file for this `fit`."""
        if self._abandon is not None:
            self._abandon()  # the last fit was broken off
        model = self.model
        self._steps = int(getattr(model, "steps_per_execution", 1) or 1)
        self._begun, self._look, self._weights = False, None, []
        self._is_lost = False
        self._masks = {id(one) for one, is_nan in lost_state.not_finite(model) if not is_nan}
        losses = recent_losses.put_into(model, self._every + self._steps)
        path = run_file.new_file(self.folder)
        self._journal = FitJournal(path, run_file.started(model), model, losses, self._steps)
        self._journal.steps_of_epoch = (self.params or {}).get("steps")
        # Neither an exception nor Ctrl-C is told to a callback; what waits then is written when this one goes.
        self._abandon = finalize(self, self._journal.abandon)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Losses are counted from here."""
        self._open().epoch_begins()
        self._epoch = epoch + 1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """What the batch before this one left is taken, before it is overwritten."""
        journal = self._open()
        self._settle(journal)
        if journal.waiting >= self._every:
            self._read(journal)
        first = journal.steps + journal.waiting
        if self._watch and -first % self._watch < self._steps:
            self._look = self._begin_look(first)
        self._begun = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Two numbers into the logs, which the callbacks behind this one are given too."""
        if self._journal is not None and logs is not None:
            self._journal.reported(batch, logs.get("loss"))
            self._tell(logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Validation begins, before the end of its epoch is told: from here on the tracker counts other losses."""
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """What was left of the epoch, and its numbers into the logs."""
        self._end_epoch()
        self._open().epoch_ends()
        if logs is not None:
            self._tell(logs)

    def on_train_end(self, logs: Any = None) -> None:
        """The last record."""
        journal = self._open()
        journal.end(0)
        if self._abandon is not None:
            self._abandon.detach()
            self._abandon = None
        if self._verbose:
            print(
                f"mezzo: {journal.updates} updates, {journal.skipped} skipped{_scales(journal)}. "
                f"Records in {journal.path}; "
                f"the page: mezzo report {shlex.quote(str(self.folder))}"
            )

    def _open(self) -> FitJournal:
        if self._journal is None:
            raise UsageError(
                "PrecisionMonitor is a callback of fit: model.fit(..., callbacks=[PrecisionMonitor()])."
            )
        return self._journal

    def _end_epoch(self) -> None:
        journal = self._journal
        if journal is None or not (self._begun or journal.waiting):  # evaluate() by itself; or told already
            return
        self._settle(journal)
        self._read(journal, last=True)
        self._look_for_lost(journal)

    def _settle(self, journal: FitJournal) -> None:
        """Take what the execution that was begun last has left."""
        if not self._begun:
            return
        self._begun = False
        journal.executed()
        look, self._look = self._look, None
        if look is not None:
            look.ratios = self._ratios()
            journal.looked(look)

    def _read(self, journal: FitJournal, *, last: bool = False) -> None:
        """Write what waits, and see whether the loss scale has collapsed."""
        journal.read(last=last)
        checks = [one.optimizer.check for one in journal.stepping if hasattr(one.optimizer, "check")]
        if not checks:
            return
        try:
            with during_fit.reading(self.model):
                for check in checks:
                    check()
        except LossScaleCollapseError as error:
            journal.end(1, str(error))
            raise

    def _look_for_lost(self, journal: FitJournal) -> None:
        """Say it the first time that moving statistics are not finite."""
        if self._is_lost:
            return
        found = [
            one for one, is_nan in lost_state.not_finite(self.model) if is_nan or id(one) not in self._masks
        ]
        if not found:
            return
        self._is_lost = True
        text = lost_state.note_of(found, self._epoch)
        journal.note(text)
        if self._verbose:
            over_the_bar = "\n" if (self.params or {}).get("verbose") else ""
            print(f"{over_the_bar}mezzo: {text}.")

    def _tell(self, logs: dict[str, Any]) -> None:
        logs.update(self._open().numbers)

    # Ranges

    def _begin_look(self, step: int) -> Look:
        """Weights before the step, and what the probe shows."""
        variables = [one for one in self.model.trainable_variables if exponents.is_floating(one)]
        copies = during_fit.copies(self.model, variables)
        words = exponents.count_all(copies)
        counted = [Counted(*_place(one), row) for one, row in zip(variables, words, strict=True)]
        if self._steps == 1:
            self._weights = list(zip(variables, copies, strict=True))
        else:
            self._open().note(_NO_RATIOS)
        if self._probe is not None:
            self._open().note(_OF_PROBE)
            counted += self._probe.look(self.model)
        return Look(step, counted)

    def _ratios(self) -> list[Counted]:
        weights, self._weights = self._weights, []
        now = during_fit.values(self.model, [one for one, _ in weights])
        words = exponents.count_ratios([before for _, before in weights], now)
        return [
            Counted(*_place(one, "update ratio"), row) for (one, _), row in zip(weights, words, strict=True)
        ]


def _place(variable: Any, what: str = "weight") -> tuple[str, str, str, str]:
    module, _, name = variable.path.rpartition("/")
    return module, what, exponents.format_of(variable), name


def _scales(journal: FitJournal) -> str:
    """The loss scales for the line at the end; with several optimizers that step, each with its name and its skips."""
    numbers = journal.numbers
    scales = {name: value for name, value in numbers.items() if name.startswith("loss_scale")}
    if list(scales) == ["loss_scale"]:
        return f", loss scale {scales['loss_scale']:.6g}"
    each = [
        f"{name.removeprefix('loss_scale_')}: {numbers[name.replace('loss_scale', 'skipped_steps', 1)]} skipped, "
        f"loss scale {value:.6g}"
        for name, value in scales.items()
    ]
    return f" ({'; '.join(each)})" if each else ""


def _interval(watch: bool | int | None, *, has_probe: bool) -> int:
    """Updates from one that is watched to the next; 0 for none."""
    if watch is None:
        watch = has_probe
    if isinstance(watch, bool):
        watch = DEFAULT_WATCH if watch else 0
    if not isinstance(watch, int) or watch < 0:
        raise UsageError(
            f"watch={watch!r}: give True for every {DEFAULT_WATCH}th update, a whole number of updates from one that "
            "is watched to the next, or 0 for none."
        )
    if has_probe and not watch:
        raise UsageError(
            "probe= is looked at in the updates that watch= names, and watch is 0. Give watch=100, say."
        )
    return watch
