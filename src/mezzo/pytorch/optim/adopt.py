"""`adopt` turns a `torch.optim` optimizer into one of Mezzo's, in place.

The object changes its class, to a subclass of both, so schedulers, hooks, groups and `isinstance` keep working.
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
from mezzo.pytorch.optim.muon import Muon
from mezzo.pytorch.optim.optimizers import SGD, Adam, AdamW
from mezzo.pytorch.weights.stored_parameters import take_master

_FUSED: dict[type[Optimizer], type[FusedOptimizer]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
    torch.optim.Muon: Muon,
}


def adopt(optimizer: Optimizer, *, masters: str, state: str) -> FusedOptimizer:
    """Turn a `torch.optim` optimizer into Mezzo's fused one of the same name, in place.

    Naive code::

        fused = mezzo.optim.AdamW(optimizer.param_groups, masters=masters, state=state)
        fused.load_state_dict(optimizer.state_dict())

    Args:
        optimizer: `torch.optim.AdamW`, `Adam`, `SGD` or `Muon`, not a subclass. Its `foreach`, `fused` and
            `capturable` are ignored.
        masters, state: see `FusedOptimizer`. The existing state is converted.

    Returns:
        The same object. An optimizer that was adopted before with the same modes is returned as it is.

    Raises:
        UsageError: another class, a replaced `step`, `amsgrad`, `differentiable`, or parameters that these modes do not
            support. The optimizer is unchanged.
        UnknownNameError: an unknown mode.
    """
    checks.modes("adopt", masters, state)
    modes = {"masters": masters, "state": state}
    if isinstance(optimizer, Adopted):
        for group in optimizer.param_groups:
            if any(group[name] != mode for name, mode in modes.items()):
                raise UsageError(
                    f'adopt(masters="{masters}", state="{state}"): this optimizer was adopted before with '
                    f'masters="{group["masters"]}" and state="{group["state"]}". Use these, or a new optimizer.'
                )
        return optimizer
    _refuse_unfit(optimizer)
    fused: Any = _FUSED[type(optimizer)].__new__(_FUSED[type(optimizer)])  # for its rule, without parameters
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
        optimizer.state[param] = made if pending is None else made | storage.first_master(param, how, pending)
    vars(optimizer).pop("step", None)
    adopted: Any = optimizer
    adopted.__class__ = class_of(Adopted, fused.__class__, adopted.__class__)
    adopted.__setstate__({"defaults": {**optimizer.defaults, **modes}})
    return optimizer  # type: ignore[return-value]


def _refuse_unfit(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    instead = "For any: masters=fp32 in a policy, without state, or mezzo.optim.with_masters(optimizer)."
    if kind not in _FUSED:
        allowed = ", ".join(sorted(f"torch.optim.{each.__name__}" for each in _FUSED))
        raise UsageError(
            f"adopt: {kind.__module__}.{kind.__qualname__} has no fused kernel. Use one of {allowed}. {instead}"
        )
    for flag in ("amsgrad", "differentiable"):
        if any(group.get(flag) for group in optimizer.param_groups):
            raise UsageError(f"adopt: {kind.__name__} with {flag}=True has no fused kernel. {instead}")
    step = vars(optimizer).get("step")
    code = getattr(step, "__code__", None)  # functools.wraps copies the name, but not the code
    schedulers = torch.optim.lr_scheduler.LRScheduler.__init__.__code__.co_filename
    # Schedulers only record that the step was called, which FusedOptimizer.step does too.
    if step is not None and (code is None or code.co_filename != schedulers):
        where = repr(step) if code is None else f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        raise UsageError(
            f"adopt: {kind.__name__}.step was replaced by {where}, which adopt would drop. Adopt the optimizer first, "
            "then replace its step."
        )


class Adopted(FusedOptimizer):
    """The first base class of an adopted optimizer."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return empty, type(self).__bases__, self.__getstate__()


@functools.cache
def class_of(*bases: Any) -> Any:
    """The class of an optimizer that changed its class; it looks like its original class, the last one."""
    kind = bases[-1]
    return type(kind.__name__, bases, {"__doc__": kind.__doc__, "__module__": kind.__module__})


def extend(thing: Any, first: Any) -> None:
    """Change an object's class to a subclass of it, with `first` before it."""
    kind: Any = type(thing)
    thing.__class__ = class_of(first, kind)


def empty(*bases: Any) -> Any:
    """An optimizer of `class_of` whose state is set next, in a copy or by unpickling."""
    return class_of(*bases).__new__(class_of(*bases))
