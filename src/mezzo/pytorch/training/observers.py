"""Observers of a training's steps: histograms and overflow tracing. Without observers no hook is on the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id as _graph_task  # -1 outside a backward pass
from torch.optim import Optimizer

from mezzo.core.overflow import ALARMS, OverflowReport
from mezzo.core.ranges import RangeRow
from mezzo.core.records import Record
from mezzo.pytorch import loss_scaler
from mezzo.pytorch.distributed import is_sharded
from mezzo.pytorch.monitor.observer import StepObserver
from mezzo.pytorch.monitor.overflow_tracer import NOT_TRACED, OverflowTracer
from mezzo.pytorch.monitor.ranges import DEFAULT_EVERY, RangeWatch
from mezzo.pytorch.monitor.replay import running_again
from mezzo.pytorch.training.resolved_precision import ResolvedPrecision


def observers_for(
    resolved: ResolvedPrecision,
    model: nn.Module,
    optimizer: Optimizer | None,
    watch: bool | int,
    trace: bool | None,
    clock: Callable[[], float],
) -> list[StepObserver]:
    """The observers that `watch` and `trace` ask for; `clock` counts the seconds since the run's start."""
    observers: list[StepObserver] = []
    if watch:
        every = DEFAULT_EVERY if watch is True else watch
        observers.append(RangeWatch(model, optimizer, every=every, clock=clock))
    free = resolved.scaler is not None and loss_scaler.reading_is_free(next(model.parameters()))
    if trace or (trace is None and free):
        if trace and is_sharded(model):
            warnings.warn(f"trace=True: {NOT_TRACED}.", stacklevel=4)
        how: Any = {"waits": bool(trace), "scaling": lambda: resolved.scaler and resolved.scaler.pure}
        observers.append(OverflowTracer(enter=resolved.context, clock=clock, model=model, **how))
    return observers


class Observers:
    """Reports calls of models in training mode, outermost ones, backward and optimizer steps to observers."""

    def __init__(self, models: nn.Module | Sequence[nn.Module], observers: Sequence[StepObserver]) -> None:
        self._observers = list(observers)
        self.listening = bool(observers)
        self.tracer = next((one for one in observers if isinstance(one, OverflowTracer)), None)
        self._handles: list[Any] = []
        self._inside = 0
        self._warned = -1  # whether the last warning named the place; -1 before the first
        for model in [models] if isinstance(models, nn.Module) else models:
            self.watch(model)

    def __reduce__(self) -> Any:
        return type(self), ([], [])  # a copy of a model has the hooks, and nothing to report to

    def watch(self, model: nn.Module) -> list[Any]:
        """Report the calls of one more model; returns the hooks, none without observers."""
        if not self._observers:
            return []
        handles = [
            model.register_forward_pre_hook(self._call_begins, with_kwargs=True),
            model.register_forward_hook(self._call_ended, always_call=True),
        ]
        self._handles += handles
        return handles

    def _call_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self._inside += 1
        if self._looks(model):
            for observer in self._observers:
                observer.call_begins(model, args, kwargs)

    def _call_ended(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._looks(model) and output is not None:  # None: the call raised
            for observer in self._observers:
                observer.call_ended(model, output)
        self._inside = max(0, self._inside - 1)

    def _looks(self, model: nn.Module) -> bool:
        if self._inside != 1 or not model.training or running_again():
            return False
        return torch.is_grad_enabled() and _graph_task() == -1

    @property
    def watches_live(self) -> bool:
        """Whether the tracer wants to see the operations of the next context."""
        tracer = self.tracer
        return tracer is not None and not torch.compiler.is_dynamo_compiling() and tracer.watches_live

    def live(self) -> AbstractContextManager[Any]:
        """Show the operations inside to the tracer, if it wants to see them."""
        return self.tracer.live() if self.tracer is not None and self.watches_live else nullcontext()

    def backward_begins(self, loss: Tensor, scale: Tensor | float) -> None:
        """Backward is about to run from a loss."""
        for observer in self._observers:
            observer.backward_begins(loss, scale)

    def update_begins(self, optimizer: Optimizer, scale: Tensor | float) -> None:
        """The optimizer is about to step."""
        for observer in self._observers:
            observer.update_begins(optimizer, scale)

    def update_ended(
        self, optimizer: Optimizer, *, index: int, skipped: Tensor | bool, loss_scale: Tensor | float
    ) -> OverflowReport | None:
        """The optimizer has stepped or skipped; returns the diagnosis of a skip."""
        finding: OverflowReport | None = None
        for observer in self._observers:
            observer.update_ended(optimizer, index=index, number=0, skipped=skipped, loss_scale=loss_scale)
            finding = finding or observer.finding
        return finding

    def warning(self, one: OverflowReport | None, where: str) -> str:
        """The text of a warning of the first finding that alarms, and of the first with a line; `where` all are."""
        if one is None or not one.alarms or one.cause == "unknown" or one.is_located <= self._warned:
            return ""
        self._warned = one.is_located
        more = "Later ones" if self._warned else "One more follows if its line is found; later ones"
        return f"{one.sentence}.{one.advice} {more} are only in {where}, of {ALARMS} places at most."

    def step_dropped(self) -> None:
        """Backward raised."""
        for observer in self._observers:
            observer.step_dropped()

    def drain(self) -> list[Record]:
        """Their records since the last call."""
        return [record for observer in self._observers for record in observer.drain()]

    @property
    def ranges(self) -> list[RangeRow]:
        """The histograms of the last watched update; none without `watch`."""
        return [row for one in self._observers if isinstance(one, RangeWatch) for row in one.rows]

    def undo(self) -> None:
        """Take the hooks off the model and drop the step that was begun."""
        self.step_dropped()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
