"""Adoption: a `torch.optim` optimizer that was made elsewhere goes on as one of Mezzo's, under its own name.

The script keeps its object, its schedulers and its hooks. Parameter groups, which are the very same dicts, and state
are shared, so that a learning rate set on either side is one learning rate. The user's object changes its class to a
subclass of its own, each of whose methods goes to the fused optimizer: an object that forwarded by attributes of its
own would be a torch optimizer again once it is copied or loaded, over states that it can't read.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.core.errors import UsageError
from mezzo.pytorch.optim import checks, state_dicts, storage
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.optim.optimizers import SGD, Adam, AdamW
from mezzo.pytorch.weights.lowering import take_master

_FUSED: dict[type[Optimizer], type[FusedOptimizer]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
}

_MEND = "Put FP32 masters under it as it is: mezzo.optim.with_masters(optimizer)."


def adopt(optimizer: Optimizer, *, masters: str, state: str) -> FusedOptimizer:
    """The fused optimizer that takes over from a torch one, which stays alive as its alias.

    Naive code::

        fused = mezzo.optim.AdamW(optimizer.param_groups, masters=masters, state=state)
        fused.load_state_dict(optimizer.state_dict())

    Args:
        optimizer: `torch.optim.AdamW`, `Adam` or `SGD` itself, of no derived class. Its `foreach`, `fused` and
            `capturable` stay in the groups and mean nothing.
        masters: see `AdamW`.
        state: see `AdamW`. What the optimizer has already learnt is converted.

    Returns:
        The fused optimizer; the same one again if this one was adopted before, in the same modes.

    Raises:
        UsageError: another class, a `step` that was replaced, `amsgrad`, `differentiable`, parameters that can't be
            moved in these modes. The optimizer stays as it was.
        UnknownNameError: an unknown mode.
    """
    checks.modes("adopt", masters, state)
    if isinstance(optimizer, Adopted):
        return _adopted_before(optimizer.fused, masters, state)
    fused_class = _FUSED.get(type(optimizer))
    if fused_class is None:
        allowed_classes = ", ".join(sorted(f"torch.optim.{each.__name__}" for each in _FUSED))
        raise UsageError(
            f"adopt: no kernel for {_name(type(optimizer))}, only for {allowed_classes}. {_MEND}"
        )
    for group in optimizer.param_groups:
        for flag in ("amsgrad", "differentiable"):
            if group.get(flag):
                raise UsageError(f"adopt: this {type(optimizer).__name__} has {flag}=True. {_MEND}")
    own_step = vars(optimizer).get("step")
    if own_step is not None and not _is_of_a_scheduler(own_step):
        raise UsageError(
            f"adopt: the step of this {type(optimizer).__name__} was replaced by {_described(own_step)}, which would "
            "be lost. Adopt the optimizer first and wrap its step afterwards."
        )
    fused = _shell(fused_class, optimizer, masters, state)
    entries = _converted(fused, optimizer, masters, state)
    # From here on nothing fails.
    for group in optimizer.param_groups:
        group["masters"], group["state"] = masters, state
    held = optimizer.state
    held.clear()
    for param, (made, how) in entries.items():
        pending = take_master(param)
        held[param] = made if pending is None else made | storage.first_master(param, how, pending)
    _become_alias(optimizer, fused)
    return fused


def _adopted_before(fused: FusedOptimizer, masters: str, state: str) -> FusedOptimizer:
    for group in fused.param_groups:
        if (group["masters"], group["state"]) != (masters, state):
            raise UsageError(
                f'adopt(masters="{masters}", state="{state}"): this optimizer was adopted before, with '
                f'masters="{group["masters"]}" and state="{group["state"]}".'
            )
    return fused


def _shell(kind: type[FusedOptimizer], optimizer: Optimizer, masters: str, state: str) -> FusedOptimizer:
    """A fused optimizer over the groups themselves. `__init__` would write into them before it has checked them."""
    fused = kind.__new__(kind)
    defaults = {**optimizer.defaults, "masters": masters, "state": state}
    fused.__setstate__(
        {"defaults": defaults, "state": optimizer.state, "param_groups": optimizer.param_groups}
    )
    for group in optimizer.param_groups:
        modes = {"masters": masters, "state": state}
        fused._check({**group, **modes})
        checks.group("adopt", {**group, **modes})
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            setattr(fused, name, value)
    return fused


def _converted(
    fused: FusedOptimizer, optimizer: Optimizer, masters: str, state: str
) -> dict[Tensor, tuple[storage.Entries, storage.Storage]]:
    made = {}
    for index, group in enumerate(optimizer.param_groups):
        specs = fused._hyper(group).states
        for param in group["params"]:
            found = optimizer.state.get(param)
            if found:
                how = storage.storage(param, {"masters": masters, "state": state}, specs)
                what = f"adopt: group {index}, a parameter of shape {list(param.shape)}"
                made[param] = (state_dicts.from_torch(what, found, param, how), how)
    return made


def _of_fused(name: str) -> property:
    """An attribute that is the fused optimizer's."""

    def get(self: Adopted) -> Any:
        return getattr(self.fused, name)

    def put(self: Adopted, value: Any) -> None:
        setattr(self.fused, name, value)

    def drop(self: Adopted) -> None:
        delattr(self.fused, name)

    return property(get, put, drop, f"`fused.{name}`.")


