"""State dicts: taken over whole or not at all, of Mezzo's own form and of torch's.

torch's `Optimizer.load_state_dict` casts every state to the parameter's format, which would turn FP32 moments of a
bf16 weight into bf16 and codes into nonsense, and checks no shape. So everything is converted and checked here
first, into new tensors, and only then put in place, in one go that cannot fail.

`masters_in` finds the masters in a state that is to be loaded by another optimizer with masters under it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels.optimizer_step import StateSpec
from mezzo.pytorch.optim import storage
from mezzo.pytorch.optim.storage import Entries, Storage
from mezzo.pytorch.weights.lowering import LOWERED, take_master

if TYPE_CHECKING:
    from mezzo.pytorch.optim.fused import FusedOptimizer

MODES = ("masters", "state")
"""What a group of Mezzo's has and one of torch's hasn't."""

MASTER = "master"
"""The entry of a parameter's state that is its FP32 master."""

# What torch's groups choose an implementation with: kept where an adopted group has it, not taken over.
_TORCH_ONLY = frozenset({"foreach", "fused", "capturable", "differentiable", "amsgrad"})

# A parameter's new entries, their form, and whether they are of Mezzo's own state.
Plan = tuple[Entries, Storage, bool]

_SETTINGS = ("betas", "eps", "momentum", "nesterov", "decoupled_weight_decay")


def rename(group: dict[str, Any]) -> dict[str, Any]:
    """A group of version 0.1.0, in which `state` was called ``"state_format"``, in today's words; changed in place."""
    if "state_format" in group:
        group["state"] = group.pop("state_format")
    return group


