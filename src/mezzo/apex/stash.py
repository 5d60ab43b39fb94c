"""What `amp` adds to an optimizer: FP32 masters in its groups, unscaled gradients, skipped steps.

With masters (O2) the groups list FP32 `Parameter` objects, which `amp.master_params(optimizer)` gives to clip. The
model's 16-bit weights keep their scaled 16-bit gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.apex.casts import disable_casts
from mezzo.core.errors import CallOrderError, UsageError
from mezzo.pytorch import step as engine
from mezzo.pytorch.loss_scaler import inverse
from mezzo.pytorch.optim.with_masters import refresh_master, write_weight
from mezzo.pytorch.weights.stored_parameters import LOWERED

_Own = Callable[..., Any]


class Stash:
    """The attribute `_amp_stash` of an optimizer that `initialize` returned."""

    def __init__(self, optimizer: Any, *, masters: bool, exact: Mapping[Tensor, Tensor]) -> None:
        """Patch an optimizer's methods; `exact`: weight -> its FP32 value before the model was cast."""
        self.masters: dict[Tensor, nn.Parameter] = {}  # of the model's 16-bit weights
        self.skips = False  # the next step
        self._optimizer = optimizer
        self._has_masters = masters
        self._is_scaled = False  # from `begin` until the gradients are unscaled
        self._before: dict[Tensor, Tensor] = {}  # unscaled gradients of earlier backward passes
        if masters:
            for group in optimizer.param_groups:
                self._add_masters(group, exact)
        optimizer._amp_stash = self
        for name in ("step", "zero_grad", "add_param_group"):
            setattr(optimizer, name, _patched(getattr(self, f"_{name}"), getattr(optimizer, name), optimizer))

    @torch.no_grad()
    def begin(self) -> None:
        """Before a backward pass: put the unscaled gradients of earlier ones aside."""
        if self._is_scaled:  # after delay_unscale=True the scaled ones go on adding up
            return
        self._is_scaled = True
        for weight, master in self.masters.items():
            refresh_master(master, weight)  # the script may have loaded a checkpoint
            weight.grad = None
        for param in engine.parameters(self._optimizer):
            if param.grad is not None:
                self._before[param], param.grad = param.grad, None

    @torch.no_grad()
    def unscale(self, scale: float) -> bool:
        """Divide the new gradients by the scale, and add the earlier ones; whether a new one is NaN or infinite."""
        for weight, master in self.masters.items():
            master.grad = None if weight.grad is None else weight.grad.float()
        grads = engine.gradients_of(engine.parameters(self._optimizer), allow_fp16=True)
        found = engine.unscale_(grads, inverse(torch.tensor(scale)))
        self._put_back()
        return any(bool(flag) for flag in found.values())

    def abandon(self) -> None:
        """The backward pass failed: its gradients are dropped."""
        for param in [*self.masters, *engine.parameters(self._optimizer)]:
            param.grad = None
        self._put_back()

    def _put_back(self) -> None:
        for param, grad in self._before.items():
            param.grad = grad if param.grad is None else param.grad + grad
        self._before, self._is_scaled = {}, False

    def _add_masters(self, group: dict[str, Any], exact: Mapping[Tensor, Tensor] = {}) -> None:
        for index, weight in enumerate(group["params"]):
            if weight.dtype in LOWERED:
                value = exact.get(weight, weight).detach().float()
                master = nn.Parameter(value, requires_grad=weight.requires_grad)
                with torch.no_grad():
                    write_weight(master, weight)
                if weight in self._optimizer.state:
                    self._optimizer.state[master] = self._optimizer.state.pop(weight)
                group["params"][index] = self.masters[weight] = master

    def _drop_master_gradients(self) -> None:
        for master in self.masters.values():  # which the model's zero_grad() would not reach
            master.grad = None

    def _step(self, own: _Own, closure: Any = None, **kwargs: Any) -> Any:
        self._optimizer._opt_called = True  # read by schedulers
        if closure is not None:
            raise UsageError(
                "amp: optimizer.step(closure) is not supported, as in Apex. Use mezzo.GradScaler: "
                "scaler.step(optimizer, closure)."
            )
        if self.skips:
            self.skips = False
            self._drop_master_gradients()
            return None
        if self._is_scaled:
            raise CallOrderError(
                "amp: optimizer.step() was called while its gradients are still scaled. Call it after the scale_loss "
                "block, and leave out delay_unscale=True in the last block before a step."
            )
        with disable_casts():
            result = own(**kwargs)
        with torch.no_grad():
            for weight, master in self.masters.items():
                refresh_master(master, weight) if master.grad is None else write_weight(master, weight)
        self._drop_master_gradients()
        return result

    def _zero_grad(self, own: _Own, *args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        for weight in self.masters:
            weight.grad = None
        self._drop_master_gradients()
        self._before, self._is_scaled = {}, False

    def _add_param_group(self, own: _Own, group: dict[str, Any]) -> None:
        own(group)
        if self._has_masters:
            self._add_masters(self._optimizer.param_groups[-1])


def _patched(function: Callable[..., Any], own: _Own, optimizer: Optimizer) -> MethodType:
    """A method that calls `function(own, ...)`; bound, and with `own`'s attributes, as schedulers need it."""

    @functools.wraps(own)
    def method(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return function(own, *args, **kwargs)

    return MethodType(method, optimizer)
