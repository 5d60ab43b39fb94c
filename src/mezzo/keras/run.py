"""run: one unmodified Keras script under one policy, from the request to the exit status.

`python -m mezzo.keras.run REQUEST.json` is a child process that runs one request and ends as its script ended. Nothing
of Keras is imported here before the script does so; `mezzo.keras.patches` is what the script meets in Keras then.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NoReturn

from mezzo.core.errors import MezzoError, UsageError
from mezzo.core.loss_scale import NoLossScale
from mezzo.core.records import MemoryRecord, RunStarted
from mezzo.keras.hardware import describe, peak_memory, resident, switch_off_tf32
from mezzo.keras.plan import KerasPlan, plan
from mezzo.runner import lifecycle, script
from mezzo.runner.journal import Journal
from mezzo.runner.lifecycle import RunRequest
from mezzo.runner.patches import ImportWatch, Patches
from mezzo.runner.seeds import FrameworkSeeds

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

# The first steps make variables and compile; the step after them is like all later ones.
_FIRST = 2


def run(request: RunRequest) -> int:
    """Run a script as `python SCRIPT ARGS...` would, under a dtype policy; its exit status.

    Keras's backend is the one that the script or KERAS_BACKEND chooses. A script that raises has its traceback printed,
    with the script's code alone in it, and gives status 1; after an interrupt the status is 130. All patches are undone
    at the end.

    Raises:
        UsageError: the script is missing, the policy is wrong, the request asks for what only PyTorch's runs do, or
            records can't be written; nothing has run.
        ScriptError: the script sets a mixed policy of its own.
        MezzoError: likewise, from the policy.
    """
    for name in _NOT_HERE:
        if getattr(request, name):
            raise UsageError(
                f"a run of a Keras script can't be asked for {name} ({getattr(request, name)!r}): leave it out. "
                "mezzo.keras.PrecisionMonitor, a callback, watches a model in fit."
            )
    kept, target = plan(request.policy), script.locate(request.target, is_module=request.is_module)
    session: Session
    journal = Journal(request.records, lambda: session.started())
    session = Session(request, kept, journal)
    imports = ImportWatch()
    parts: list[lifecycle.Part] = [imports]
    if request.seed_offset is not None:  # before the policy: Keras's own modules draw from the streams
        parts.append(FrameworkSeeds(request.seed_offset, imports))
    parts.append(Instrument(session, imports))
    return lifecycle.run(
        session,
        target,
        parts,
        finish=lambda status: session.finish(),
        summary=lambda failed: "\n".join(f"mezzo: {note}" for note in journal.notes),
    )


@dataclass
class Session:
    """What one run of a Keras script knows of itself. Every patched function holds the same one.

    Attributes:
        backend: Keras's backend; empty until the script has imported Keras.
        fatal: the user's mistake that only a line of the script could show.
        used: whether the script has made a layer of Keras's: importing TensorFlow imports Keras too.
        resident: bytes that the process held when Keras had been imported; None where the system does not tell.
        formats: gives a row for each layer that was called, if they are observed.
    """

    request: RunRequest
    plan: KerasPlan
    journal: Journal
    backend: str = ""
    fatal: MezzoError | None = None
    used: bool = False
    resident: int | None = None
    formats: Any = None
    _numbers: weakref.WeakKeyDictionary[Any, int] = field(default_factory=weakref.WeakKeyDictionary)
    # The dictionary forgets those that are gone.
    _next: Iterator[int] = field(default_factory=itertools.count)
    _moved: int = 0
    _measuring: Callable[[], MemoryRecord | None] | None = None
    _observed: bool = False

    def started(self) -> RunStarted:
        """The record that begins the run."""
        used = self.used or bool(self.journal.losses or self.journal.updates)
        return lifecycle.started(self.request, self.plan.precision, describe(self.backend, used=used))

    def stop(self, error: MezzoError) -> NoReturn:
        """End the run for a mistake that is the user's."""
        self.fatal = error
        raise error

    def stepped(self, optimizer: Any, *, skipped: bool, scale: float) -> None:
        """A training step is over. An optimizer's number is its place in the order of first steps.

        Raises:
            SystemExit: as many steps as were asked for are done.
        """
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._next)
        number = self._numbers[optimizer]
        stop, self._measuring = self._measuring, None
        if stop is not None:
            memory = stop()
            if skipped:  # the next step that moves is observed instead
                self._moved = _FIRST - 1
            else:
                self._observed = True
                if memory is None:
                    self.journal.note("peak memory was not measured: this system does not tell it")
                self.journal.observed(memory, None if self.formats is None else self.formats())
        self.journal.update(
            number,
            moved=not skipped,
            loss_scale=scale,
            reason="gradients not finite" if skipped else "",
            observed=stop is not None,
        )
        if self.request.observe and not self._observed and number == 0 and not skipped:
            self._moved += 1
            if self._moved == _FIRST:
                self._measuring = peak_memory(self.backend, self.resident)
        self.journal.stop_after(self.request.stop_after)

    def finish(self) -> None:
        """The script is over."""
        journal = self.journal
        if self.request.observe and not self._observed:
            journal.note("no step was observed (memory, formats): the script ended before its third update")
        if not journal.losses and not journal.updates:
            scales = self.used and not isinstance(self.plan.loss_scale, NoLossScale)
            journal.note(_NO_STEPS + (_LOOP_SCALE if scales else ""))


class Instrument:
    """Sets the policy once the script has imported Keras, records what it trains, and undoes all of it at the end."""

    def __init__(self, session: Session, imports: ImportWatch) -> None:
        self._session = session
        self._imports = imports
        self._patches = Patches()
        self._policy_set = False

    def install(self) -> None:
        """Wait for Keras."""
        self._imports.when("keras", self._keras_imported)

    def remove(self) -> None:
        """Undo all of it."""
        self._patches.undo()
        if self._policy_set:
            from mezzo.keras.policy import set_policy

            set_policy("fp32")

    def _keras_imported(self, keras: ModuleType | Any) -> None:
        session = self._session
        session.backend = keras.backend.backend()
        if session.backend not in ("tensorflow", "jax", "torch"):
            session.stop(
                UsageError(
                    f"Keras's backend is {session.backend!r}, which does not train. Set KERAS_BACKEND to tensorflow, "
                    "jax or torch."
                )
            )
        session.resident = resident()
        from mezzo.keras.patches import patch
        from mezzo.keras.policy import set_policy

        if session.plan.is_fp32:
            switch_off_tf32(session.backend)
        set_policy(session.request.policy)
        self._policy_set = True
        patch(session, self._patches)


def main(words: list[str]) -> int:
    """Read the request, run it, return its status; 2 for a request that can't be run."""
    return lifecycle.main(words, run, "mezzo.keras.run")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
