"""What `amp` adds to an optimizer: unscaled gradients, skipped steps, and FP32 masters (`mezzo.pytorch.optim`).

With masters (O2) `amp.master_params(optimizer)` gives FP32 `Parameter` objects with unscaled gradients to clip. The
model's 16-bit weights keep their scaled 16-bit gradients until the step.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.apex.casts import disable_casts
from mezzo.core.errors import CallOrderError, UsageError
from mezzo.pytorch import step as engine
from mezzo.pytorch.loss_scaler import inverse
from mezzo.pytorch.optim.with_masters import WithMasters, with_masters


class Stash:
    """The attribute `_amp_stash` of an optimizer that `initialize` returned."""

    def __init__(self, optimizer: Any, exact: Mapping[Tensor, Tensor] | None) -> None:
        """Replace an optimizer's methods; `exact`: parameter -> its FP32 value, for masters."""
        self.skips = False  # the next step
        self._optimizer = optimizer
        self._is_scaled = False  # from `begin` until the gradients are unscaled
        self._versions: dict[Tensor, int] = {}  # of 16-bit gradients whose values the masters have
        self._before: dict[Tensor, Tensor] = {}  # unscaled gradients of earlier backward passes
        if exact is not None:
            with_masters(optimizer)
            for param, value in exact.items():
                optimizer.set_master(param, value)
        optimizer._amp_stash = self
        for name in ("step", "zero_grad"):
            method = _around(getattr(self, f"_{name}"), getattr(optimizer, name))
            setattr(optimizer, name, MethodType(method, optimizer))

    def masters(self) -> dict[Tensor, nn.Parameter]:
        """The masters of 16-bit weights."""
        return self._optimizer.masters() if isinstance(self._optimizer, WithMasters) else {}

    def parameters(self) -> list[Tensor]:
        """The parameters that the optimizer updates: masters where there are some."""
        masters = self.masters()
        return [masters.get(param, param) for param in engine.parameters(self._optimizer)]

    @torch.no_grad()
    def begin(self) -> None:
        """Before a backward pass: put the unscaled gradients of earlier ones aside."""
        if self._is_scaled:  # after delay_unscale=True the scaled ones go on adding up
            return
        self._is_scaled = True
        self._before = {param: param.grad for param in self.parameters() if param.grad is not None}
        for param in (*self.masters(), *self._before):
            param.grad = None

    @torch.no_grad()
    def unscale(self, scale: float) -> bool:
        """Divide the new gradients by the scale, and add the earlier ones; whether a new one is NaN or infinite."""
        for weight, master in self.masters().items():
            master.grad = None if weight.grad is None else weight.grad.float()
            self._versions[weight] = getattr(weight.grad, "_version", 0)
        grads = engine.gradients_of(self.parameters(), allow_fp16=True)
        found = engine.unscale_(grads, inverse(torch.tensor(scale)))
        for param, grad in self._before.items():
            param.grad = grad if param.grad is None else param.grad + grad
        self._before, self._is_scaled = {}, False
        return any(bool(flag) for flag in found.values())

    def _step(self, own: Any, closure: Any = None, **kwargs: Any) -> Any:
        self._optimizer._opt_called = True  # read by schedulers
        if closure is not None:
            fix = "Use mezzo.GradScaler().step(optimizer, closure)."
            raise UsageError(f"amp: step(closure) is not supported. {fix}")
        if self.skips:
            self.skips = False
            for master in self.masters().values():  # which the model's zero_grad() would not reach
                master.grad = None
            return None
        if self._is_scaled:
            raise CallOrderError(
                "amp: optimizer.step() was called with scaled gradients. Call it after the scale_loss block, and leave "
                "out delay_unscale=True in the last block before a step."
            )
        for weight in self.masters():
            grad, weight.grad = weight.grad, None  # those of the masters are taken
            if grad is not None and grad._version != self._versions.get(weight):
                warnings.warn(
                    "amp: gradients of 16-bit weights were changed after scale_loss, which has no effect. Clip those "
                    "of amp.master_params(optimizer) instead of model.parameters() or optimizer.param_groups.",
                    stacklevel=4,
                )
        with disable_casts():
            return own(**kwargs)

    def _zero_grad(self, own: Any, *args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        for master in self.masters().values():
            master.grad = None
        self._before, self._is_scaled = {}, False


def _around(function: Any, own: Any) -> Any:
    """A function for a method that calls `function(own, ...)`, with `own`'s attributes, as schedulers need it."""

    @functools.wraps(own)
    def method(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(own, *args, **kwargs)

    return method