class Adopted:
    """What an adopted optimizer's class has before torch's: every call goes to `fused`."""

    fused: FusedOptimizer

    _step_supports_amp_scaling = True

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """`fused.step`, with the hooks that were registered here, which are its own too."""
        return self.fused.step(*args, **kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # torch would run the hooks here a second time

    state = _of_fused("state")
    param_groups = _of_fused("param_groups")
    grad_scale = _of_fused("grad_scale")  # what a GradScaler sets for one step, as the next
    found_inf = _of_fused("found_inf")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`fused.zero_grad`."""
        self.fused.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """`fused.state_dict`."""
        return self.fused.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """`fused.load_state_dict`, which takes torch's own form too."""
        self.fused.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """`fused.add_param_group`."""
        self.fused.add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _alias_of, (type(self).__mro__[2], self.fused)


@functools.cache
def _alias_class(kind: type[Optimizer]) -> type[Any]:
    return type(kind.__name__, (Adopted, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__})


def _alias_of(kind: type[Optimizer], fused: FusedOptimizer) -> Any:
    """The alias again, after a copy or a pickle of it."""
    alias = kind.__new__(kind)
    _become_alias(alias, fused)
    return alias


def _become_alias(optimizer: Any, fused: FusedOptimizer) -> None:
    kind = type(optimizer)
    own_step = vars(optimizer).pop("step", None)
    for name in ("state", "param_groups"):
        vars(optimizer).pop(name, None)
    optimizer.__class__ = _alias_class(kind)  # type: ignore[arg-type]
    optimizer.fused = fused
    optimizer.defaults = fused.defaults
    for name, value in vars(fused).items():
        if name.endswith("_hooks"):
            setattr(optimizer, name, value)
    if own_step is not None:
        optimizer.step = _noting_calls(optimizer.step)
    fused._set_alias(optimizer)


def _is_of_a_scheduler(step: Any) -> bool:
    """Whether this is what torch's schedulers put around a step to note that it was called, and that alone."""
    code = getattr(step, "__code__", None)
    return (
        code is not None
        and code.co_filename == torch.optim.lr_scheduler.LRScheduler.__init__.__code__.co_filename
    )


def _described(step: Any) -> str:
    code = getattr(step, "__code__", None)  # functools.wraps hides the name, not where it is
    return repr(step) if code is None else f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def _noting_calls(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step`, marked as a scheduler that was made before has marked the one that it replaces."""

    method = weakref.WeakMethod(step)

    @functools.wraps(step.__func__)  # type: ignore[attr-defined]
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound: Any = method()
        bound.__self__._opt_called = True
        return bound(*args, **kwargs)

    wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return wrapper


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
