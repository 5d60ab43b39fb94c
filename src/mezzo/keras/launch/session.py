"""Session: what one run of a Keras script knows of itself while it runs. Every patched function holds the same one."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from mezzo.core.errors import MezzoError, UsageError
from mezzo.core.loss_scale import NoLossScale
from mezzo.keras.policy.plan import KerasPlan
from mezzo.scripts.journal import Journal
from mezzo.scripts.request import RunRequest

# The first steps make variables and compile; the step after them is like all later ones.
FIRST = 2


@dataclass
class Session:
    """The state of a run.

    Attributes:
        backend: Keras's backend; empty until the script has imported Keras.
        left_alone: why the script's own policy rules; None while Mezzo's does.
        fatal: the user's mistake that only a line of the script could show.
        inside: whether a step of Keras's own trainer runs: what its optimizer does is that step's.
        used: whether the script has made a layer of Keras's: importing TensorFlow imports Keras too.
        resident: bytes that the process held when Keras had been imported; None where the system does not tell.
    """

    request: RunRequest
    plan: KerasPlan
    journal: Journal
    backend: str = ""
    left_alone: str | None = None
    fatal: MezzoError | None = None
    inside: bool = False
    used: bool = False
    resident: int | None = None
    _numbers: weakref.WeakKeyDictionary[Any, int] = field(default_factory=weakref.WeakKeyDictionary)
    _next: Iterator[int] = field(
        default_factory=itertools.count
    )  # the dictionary forgets those that are gone
    _moved: int = 0
    _updates: int = 0
    _watching: Any = None
    _observed: bool = False
    formats: Any = None

    @property
    def scales(self) -> bool:
        """Whether the plan has a loss scale."""
        return self.left_alone is None and not isinstance(self.plan.loss_scale, NoLossScale)

    def stop(self, error: MezzoError) -> NoReturn:
        """End the run for a mistake that is the user's."""
        self.fatal = error
        raise error

    @contextmanager
    def heeding(self) -> Iterator[None]:
        """What Keras does here checks the run's policy: where that does not fit the script, the user's mistake is told.

        Raises:
            UsageError: as it was raised; under a policy of Mezzo's it ends the run.
        """
        try:
            yield
        except UsageError as error:
            if not self.plan.is_fp32 and self.left_alone is None:
                self.fatal = error
            raise

    def number(self, optimizer: Any) -> int:
        """The number of an optimizer (of a model, where it has none of its own), in the order of their first steps."""
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._next)
        return self._numbers[optimizer]

    def stepped(
        self, optimizer: Any, *, loss: float | None, skipped: bool = False, scale: float = 1.0
    ) -> None:
        """A training step is over.

        Raises:
            SystemExit: as many steps as were asked for are done.
        """
        number = self.number(optimizer)
        if loss is not None:
            self.journal.loss(loss)
        watching, self._watching = self._watching, None
        if watching is not None:
            memory = watching.stop()
            if skipped:  # the next step that moves is observed instead
                self._moved = FIRST - 1
            else:
                self._observed = True
                if memory is None:
                    self.journal.note("peak memory was not measured: this system does not tell it")
                self.journal.observed(memory, None if self.formats is None else self.formats.table())
        self.journal.update(
            number,
            moved=not skipped,
            loss_scale=scale,
            reason="gradients not finite" if skipped else "",
            observed=watching is not None,
        )
        self._watch_next(number, skipped)
        self._count(number)

    def _watch_next(self, number: int, skipped: bool) -> None:
        if not self.request.observe or self._observed or number != 0 or skipped:
            return
        self._moved += 1
        if self._moved == FIRST:
            from mezzo.keras.launch.memory import peak_memory

            self._watching = peak_memory(self.backend, self.resident)

    def _count(self, number: int) -> None:
        self._updates += number == 0
        wanted = self.request.stop_after
        if wanted is not None and self._updates >= wanted:
            self.journal.note(f"ended after {wanted} updates of the first optimizer, as asked")
            raise SystemExit(0)

    def finish(self) -> None:
        """The script is over."""
        if self.request.observe and not self._observed and self.left_alone is None:
            self.journal.note(
                "no step was observed (memory, formats): the script ended before its third update"
            )
        if not self.journal.losses and not self.journal.updates:
            self.journal.note("the script never called fit or train_on_batch, nor an optimizer of Keras's")
