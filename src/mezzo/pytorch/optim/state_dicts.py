"""State dicts in Mezzo's form and in torch's, loaded completely or not at all.

torch's `load_state_dict` casts every state to the parameter's format, and checks no shapes. Here everything is checked
and converted into new tensors first; then the old state is replaced, which cannot fail.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.core.errors import UsageError
from mezzo.pytorch.distributed import local
from mezzo.pytorch.dtypes import SIXTEEN_BITS
from mezzo.pytorch.optim import storage
from mezzo.pytorch.optim.storage import Entries, Storage
from mezzo.pytorch.weights.stored_parameters import take_master

if TYPE_CHECKING:
    from mezzo.pytorch.optim.fused import FusedOptimizer

MODES = ("masters", "state")  # settings of Mezzo's groups that torch's don't have

MASTER = "master"  # the entry of a parameter's state that is its FP32 master

# Choices of an implementation in torch's groups: kept if an adopted group has them, but not loaded.
_TORCH_ONLY = frozenset({"foreach", "fused", "capturable", "differentiable", "amsgrad"})

# Settings that tell one optimizer's groups from another's.
_SETTINGS = ("betas", "eps", "momentum", "nesterov", "ns_steps", "decoupled_weight_decay")

# A parameter's new entries, their storage, and whether they come from a state of Mezzo's own form.
Plan = tuple[Entries, Storage, bool]


def rename(group: dict[str, Any]) -> dict[str, Any]:
    """Rename ``"state_format"`` in a group of version 0.1.0 to ``"state"``, in place."""
    if "state_format" in group:
        group["state"] = group.pop("state_format")
    return group


def load(optimizer: FusedOptimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict(state)`."""
    state = state.copy()
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state = hook(optimizer, state) or state
    groups, entries = _plan(optimizer, state)
    for group, new in zip(optimizer.param_groups, groups):
        group.update(new)
    optimizer.state.clear()
    optimizer._states.clear()
    for param, (made, how, is_own) in entries.items():
        pending = take_master(param)
        if pending is not None and not is_own:
            made |= storage.first_master(param, how, pending)
        optimizer.state[param] = made
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _matching_groups(where: str, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Any:
    """The groups of a saved state, if they have as many parameters as these."""
    if not isinstance(state.get("state"), Mapping) or not isinstance(state.get("param_groups"), list):
        raise UsageError(
            f"{where}: this is not an optimizer's state: it has {', '.join(map(str, state)) or 'no keys'}. Pass the "
            "result of optimizer.state_dict(), which has 'state' and 'param_groups'."
        )
    ours, theirs = ([len(group["params"]) for group in each] for each in (groups, state["param_groups"]))
    if ours != theirs:
        raise UsageError(
            f"{where}: the groups of the state have {theirs} parameters, and those of this optimizer {ours}. Create it "
            "with the same groups as the saved one. Nothing was changed."
        )
    return state["param_groups"]


def _plan(
    optimizer: FusedOptimizer, state: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[Tensor, Plan]]:
    """Each group's new settings, and each parameter's new entries."""
    where = f"{type(optimizer).__name__}.load_state_dict"
    groups: list[dict[str, Any]] = []
    entries: dict[Tensor, Plan] = {}
    saved_groups = _matching_groups(where, state, optimizer.param_groups)
    for index, (group, original) in enumerate(zip(optimizer.param_groups, saved_groups)):
        saved, of_group = rename(dict(original)), f"{where}: group {index}"
        own = all(mode in saved for mode in MODES)
        _check_kind(of_group, group, saved)
        skip = {"params", *MODES, *(_TORCH_ONLY - group.keys())}
        groups.append(deepcopy({name: value for name, value in saved.items() if name not in skip}))
        new = {**group, **groups[-1]}
        optimizer._check(new)
        states = optimizer._hyper(new).states
        for param, key in zip(group["params"], saved["params"]):
            found = state["state"].get(key)
            if found:
                how = storage.storage(param, group, states)
                what = f"{of_group}, parameter {key} of shape {list(param.shape)}"
                if own:
                    made = _own(what, found, param, how, saved, group)
                else:
                    made = from_torch(what, found, param, how)
                entries[param] = (made, how, own)
    return groups, entries


def _check_kind(where: str, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    decoupled = "decoupled_weight_decay"
    for setting in _SETTINGS:
        # torch's Adam states before 2.7 don't say whether their decay is decoupled.
        if (setting in group) != (setting in saved) and setting != decoupled:
            sides = ("the state", "this optimizer")
            one, other = sides if setting in saved else sides[::-1]
            raise UsageError(
                f"{where}: {one} has {setting!r}, and {other} does not. Load it into the class that saved it."
            )
    if decoupled in saved and decoupled in group and saved[decoupled] != group[decoupled]:
        theirs, ours = ("AdamW" if each[decoupled] else "Adam" for each in (saved, group))
        raise UsageError(f"{where}: the state was saved by {theirs}, and this is {ours}. Use {theirs}.")
    if saved.get("amsgrad"):
        raise UsageError(
            f"{where}: the state has amsgrad=True, which Mezzo's optimizers do not support. Load it into "
            "mezzo.optim.with_masters(torch.optim.AdamW(..., amsgrad=True))."
        )


def _own(
    what: str,
    found: Mapping[str, Any],
    param: Tensor,
    how: Storage,
    saved: Mapping[str, Any],
    group: Mapping[str, Any],
) -> Entries:
    held = storage.held_masters(found)
    is_another = ("own" if how.master_key is None else how.masters) != held
    if is_another or (how.specs and group["state"] != saved["state"]):
        raise UsageError(
            f'{what} of {param.dtype}: the state was saved with {_masters(held)} and state="{saved["state"]}", and the '
            f'optimizer has {_masters(how.masters)} and state="{group["state"]}". Create the optimizer with the saved '
            "settings, or transfer masters by mezzo.master_state_dict and states by optimizer.torch_state_dict()."
        )
    problem = storage.wrong(found, param, how, may_differ=True)
    if problem:
        raise UsageError(f"{what}: {problem}.")
    return storage.converted(found, param, how)


def _masters(how: str) -> str:
    return "no separate masters" if how in ("own", "none") else f'masters="{how}"'


def from_torch(what: str, found: Mapping[str, Any], param: Tensor, how: Storage) -> Entries:
    """Convert the entries of torch's optimizer of the same name; a UsageError names `what` if they are another's."""
    names = {spec.name for spec in how.specs}
    there = {name for name in found if name not in ("step", "momentum_buffer") or name in names}
    if how.specs and found.get(how.specs[0].name, 0) is None:
        return storage.converted({}, param, how)  # SGD's buffer before its first step
    if there - names - {"step"} or not all(isinstance(found.get(name), Tensor) for name in names):
        raise UsageError(
            f"{what}: the state has {', '.join(map(str, found))}, and must have {', '.join(sorted(names))}. It was "
            "probably saved by another class of optimizer; load it into that class."
        )
    for name in names:
        if found[name].shape != param.shape:
            raise UsageError(f"{what}: {name!r} has the shape {list(found[name].shape)}.")
    # SGD counts no steps: a buffer that exists is not started again.
    kept = {"step": found.get("step", 1.0), **{name: found[name] for name in names}}
    return storage.converted(kept, param, how)


def to_torch(optimizer: FusedOptimizer) -> dict[str, Any]:
    """`optimizer.torch_state_dict()`."""
    kind: type[Any] = optimizer.TORCH
    defaults = kind([torch.zeros(1, 1)]).defaults
    packed = torch.optim.Optimizer.state_dict(optimizer)
    groups, state = [], {}
    for group, saved in zip(optimizer.param_groups, packed["param_groups"]):
        groups.append({name: value for name, value in {**defaults, **saved}.items() if name not in MODES})
        counts = "betas" in group
        hyper = optimizer._hyper(group)
        has_buffer = hyper.rule not in ("momentum", "nesterov")  # SGD has none before the first step
        for param, key in zip(group["params"], saved["params"]):
            entries = optimizer.state.get(param)
            if entries:
                exists = has_buffer or float(entries["step"]) > 0
                state[key] = {
                    spec.name: storage.read_state(entries, spec) if exists else None for spec in hyper.states
                }
                if counts:
                    state[key]["step"] = entries["step"].detach().clone().cpu()
    return {"state": state, "param_groups": groups}


def masters_in(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], now: Mapping[Tensor, Any]
) -> dict[Tensor, Tensor]:
    """The master of each parameter in a state for `groups`, to replace `now`; {} without. UsageError if unfit."""
    saved_groups = _matching_groups("with_masters", state, groups)
    params = [param for group in groups for param in group["params"]]
    keys = [key for group in saved_groups for key in group["params"]]
    entries = [state["state"].get(key, {}) for key in keys]
    any_master = any(MASTER in entry for entry in entries)
    masters = {}
    for param, key, entry in zip(params, keys, entries):
        is_low = param.dtype in SIXTEEN_BITS
        if is_low and any_master and MASTER not in entry:
            raise UsageError(
                f"the state has masters, but none for parameter {key}, which is {param.dtype} here. Call "
                "mezzo.lower_weights with the same arguments as when it was saved. Nothing was changed."
            )
        if MASTER in entry and not is_low:
            raise UsageError(
                f"the state has a master for parameter {key}, which is {param.dtype} here. Call "
                "mezzo.lower_weights(model) before loading the state. Nothing was changed."
            )
        own = {**(now.get(param) or {}), MASTER: param}
        for name, value in entry.items():
            mine = own.get(name)
            if isinstance(value, Tensor) and isinstance(mine, Tensor) and value.shape != mine.shape:
                raise UsageError(
                    f"{name!r} of parameter {key} has shape {list(value.shape)} in the state and {list(mine.shape)} "
                    "here. Build the model that was saved. Nothing was changed."
                )
        if is_low and any_master:
            masters[param] = entry[MASTER]
    return masters


def without_master(entry: Any) -> Any:
    """A parameter's entries as an optimizer without masters has them."""
    return {k: v for k, v in entry.items() if k != MASTER} if isinstance(entry, dict) else entry


def is_for_checkpoint() -> bool:
    """Whether `torch.distributed.checkpoint` calls an optimizer's `state_dict`, or `step` to have its states created.

    It calls `step` with gradients and learning rates of zero, before it reads or loads the state of a new optimizer;
    but not where gradients exist: in a window of accumulated losses, after skipped steps only.
    """
    if "torch.distributed.checkpoint.state_dict" not in sys.modules:
        return False
    names = (frame.f_code.co_name for frame, _ in traceback.walk_stack(inspect.currentframe()))
    return any(name in ("_init_optim_state", "_get_optim_state_dict") for name in names)


def make_states(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    """Have an optimizer's `step` create its states, which count no step; parameters and gradients stay."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads, settings = [param.grad for param in params], list(map(dict, optimizer.param_groups))
    try:
        for group in optimizer.param_groups:
            group.update({name: group[name] * 0 for name in ("lr", "weight_decay") if name in group})
        for param in params:
            param.grad = torch.zeros_like(param, dtype=param.grad_dtype) if param.requires_grad else None
        with torch.random.fork_rng({param.device for param in params if param.is_cuda}):
            step()
    finally:
        for group, of_group in zip(optimizer.param_groups, settings):
            group.update(of_group)
        for param, grad in zip(params, grads):
            param.grad = grad
    for entry in optimizer.state.values():
        if "step" in entry:
            entry["step"] = entry["step"] * 0


def have_no_step(optimizer: Optimizer) -> bool:
    """Whether loaded states count no step and are zero: the next step starts without them, as if new."""
    # SGD counts none: a buffer of zero is that of no step, which does not dampen the first gradient.
    entries = [entry for entry in optimizer.state.values() if {"step", "momentum_buffer"} & entry.keys()]
    return bool(entries) and not any(
        bool(local(torch.as_tensor(value)).any())
        for entry in entries
        for name, value in entry.items()
        if name == "step" or (name != MASTER and isinstance(value, Tensor) and value.dim() > 0)
    )


class FirstStates:
    """Lets an optimizer of PyTorch's have all states in a checkpoint, whose first step starts without them, as if new.

    Not all states are zero before the first step (NAdam's `mu_product`, SGD's buffer with dampening).
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._unused = False  # whether the states are those of no step
        self.hooks = (
            optimizer.register_step_pre_hook(self._step_begins),
            optimizer.register_state_dict_pre_hook(self._saves),
            optimizer.register_load_state_dict_post_hook(self._has_loaded),
        )

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._unused:
            optimizer.state.clear()
        self._unused = not optimizer.state and is_for_checkpoint()

    def _saves(self, optimizer: Any) -> None:
        if self._unused or (not optimizer.state and is_for_checkpoint()):
            optimizer.state.clear()  # torch's own call has put the weight decay into them
            make_states(optimizer, partial(type(optimizer).step, optimizer))
            self._unused = True

    def _has_loaded(self, optimizer: Any) -> None:
        self._unused = have_no_step(optimizer)
