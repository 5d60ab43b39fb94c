"""WatchedParameters: weights, their gradients and how far one update moves them, counted in place."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.core.finding import OUTSIDE
from mezzo.pytorch import distributed
from mezzo.pytorch.dtypes import name_of
from mezzo.pytorch.monitor.exponent_rows import ExponentRows
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.weights import master_state
from mezzo.pytorch.weights.lowering import LOWERED, peek_master

WEIGHT, GRADIENT, RATIO = "weight", "weight gradient", "update ratio"

BLOCK = 1 << 18
"""Elements whose ratio is computed at once: what lies between is then still in a processor's cache."""


class WatchedParameters:
    """Looks at the parameters of one optimizer in one update: before it, and after it.

    A parameter that has 16-bit weights and an FP32 master is looked at in its master. Copies of the weights, in
    their own format, are kept from before to after.

    Args:
        optimizer: the user's.
        names: id of a parameter -> path of its module, and its name there.
        kinds: which of weights, weight gradients and update ratios are wanted.
    """

    def __init__(
        self, optimizer: Optimizer, names: dict[int, tuple[str, str]], kinds: Collection[str]
    ) -> None:
        self._optimizer = optimizer
        self._names = names
        self._kinds = kinds
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: set[int] = set()
        self._handles: list[Any] = []
        self._masters = _Masters(optimizer)
        self.rows = ExponentRows()

    def before(self, params: Iterable[Tensor] | None = None) -> None:
        """Look at weights and gradients: of all parameters, or of some whose gradients have just come."""
        for param in self._params() if params is None else params:
            if id(param) in self._seen:
                continue
            self._seen.add(id(param))
            module, name = self._name(param)
            moves = param.grad is not None
            value, is_copy = (
                self._masters.read(param) if moves else (distributed.local(param.detach()), False)
            )
            if WEIGHT in self._kinds:
                self.rows.add(module, WEIGHT, value, name=name, format=name_of(param.dtype))
            if GRADIENT in self._kinds and param.grad is not None:
                self.rows.add(module, GRADIENT, param.grad, name=name)
            if RATIO in self._kinds and moves:
                self._before[id(param)] = (param, value if is_copy else value.clone())

    def before_each(self) -> None:
        """Look at each parameter as soon as its gradient is complete, before any hook that is put on it later."""
        for param in self._params():
            if param.requires_grad:
                hook = lambda param: self.before([param])  # noqa: E731
                self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def after(self) -> ExponentRows:
        """Look at how far the parameters have moved; their ratios, in rows of their own."""
        rows = ExponentRows()
        for param, before in self._before.values():
            module, name = self._name(param)
            after, _ = self._masters.read(param)
            for ratio in ratios(before, after):
                rows.add(module, RATIO, ratio, name=name, format=name_of(before.dtype))
        self.end()
        return rows

    def end(self) -> None:
        """Let go of all copies and hooks."""
        self._before.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _params(self) -> Iterable[Tensor]:
        return (param for group in self._optimizer.param_groups for param in group["params"])

    def _name(self, param: Tensor) -> tuple[str, str]:
        if id(param) not in self._names:
            place = next(i for i, one in enumerate(self._params()) if one is param)
            return OUTSIDE, f"parameter {place}"
        return self._names[id(param)]


class _Masters:
    """Where a parameter's exact value is: in the optimizer's FP32 master, or in itself."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._owners = master_state._owners(optimizer)
        owners = {id(owner): owner for owner in self._owners.values()}.values()
        self._without = {
            id(param)
            for owner in owners
            for group in owner.param_groups
            if group.get("masters") == "none"
            for param in group["params"]
        }

    def read(self, param: Tensor) -> tuple[Tensor, bool]:
        """The exact value, and whether that is a copy and not the parameter's own memory."""
        owner = None
        if param.dtype in LOWERED and id(param) not in self._without:
            owner = self._owners.get(id(param))
        if owner is None:
            return distributed.local(param.detach()), False
        if isinstance(owner, FusedOptimizer) and not owner.state.get(param):
            # It has not moved yet. To ask for its master would give it a state, which a skipped step must not.
            kept = peek_master(param)
            value = param.detach().to(torch.float32) if kept is None else kept
        else:
            value = owner.master(param).detach()
        return distributed.local(value), True


def ratios(before: Tensor, after: Tensor) -> Iterable[Tensor]:
    """``abs(after - before) / abs(before)``, in FP32 at least, by blocks; 0 where nothing moved, infinite from 0.

    Args:
        before, after: floating, of one shape and device.
    """
    wide = torch.promote_types(before.dtype, torch.float32)
    old, new = before.reshape(-1), after.reshape(-1)
    for start in range(0, old.numel(), BLOCK):
        base = old[start : start + BLOCK].to(wide)
        moved = new[start : start + BLOCK].to(wide) - base
        still = moved == 0
        yield moved.abs_().div_(base.abs()).masked_fill_(still, 0)
