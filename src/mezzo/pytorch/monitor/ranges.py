"""RangeWatch: exponent histograms of a training's weights, activations, gradients and updates, at an interval.

Counted are calls of the model in training mode, the gradients of `backward` on a loss, and one update: not evaluation,
not what activation checkpointing repeats, not the gradients of a penalty. In all other updates there is no hook.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.errors import UsageError
from mezzo.core.ranges import RangeRow, shift_of
from mezzo.core.records import RangesRecord, Record
from mezzo.pytorch.module_paths import joined, opaque_part, parameter_paths, path_of, paths
from mezzo.pytorch.monitor import counted
from mezzo.pytorch.monitor.counted import ExponentRows, WatchedOutputs, WatchedParameters
from mezzo.pytorch.monitor.observer import Scale, StepObserver

DEFAULT_EVERY = 100
"""Updates from one that is watched to the next."""

KEPT = 32
"""Watched updates whose records are kept for `drain`."""

_COMPILED = (
    "watch: {} is compiled: outputs of its modules are not watched; its weights, gradients and updates are."
)
_NOT_CALLED = (
    "watch: the model was not called in a watched update, so activations are missing. Call the model itself (not only "
    "parts of it), in training mode and outside of compiled functions."
)


class RangeWatch(StepObserver):
    """A `StepObserver` that counts every `every` updates, also `ratios`; `notes`: what was not counted."""

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: Optimizer | None,
        *,
        every: int = DEFAULT_EVERY,
        clock: Callable[[], float] = time.monotonic,
        ratios: bool = True,
        note: Callable[[str], None] | None = None,
        all_modules: bool = False,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise UsageError(f"watch={every!r} is not a number of updates of at least 1. Example: watch=100")
        self.every, self.notes = every, list[str]()
        self._optimizer, self._clock = optimizer, clock
        self._tell = note or partial(warnings.warn, stacklevel=2)
        self._all_modules, self._ratios = all_modules, ratios
        self._updates: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        if optimizer is not None:
            self._updates[optimizer] = 0
        # Model -> what the paths of its modules begin with.
        self._models: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        if model is not None:
            self._models[model] = ""
        self._begin()
        self._releases = False  # the optimizer steps within backward, without `update_begins`
        self._weight_scale: Scale = 1.0
        # Each waits for the device when it is first called.
        self._waiting: deque[Callable[[], RangesRecord]] = deque(maxlen=KEPT)
        self._last: Callable[[], RangesRecord] | None = None

    def _begin(self) -> None:
        """A step begins, which ends with an update or is dropped."""
        self._outputs = WatchedOutputs(distinct=self._all_modules)
        self._parameters: WatchedParameters | None = None
        self._gradient_scale: Scale | None = None  # of the step's activation gradients

    @property
    def rows(self) -> list[RangeRow]:
        """The rows of the last watched update; none before the first. Waits for the device."""
        return [] if self._last is None else self._last().rows

    def drain(self) -> list[Record]:
        """The records of the watched updates since the last call, of the last `KEPT` of them. Waits for the device."""
        found: list[Record] = [read() for read in self._waiting]
        self._waiting.clear()
        return found

    def call_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put hooks on the modules, if the update that comes is watched."""
        if not self._armed() or _capturing():
            return
        prefix = self._prefix(model)
        if compiled := opaque_part(model):
            self._note(_COMPILED.format(compiled))
        self._outputs.call_begins(model, paths(model, every=self._all_modules), prefix)

    def call_ended(self, model: nn.Module, output: Any) -> None:
        """What the model itself returned."""
        self._outputs.call_ended(model, output)

    def backward_begins(self, loss: Tensor, scale: Scale) -> None:
        """From here gradients count."""
        self._outputs.backward_begins()
        if self._gradient_scale is None:
            self._gradient_scale = _kept(scale)
        optimizer = self._optimizer
        if self._releases and self._parameters is None and optimizer is not None and self._due(optimizer):
            self._watch(optimizer, scale).before_each()

    def update_begins(self, optimizer: Optimizer, scale: Scale) -> None:
        """Weights and gradients, before they move."""
        self._outputs.backward = 0
        if self._of_interest(optimizer) and self._due(optimizer) and not _capturing():
            self._watch(optimizer, scale).before()

    def update_ended(
        self, optimizer: Optimizer, *, index: int, number: int, skipped: Tensor | bool, loss_scale: Scale
    ) -> None:
        """The ratios, and with them the record; all hooks go."""
        if not self._of_interest(optimizer):
            return
        due = self._due(optimizer)
        outputs, scale, parameters = self._outputs.end(), self._gradient_scale, self._parameters
        self._begin()
        begun = parameters is not None or _capturing()
        if due and not begun and self._optimizer is not None and not self._releases:
            self._releases = True  # known from here on: the next update is watched instead of this one
            return
        self._updates[optimizer] = self._updates.get(optimizer, 0) + 1
        if not due or (parameters is None and not outputs):
            return
        rows, ratios = ExponentRows(), ExponentRows()
        if parameters is not None:
            rows = parameters.rows
            ratios = ratios if skipped is True else parameters.after()
            parameters.end()
        if not outputs:
            self._note(_NOT_CALLED)
        rows.take(outputs)
        scales = {
            counted.ACTIVATION_GRADIENT: 1.0 if scale is None else scale,
            counted.WEIGHT_GRADIENT: self._weight_scale,
        }
        at, loss_scale, skipped = self._clock(), _kept(loss_scale), _kept(skipped)

        @cache
        def read() -> RangesRecord:
            shifts = {what: -shift_of(float(scale)) for what, scale in scales.items()}
            found, moved = rows.read(shifts), ratios.read(shifts)
            return RangesRecord(
                index, number, at, float(loss_scale), found if bool(skipped) else found + moved
            )

        self._last = read
        self._waiting.append(read)

    def step_dropped(self) -> None:
        """Nothing of the step counts."""
        self._outputs.end()
        if self._parameters is not None:
            self._parameters.end()
        self._begin()

    def _of_interest(self, optimizer: Optimizer) -> bool:
        return self._optimizer is None or optimizer is self._optimizer

    def _due(self, optimizer: Optimizer) -> bool:
        return self._updates.get(optimizer, 0) % self.every == 0

    def _armed(self) -> bool:
        """Whether the update that comes is watched; with several optimizers: whether one that may come is."""
        if self._optimizer is None and max(self._updates.values(), default=0) < 2:
            return True  # not every optimizer has been seen
        return any(map(self._due, self._updates))

    def _prefix(self, model: nn.Module) -> str:
        """What a model's paths begin with: nothing for the first one, for another one its class."""
        if model not in self._models:
            inside = ((prefix, path_of(model, whole)) for whole, prefix in self._models.items())
            name = type(model).__name__ if self._models else ""
            again = sum(prefix.startswith(name) for prefix in self._models.values())
            new = f"{name}{again + 1 if again else ''}"
            known = (joined(prefix, path) for prefix, path in inside if path is not None)
            self._models[model] = next(known, new)
        return self._models[model]

    def _watch(self, optimizer: Optimizer, scale: Scale) -> WatchedParameters:
        names: dict[int, tuple[str, str]] = {}
        for model, prefix in reversed([*self._models.items()]):
            found = parameter_paths(model)
            names |= {key: (joined(prefix, path), name) for key, (path, name) in found.items()}
        self._weight_scale = _kept(scale)
        self._parameters = WatchedParameters(optimizer, names, self._ratios)
        return self._parameters

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self._tell(text)


def _kept(value: Any) -> Any:
    """A number as it is now, wherever it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _capturing() -> bool:
    """Whether a CUDA graph is being captured: it would count in every replay."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
