"""`adopt`: a `torch.optim` optimizer continues as one of Mezzo's, behind the object that the script holds.

The script keeps its object, schedulers and hooks. The parameter groups (the same dicts) and the state are shared with
the fused optimizer, so a learning rate set on either is set on both. The object's class becomes a subclass of its own
class that forwards to the fused optimizer. Forwarding by instance attributes would be lost in a copy or a pickle.
"""

from __future__ import annotations

import functools
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


def adopt(optimizer: Optimizer, *, masters: str, state: str) -> FusedOptimizer:
    """Make a fused optimizer that takes over from a torch one, which stays usable and forwards to it.

    Naive code::

        fused = mezzo.optim.AdamW(optimizer.param_groups, masters=masters, state=state)
        fused.load_state_dict(optimizer.state_dict())

    Args:
        optimizer: `torch.optim.AdamW`, `Adam` or `SGD`, not a subclass. Its `foreach`, `fused` and `capturable` stay in
            the groups and are ignored.
        masters: see `FusedOptimizer`.
        state: see `FusedOptimizer`. The existing state is converted.

    Returns:
        The fused optimizer; for an optimizer that was adopted before, in the same modes, the same one.

    Raises:
        UsageError: another class, a replaced `step`, `amsgrad`, `differentiable`, parameters that these modes don't
            support. The optimizer is unchanged.
        UnknownNameError: an unknown mode.
    """
    checks.modes("adopt", masters, state)
    modes = {"masters": masters, "state": state}
    if isinstance(optimizer, Adopted):
        for group in optimizer.fused.param_groups:
            if any(group[name] != mode for name, mode in modes.items()):
                raise UsageError(
                    f'adopt(masters="{masters}", state="{state}"): this optimizer was adopted before, with '
                    f'masters="{group["masters"]}" and state="{group["state"]}".'
                )
        return optimizer.fused
    _refuse_unfit(optimizer)
    fused = _FUSED[type(optimizer)].__new__(_FUSED[type(optimizer)])
    # Not __init__, which would write into the groups before they are checked.
    shared = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    fused.__setstate__({"defaults": {**optimizer.defaults, **modes}, **shared})
    entries: dict[Tensor, tuple[storage.Entries, storage.Storage]] = {}
    for index, group in enumerate(optimizer.param_groups):
        fused._check({**group, **modes})
        checks.group("adopt", {**group, **modes})
        specs = fused._hyper(group).states
        for param in group["params"]:
            found = optimizer.state.get(param)
            if found:
                how = storage.storage(param, modes, specs)
                what = f"adopt: group {index}, a parameter of shape {list(param.shape)}"
                entries[param] = state_dicts.from_torch(what, found, param, how), how
    # Nothing below fails.
    for group in optimizer.param_groups:
        group.update(modes)
    optimizer.state.clear()
    for param, (made, how) in entries.items():
        pending = take_master(param)
        fused.state[param] = made if pending is None else made | storage.first_master(param, how, pending)
    for name, value in _hooks(optimizer).items():
        setattr(fused, name, value)
    _become_alias(optimizer, fused)
    return fused


def _refuse_unfit(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    instead = "Put FP32 masters under it as it is: mezzo.optim.with_masters(optimizer)."
    if kind not in _FUSED:
        allowed = ", ".join(sorted(f"torch.optim.{each.__name__}" for each in _FUSED))
        raise UsageError(
            f"adopt: no kernel for {kind.__module__}.{kind.__qualname__}, only for {allowed}. {instead}"
        )
    for flag in ("amsgrad", "differentiable"):
        if any(group.get(flag) for group in optimizer.param_groups):
            raise UsageError(f"adopt: this {kind.__name__} has {flag}=True. {instead}")
    step = vars(optimizer).get("step")
    code = getattr(step, "__code__", None)  # functools.wraps copies the name, but not the code
    schedulers = torch.optim.lr_scheduler.LRScheduler.__init__.__code__.co_filename
    # Schedulers only record that the step was called, which FusedOptimizer.step does too.
    if step is not None and (code is None or code.co_filename != schedulers):
        where = repr(step) if code is None else f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        raise UsageError(
            f"adopt: the step of this {kind.__name__} was replaced by {where}, which would be lost. Adopt the "
            "optimizer first and wrap its step afterwards."
        )


def _hooks(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name.endswith("_hooks")}


def _become_alias(optimizer: Any, fused: FusedOptimizer) -> None:
    for name in ("step", "state", "param_groups", "_opt_called"):
        vars(optimizer).pop(name, None)
    optimizer.__class__ = _alias_class(type(optimizer))  # type: ignore[arg-type]
    optimizer.fused, optimizer.defaults = fused, fused.defaults
    vars(optimizer).update(_hooks(fused))


def _attribute(name: str) -> property:
    """An attribute of the fused optimizer."""

    def get(self: Adopted) -> Any:
        return getattr(self.fused, name)

    def put(self: Adopted, value: Any) -> None:
        setattr(self.fused, name, value)

    def drop(self: Adopted) -> None:
        delattr(self.fused, name)

    return property(get, put, drop, f"`fused.{name}`.")


def _method(name: str) -> Any:
    """A method of the fused optimizer."""

    @functools.wraps(getattr(FusedOptimizer, name))
    def call(self: Adopted, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.fused, name)(*args, **kwargs)

    return call


class Adopted:
    """The first base class of an adopted optimizer: forwards every call to `fused`."""

    fused: FusedOptimizer

    _step_supports_amp_scaling = True

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """`fused.step`, which runs the hooks: they are shared."""
        return self.fused.step(*args, **kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # torch would run the hooks here a second time
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # FusedOptimizer.step records the call

    state = _attribute("state")
    param_groups = _attribute("param_groups")
    grad_scale = _attribute("grad_scale")  # set by a GradScaler for one step, like found_inf
    found_inf = _attribute("found_inf")
    _opt_called = _attribute("_opt_called")
    zero_grad = _method("zero_grad")
    state_dict = _method("state_dict")
    load_state_dict = _method("load_state_dict")
    add_param_group = _method("add_param_group")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _alias_of, (type(self).__mro__[2], self.fused)


@functools.cache
def _alias_class(kind: type[Optimizer]) -> type[Any]:
    return type(kind.__name__, (Adopted, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__})


def _alias_of(kind: type[Optimizer], fused: FusedOptimizer) -> Any:
    """Restore a copied or unpickled alias."""
    alias = kind.__new__(kind)
    _become_alias(alias, fused)
    return alias
