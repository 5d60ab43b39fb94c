"""LargestGradient: the largest number of a step's backward pass, for a loss scale that follows it.

It looks at the gradients of what modules return and at those of parameters. The latter are the larger ones where the
loss is a mean over a large batch: each sample's part of the gradient shrinks with the batch, and their sum over it, the
weight's gradient, does not (docs/monitoring.md has figures). In the updates that are looked at, hooks are on the
modules' outputs and on the parameters (`.grad` would be too late: a script may have clipped it); in all others there is
none. Nothing is read on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.pytorch import distributed
from mezzo.pytorch.monitor.exponent_rows import ExponentRows
from mezzo.pytorch.monitor.module_paths import paths
from mezzo.pytorch.monitor.observer import StepObserver
from mezzo.pytorch.monitor.watched_outputs import GRADIENT, WatchedOutputs

EVERY = 16
"""Updates from one that is looked at to the next."""

DENSE = 20
"""So many updates at the start are all looked at, so that a statistic has its first numbers soon."""


class LargestGradient(StepObserver):
    """Takes the largest magnitude over the gradients of all module outputs and parameters; a `StepObserver`.

    What is compiled into one graph is seen at its outputs and its parameters.

    Args:
        model: whose parameters are looked at, its calls seen or not (those of `Module.compile()` are not); None: of any
            model that is called.
        every: updates from one that is looked at to the next.
        dense: updates at the start that are all looked at.

    Attributes:
        largest: of the update that ended last, 0-dim FP32 on the loss scale's device, divided by the loss scale; the
            same on all ranks. Not finite where a gradient was not, 0 where none was seen. None: nobody looked.
    """

    def __init__(self, model: nn.Module | None = None, *, every: int = EVERY, dense: int = DENSE) -> None:
        self.largest: Tensor | None = None
        self._every, self._dense = every, dense
        self._updates = 0
        self._outputs = WatchedOutputs({GRADIENT})
        self._seen = _LargestMagnitude()
        self._of_weights = _LargestMagnitude()
        self._handles: dict[int, Any] = {}
        self._model = model
        self._models: list[nn.Module] = []
        self._unscaled = False

    def call_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hooks on the modules, if the update that comes is looked at."""
        if self._looks() and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            self._outputs.rows = self._seen
            self._outputs.call_begins(model, paths(model))
            if not any(model is one for one in self._models):
                self._models.append(model)

    def call_ended(self, model: nn.Module, output: Any) -> None:
        """What the model itself returned."""
        self._outputs.call_ended(model, output)

    def backward_begins(self, loss: Tensor, scale: Tensor | float) -> None:
        """From here gradients count."""
        self._outputs.backward_begins()
        if not self._looks():
            return
        for model in self._models if self._model is None else [self._model]:
            for param in model.parameters():
                if param.requires_grad and id(param) not in self._handles:
                    self._handles[id(param)] = param.register_hook(self._hook())

    def _hook(self) -> Callable[[Tensor | None], None]:
        seen = self._of_weights

        def hook(gradient: Tensor | None) -> None:
            if gradient is not None:
                seen.add("", "", gradient)

        return hook

    def update_begins(self, optimizer: Optimizer, scale: Tensor | float) -> None:
        """Until here. A scale of 1 says that gradients were unscaled before they came to any hook of a parameter."""
        self._outputs.backward_ended()
        self._unscaled = not isinstance(scale, Tensor) and scale == 1.0

    def update_ended(
        self,
        optimizer: Optimizer,
        *,
        index: int,
        number: int,
        skipped: Tensor | bool,
        loss_scale: Tensor | float,
    ) -> None:
        """The largest of all, over the loss scale; all hooks go."""
        looked = self._looks()
        self._updates += 1
        self.largest = None
        if looked:
            scale = torch.as_tensor(loss_scale, dtype=torch.float32)
            # The seed was S / accumulate: with `accumulate`, what the graph held is that much smaller.
            of_outputs = self._seen.largest(scale.device) / scale
            of_weights = self._of_weights.largest(scale.device)
            largest = torch.maximum(of_outputs, of_weights if self._unscaled else of_weights / scale)
            self.largest = distributed.agreed_largest(largest)
        self.step_dropped()

    def step_dropped(self) -> None:
        """Nothing of the step counts."""
        self._outputs.end()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._models.clear()
        self._seen, self._of_weights, self._unscaled = _LargestMagnitude(), _LargestMagnitude(), False

    def _looks(self) -> bool:
        return self._updates < self._dense or self._updates % self._every == 0


class _LargestMagnitude(ExponentRows):
    """In place of a histogram a tensor: the largest magnitude, one number a device."""

    def __init__(self) -> None:
        super().__init__()
        self._largest: dict[torch.device, Tensor] = {}
        self._guard = threading.Lock()  # autograd has a thread for each device

    def add(self, module: str, what: str, tensor: Tensor, *, name: str = "", format: str = "") -> bool:
        """Take a tensor's largest magnitude into account; NaN wins."""
        numbers = distributed.local(tensor.detach())
        if numbers.layout is torch.sparse_coo:
            numbers = numbers._values()
        if numbers.layout is not torch.strided or not numbers.is_floating_point() or not numbers.numel():
            return False
        low, high = torch.aminmax(numbers)
        own = torch.maximum(-low, high).float()
        with self._guard:
            before = self._largest.get(own.device)
            self._largest[own.device] = own if before is None else torch.maximum(before, own)
        return True

    def largest(self, device: torch.device) -> Tensor:
        """Over all devices, on one; 0 where nothing was seen."""
        found = torch.zeros((), device=device)
        for one in self._largest.values():
            found = torch.maximum(found, one.to(device))
        return found
