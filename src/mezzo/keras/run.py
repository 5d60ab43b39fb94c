"""One unmodified Keras script under one policy, from the request to the exit status; imports nothing of Keras."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from mezzo.core.errors import MezzoError, UsageError
from mezzo.core.loss_scale import NoLossScale
from mezzo.core.records import RunStarted
from mezzo.keras.hardware import describe, peak_memory, resident, switch_off_tf32
from mezzo.keras.plan import plan
from mezzo.runner import lifecycle, script
from mezzo.runner.journal import Journal
from mezzo.runner.lifecycle import RunRequest
from mezzo.runner.patches import ImportWatch, Patches
from mezzo.runner.seeds import FrameworkSeeds

if TYPE_CHECKING:
    from mezzo.keras.steps import Update

# What a PyTorch run can be asked for and this one cannot.
_NOT_HERE = ("watch", "watch_all", "sensitivity", "tensorboard")

_NO_STEPS = (
    "the script never called fit or train_on_batch, so no step was recorded. If it has a training loop of its own, "
    "put the step into train_step of its keras.Model and call model.fit"
)
_LOOP_SCALE = (
    "; in float16 the loop needs a loss scale, too: mezzo.keras.LossScaleOptimizer(optimizer), and the gradients of "
    "its scale_loss(loss)"
)


def run(request: RunRequest) -> int:
    """Run a script as `python SCRIPT ARGS...` would, under a dtype policy; its exit status, as `lifecycle.run`."""
    for name in _NOT_HERE:
        if getattr(request, name):
            raise UsageError(
                f"{name}={getattr(request, name)!r} is not available for Keras scripts. Remove it. "
                "To watch a training, give fit the callback mezzo.keras.PrecisionMonitor."
            )
    session = Session(request)
    target = script.locate(request.target, is_module=request.is_module)
    session.journal = Journal(request.records, session.started)
    parts: list[lifecycle.Part] = [session.imports]
    if request.seed_offset is not None:  # before the policy: Keras's own modules draw from the streams
        parts.append(FrameworkSeeds(request.seed_offset, session.imports))
    return lifecycle.run(session, target, [*parts, session], finish=session.finish, summary=session.summary)


class Session:
    """The state of one run, and its patches."""

    journal: Journal
    left_alone: str | None = None

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        self.plan = plan(request.policy)
        self.imports = ImportWatch()
        self.backend = ""  # until the script has imported Keras
        self.used = False  # whether the script has made a Keras layer
        self.fatal: MezzoError | None = None
        self.nudged: weakref.WeakSet[Any] = weakref.WeakSet()  # models
        self._patches = Patches()
        self._resident: int | None = None
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()  # the dictionary forgets those that are gone
        self._watch = lifecycle.StepWatch(request.observe, self._observed_step)
        self._model: Any = None  # of the last step, while it is observed

    def install(self) -> None:
        """Wait for Keras."""
        self.imports.when("keras", self._keras_imported)

    def remove(self) -> None:
        """Undo all patches."""
        self._patches.undo()
        if self.backend:
            from mezzo.keras.policy import set_policy

            set_policy("fp32")

    def started(self) -> RunStarted:
        """The record that begins the run."""
        used = self.used or bool(self.journal.losses or self.journal.updates)
        return lifecycle.started(self.request, self.plan.precision, describe(self.backend, used=used))

    def stop(self, error: MezzoError) -> NoReturn:
        """End the run for a mistake that is the user's."""
        self.fatal = error
        raise error

    def stepped(self, model: Any, update: Update) -> None:
        """A training step is over. An optimizer's number is its place in the order of first steps."""
        optimizer = model if update.of.optimizer is None else update.of.optimizer
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._next)
        number, moved = self._numbers[optimizer], not update.skipped
        seen, self._model = self._watch.running, model
        self._watch.after_update(number, moved=moved)
        self.journal.update(number, moved=moved, loss_scale=update.scale, reason=update.reason, observed=seen)
        self.journal.stop_after(self.request.stop_after)

    def _observed_step(self) -> Callable[[bool], None]:
        """Begin to measure the peak memory of a step; ends with whether to keep that and the layers' formats."""
        from mezzo.keras.patches import formats

        stop = peak_memory(self.backend, self._resident)

        def end(keep: bool) -> None:
            memory = stop()
            if keep:
                if memory is None:
                    self.journal.note("peak memory was not measured: this system does not report it")
                self.journal.observed(memory, formats(self._model, self.plan))

        return end

    def summary(self, failed: bool) -> str:
        """The notes, as lines; none for a script that failed before it made a layer."""
        return "\n".join(f"mezzo: {note}" for note in self.journal.notes if self.used or not failed)

    def finish(self, status: int) -> None:
        """The script is over."""
        self._watch.finish(self.journal, told=True)
        if not self.journal.losses and not self.journal.updates:
            scales = self.used and not isinstance(self.plan.loss_scale, NoLossScale)
            self.journal.note(_NO_STEPS + (_LOOP_SCALE if scales else ""))

    def _keras_imported(self, keras: ModuleType | Any) -> None:
        backend = keras.backend.backend()
        if backend not in ("tensorflow", "jax", "torch"):
            fix = "Set KERAS_BACKEND to tensorflow, jax or torch."
            self.stop(UsageError(f"Keras's backend is {backend!r}, which does not train. {fix}"))
        self._resident = resident()
        from mezzo.keras.patches import patch
        from mezzo.keras.policy import set_policy

        if self.plan.is_fp32:
            switch_off_tf32(backend)
        set_policy(self.request.policy)
        self.backend = backend
        patch(self, self._patches)


if __name__ == "__main__":
    sys.exit(lifecycle.main(sys.argv[1:], run, "mezzo.keras.run"))