def load(optimizer: FusedOptimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict(state)`: see there."""
    state = state.copy()
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, state)
        if replaced is not None:
            state = replaced
    groups, entries = _plan(optimizer, state)
    for group, new in zip(optimizer.param_groups, groups):
        group.update(new)
    optimizer.state.clear()
    optimizer._slots.clear()
    for param, (made, how, is_own) in entries.items():
        pending = take_master(param)
        if pending is not None and not is_own:
            made |= storage.first_master(param, how, pending)
        optimizer.state[param] = made
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _plan(
    optimizer: FusedOptimizer, state: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[Tensor, Plan]]:
    """Each group's new settings, and each parameter's new entries."""
    name = type(optimizer).__name__
    if not isinstance(state.get("state"), Mapping) or not isinstance(state.get("param_groups"), list):
        raise UsageError(
            f"{name}.load_state_dict: this is no optimizer's state: it must have 'state' and 'param_groups'."
        )
    saved_groups = [rename(dict(group)) for group in state["param_groups"]]
    ours, theirs = (
        [len(group["params"]) for group in each] for each in (optimizer.param_groups, saved_groups)
    )
    if ours != theirs:
        raise UsageError(
            f"{name}.load_state_dict: the state is of groups with {theirs} parameters, and the optimizer has groups "
            f"with {ours}."
        )
    groups: list[dict[str, Any]] = []
    entries: dict[Tensor, Plan] = {}
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups)):
        where = f"{name}.load_state_dict: group {index}"
        own = all(mode in saved for mode in MODES)
        _check_kind(where, group, saved)
        groups.append(_settings(group, saved))
        try:
            optimizer._check({**group, **groups[-1]})
        except KeyError as missing:
            raise UsageError(f"{where} of the state lacks {missing}.") from None
        states = optimizer._hyper({**group, **groups[-1]}).states
        for param, key in zip(group["params"], saved["params"]):
            found = state["state"].get(key)
            if not found:
                continue
            how = storage.storage(param, group, states)
            what = f"{where}, parameter {key} of shape {list(param.shape)}"
            made = _own(what, found, param, how, saved) if own else from_torch(what, found, param, how)
            entries[param] = (made, how, own)
    return groups, entries


def _check_kind(where: str, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for setting in _SETTINGS:
        # torch's Adam states before 2.7 don't say whether their decay is decoupled.
        if (setting in group) != (setting in saved) and setting != "decoupled_weight_decay":
            has, lacks = ("has", "hasn't") if setting in saved else ("hasn't", "has")
            raise UsageError(
                f"{where} of the state {has} {setting!r}, and this optimizer {lacks}: the state is another optimizer's."
            )
    name = "decoupled_weight_decay"
    if name in saved and name in group and saved[name] != group[name]:
        kinds = {True: "AdamW's", False: "Adam's"}
        raise UsageError(
            f"{where} of the state is {kinds[bool(saved[name])]}, and this optimizer's is {kinds[bool(group[name])]}."
        )
    if saved.get("amsgrad"):
        raise UsageError(
            f"{where} of the state has amsgrad=True, which Mezzo's optimizers don't have. Load it into "
            "mezzo.optim.with_masters(torch.optim.AdamW(..., amsgrad=True))."
        )


def _settings(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    skip = {"params", *MODES} | {name for name in _TORCH_ONLY if name not in group}
    return deepcopy({name: value for name, value in saved.items() if name not in skip})


def _own(
    what: str, found: Mapping[str, Any], param: Tensor, how: Storage, saved: Mapping[str, Any]
) -> Entries:
    held = storage.held_masters(found)
    if (how.masters if how.keeps_master else "own") != held:
        raise UsageError(
            f"{what} of {param.dtype}: the state was saved with {_masters(held)}, and the optimizer has "
            f'{_masters(how.masters)}. Make the optimizer with masters="{saved["masters"]}" over weights of the same '
            "format, or carry the masters over: mezzo.master_state_dict and the states: torch_state_dict()."
        )
    if how.specs and how.state != saved["state"]:
        raise UsageError(
            f'{what}: the state was saved with state="{saved["state"]}", and the optimizer has '
            f'state="{how.state}". Make the optimizer with the former, or load torch_state_dict() of the saved one.'
        )
    problem = storage.wrong(found, param, how)
    if problem:
        raise UsageError(f"{what}: {problem}.")
    return storage.placed(found, param, how)


def _masters(how: str) -> str:
    return "no masters beside the weight" if how in ("own", "none") else f'masters="{how}"'


def from_torch(what: str, found: Mapping[str, Any], param: Tensor, how: Storage) -> Entries:
    """The entries made from those that torch's own optimizer of the same name has for a parameter; the master is
    the weight's own value.

    Args:
        what: the parameter, for a message.
        found: of torch's.
        param: whose entries they become.
        how: how they are stored.

    Raises:
        UsageError: names or shapes of another optimizer.
    """
    made = storage.fresh(param, how)
    names = {spec.name for spec in how.specs}
    there = {name for name in found if name not in ("step", "momentum_buffer") or name in names}
    absent = [spec.name for spec in how.specs if not isinstance(found.get(spec.name), Tensor)]
    if how.specs and found.get(how.specs[0].name, 0) is None:
        return made  # SGD's buffer before its first step
    if there - names - {"step"} or absent:
        raise UsageError(
            f"{what}: the state has {', '.join(map(str, found))}, and must have {', '.join(sorted(names))}. Is it "
            "another optimizer's?"
        )
    for spec in how.specs:
        if found[spec.name].shape != param.shape:
            raise UsageError(f"{what}: {spec.name!r} has the shape {list(found[spec.name].shape)}.")
        made |= storage.write_state(param, how, spec, found[spec.name])
    # SGD counts no steps: a buffer that is there isn't started again.
    made["step"].fill_(float(found.get("step", 1.0)))
    return made


def to_torch(optimizer: FusedOptimizer) -> dict[str, Any]:
    """`optimizer.torch_state_dict()`: see there."""
    kind: type[Any] | None = optimizer.TORCH
    if kind is None:
        raise UsageError(
            f"torch_state_dict: torch.optim has no {type(optimizer).__name__}. Use state_dict(), or "
            "mezzo.master_state_dict for the weights."
        )
    defaults = kind([torch.zeros(1)]).defaults
    packed = torch.optim.Optimizer.state_dict(optimizer)
    groups = [
        {name: value for name, value in {**defaults, **group}.items() if name not in MODES}
        for group in packed["param_groups"]
    ]
    state: dict[Any, Any] = {}
    for group, saved in zip(optimizer.param_groups, packed["param_groups"]):
        specs = optimizer._hyper(group).states
        for param, key in zip(group["params"], saved["params"]):
            entries = optimizer.state.get(param)
            if entries:
                state[key] = _torch_entries(entries, specs, counts="betas" in group)
    return {"state": state, "param_groups": groups}


def _torch_entries(entries: Entries, specs: tuple[StateSpec, ...], *, counts: bool) -> dict[str, Any]:
    moved = float(entries["step"]) > 0
    made: dict[str, Any] = {"step": entries["step"].detach().clone().cpu()} if counts else {}
    for spec in specs:
        made[spec.name] = storage.read_state(entries, spec) if counts or moved else None
    return made


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
