"""The masters in a saved optimizer state: whose each is, once the whole state has been found to fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.pytorch.weights.lowering import LOWERED

MASTER = "master"
"""The entry of a parameter's state that is its FP32 master."""


def masters_in(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], now: Mapping[Tensor, Any]
) -> dict[Tensor, Tensor]:
    """Parameter -> master in a state that is to be loaded; empty for one of an optimizer without masters.

    Args:
        state: as `Optimizer.state_dict` gives it.
        groups: the parameter groups that it is for.
        now: the state that it is to replace.

    Raises:
        UsageError: it does not fit the groups, the parameters' formats or shapes.
    """
    if not {"state", "param_groups"} <= state.keys():
        raise UsageError(f"this is no optimizer's state: it has {', '.join(map(str, state))}")
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in state["param_groups"]]
    if sizes != saved_sizes:
        raise UsageError(
            f"the state has parameter groups of {saved_sizes} parameters, this optimizer of {sizes}. Nothing was "
            "changed."
        )
    params = [param for group in groups for param in group["params"]]
    keys = [key for group in state["param_groups"] for key in group["params"]]
    entries = [state["state"].get(key, {}) for key in keys]
    any_master = any(MASTER in entry for entry in entries)
    masters = {}
    for param, key, entry in zip(params, keys, entries):
        is_low = param.dtype in LOWERED
        fmt = str(param.dtype).removeprefix("torch.")
        if is_low and any_master and MASTER not in entry:
            raise UsageError(
                f"the state has masters, but none for parameter {key}, which is {fmt} here. Lower the same weights as "
                "when it was saved. Nothing was changed."
            )
        if MASTER in entry and not is_low:
            raise UsageError(
                f"the state has a master for parameter {key}, which is {fmt} here. Call mezzo.lower_weights(model) "
                "before the state is loaded. Nothing was changed."
            )
        own = now.get(param) or {}
        for name, value in entry.items():
            mine = param if name == MASTER else own.get(name)
            if isinstance(value, Tensor) and isinstance(mine, Tensor) and value.shape != mine.shape:
                raise UsageError(
                    f"{name!r} of parameter {key} is {tuple(value.shape)} in the state and {tuple(mine.shape)} here. "
                    "Nothing was changed."
                )
        if is_low and any_master:
            masters[param] = entry[MASTER]
    return masters


def without_master(entry: Any) -> Any:
    """A parameter's entries as an optimizer without masters has them."""
    return {k: v for k, v in entry.items() if k != MASTER} if isinstance(entry, dict) else entry
