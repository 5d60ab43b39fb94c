"""States of an optimizer that has taken no step, for `torch.distributed.checkpoint`, which loads into existing ones.

It calls `step` of a new optimizer with gradients and learning rates of zero, before it reads or loads a state. That
step counts, and is left out where gradients exist: in a window of accumulated losses, if all steps were skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.pytorch.distributed import local
from mezzo.pytorch.optim.state_dicts import MASTER


def is_for_checkpoint() -> bool:
    """Whether `torch.distributed.checkpoint` calls an optimizer's `state_dict`, or `step` to have its states created."""
    if "torch.distributed.checkpoint.state_dict" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("_init_optim_state", "_get_optim_state_dict"):
            return True
        frame = frame.f_back
    return False


def make_states(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    """Have an optimizer's `step` create its states, which count no step; parameters and gradients stay."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads, names = [param.grad for param in params], ("lr", "weight_decay")
    settings = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
    try:
        for group, of_group in zip(optimizer.param_groups, settings):
            group.update({name: value * 0 for name, value in of_group.items()})
        for param in params:
            zeros = torch.zeros_like(param, dtype=param.grad_dtype) if param.requires_grad else None
            param.grad = zeros
        with torch.random.fork_rng({param.device for param in params if param.is_cuda}):
            step()
    finally:
        for group, of_group in zip(optimizer.param_groups, settings):
            group.update(of_group)
        for param, grad in zip(params, grads):
            param.grad = grad
    count_no_step(optimizer)


def count_no_step(optimizer: Optimizer) -> None:
    """Set the step counts of an optimizer's states to 0."""
    for entry in optimizer.state.values():
        if "step" in entry:
            entry["step"] = entry["step"] * 0


def have_no_step(optimizer: Optimizer) -> bool:
    """Whether loaded states count no step and are zero: the next step starts without them, as if new."""
    counts = [entry["step"] for entry in optimizer.state.values() if "step" in entry]
    if not counts or any(map(float, counts)):
        return False
    return not any(
        isinstance(value, Tensor) and value.shape == param.shape and name != MASTER and bool(local(value).any())
        for param, entry in optimizer.state.items()
        for name, value in entry.items()
    )


class FirstStates:
    """Lets an optimizer of PyTorch's have all states in a checkpoint, whose first step starts without them, as if new.

    Not all states are zero before the first step (NAdam's `mu_product`, SGD's buffer with dampening).
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._unused = False  # whether the states are those of no step
        self._hooks = (
            optimizer.register_step_pre_hook(self._step_begins),
            optimizer.register_state_dict_pre_hook(self._saves),
            optimizer.register_load_state_dict_post_hook(self._has_loaded),
        )

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._unused:
            optimizer.state.clear()
        self._unused = not optimizer.state and is_for_checkpoint()

    def _saves(self, optimizer: Any) -> None:
        if self._unused:
            count_no_step(optimizer)
        elif not optimizer.state and is_for_checkpoint():
            make_states(optimizer, partial(type(optimizer).step, optimizer))
            self._unused = True

    def _has_loaded(self, optimizer: Any) -> None:
        self._unused = have_no_step(optimizer)

    def undo(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
