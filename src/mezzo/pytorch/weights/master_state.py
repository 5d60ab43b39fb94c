"""A model's state in FP32, for weights in any format: read, set, or shown in the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.errors import UsageError, did_you_mean
from mezzo.pytorch.distributed import is_spread
from mezzo.pytorch.dtypes import SIXTEEN_BITS
from mezzo.pytorch.weights import shards
from mezzo.pytorch.weights.stored_parameters import keep_master, master_holder, overflows, wide_value


def master_state_dict(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> dict[str, Any]:
    """The model's `state_dict` with every 16-bit weight replaced by its FP32 master.

    Naive code::

        state = model.state_dict()
        for name, param in model.named_parameters():
            if param.dtype in (torch.bfloat16, torch.float16):
                state[name] = optimizer.master(param)

    An FP32 model of the same class can load it. For a 16-bit weight that is in none of these optimizers, the state has
    the value that `lower_weights` kept, or the weight itself in FP32. Tied weights share one tensor. Masters are
    copies; all other tensors share the model's memory.

    Args:
        model: the model that the optimizer trains.
        optimizer: one or several: of `mezzo.optim`, from `with_masters`, or any other for FP32 weights.

    Raises:
        UsageError: the master of a weight is in an optimizer that was not given; an argument is not an optimizer.
    """
    owners = _owners(optimizer)
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    copies: dict[int, Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        if not _is_low(value):
            state[name] = value.detach()
            continue
        if id(value) not in copies:
            owner = _owner("master_state_dict(model, [first, second])", name, value, owners)
            copies[id(value)] = wide_value(value) if owner is None else owner.master(value)
        state[name] = copies[id(value)]
    return state


def load_master_state_dict(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], state: Mapping[str, Any]
) -> None:
    """Set weights and masters from a state in FP32: the inverse of `master_state_dict`.

    Exact to the bit where masters are FP32: `"split"` and `"fp32"`. The `state_dict` of an FP32 or a 16-bit model works
    too. The optimizer's moments do not change, and it may be new. Load a state of torch's optimizer before, not after:
    it has no masters, so `optimizer.load_state_dict` sets them to the rounded weights.

    Args:
        model, optimizer: as for `master_state_dict`. For a 16-bit weight that is in none of these optimizers, the FP32
            value is kept as `lower_weights` does.
        state: name -> tensor, with the model's names and shapes. A whole tensor is cut for a parameter in shards.

    Raises:
        UsageError: the master of a weight is in an optimizer that was not given; missing or unknown names, another
            shape, or a finite value beyond the range of the weight's format. Nothing was changed.
    """
    owners = _owners(optimizer)
    own: dict[str, Any] = model.state_dict(keep_vars=True)
    _check(own, state)
    masters = {name: value for name, value in own.items() if isinstance(value, Tensor) and _is_low(value)}
    wide = {name: state[name].detach().to(torch.float32) for name in masters}
    for name, value in wide.items():
        if overflows(value, own[name].dtype):
            raise UsageError(
                f"load_master_state_dict: {name!r} has a finite value that overflows its "
                f"{str(own[name].dtype).removeprefix('torch.')} weight. Store it in FP32: "
                f"mezzo.lower_weights(model, keep=[{name!r}]). Nothing was changed."
            )
    call = "load_master_state_dict(model, [first, second], state)"
    holders = {name: _owner(call, name, param, owners) for name, param in masters.items()}
    # Buffers, FP32 weights and extra state; also 16-bit weights, rounded as by `copy_`, which are then set again.
    is_cut = any(isinstance(value, Tensor) and is_spread(value) for value in own.values())
    model.load_state_dict(
        {name: shards.placed(state[name], value) for name, value in own.items()} if is_cut else state
    )
    for name, param in masters.items():
        if (owner := holders[name]) is None:
            keep_master(param, wide[name])
        else:
            owner.set_master(param, wide[name])


@contextmanager
def showing_masters(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Show FP32 masters instead of the model's 16-bit weights, to average them; takes 4 bytes per 16-bit parameter.

    Other `Parameter` objects replace the model's in the modules' tables; hooks and DDP buckets are not touched.
    """
    low = {id(p): name for name, p in model.named_parameters() if _is_low(p)}
    state = master_state_dict(model, optimizers) if low else {}
    shown = {key: nn.Parameter(state[name], requires_grad=False) for key, name in low.items()}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in model.modules() if low else ():
            for name, param in module._parameters.items():
                if param is not None and id(param) in shown:
                    module._parameters[name] = shown[id(param)]
                    replaced.append((module, name, param))
        yield
    finally:
        for module, name, param in replaced:
            module._parameters[name] = param


def _owners(optimizer: Optimizer | Sequence[Optimizer]) -> dict[int, Any]:
    """id of a parameter -> the optimizer that holds its master."""
    given: Iterable[Any] = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    owners = {}
    for one in given:
        if not isinstance(one, Optimizer):
            raise UsageError(
                f"received {type(one).__name__} instead of an optimizer. Call master_state_dict(model, optimizer), or "
                "give a list of optimizers."
            )
        if hasattr(one, "master"):
            owners.update({id(p): one for group in one.param_groups for p in group["params"]})
    return owners


def _owner(call: str, name: str, param: Tensor, owners: Mapping[int, Any]) -> Any:
    """The given optimizer with a 16-bit weight's master; None if no optimizer has one, UsageError if another does."""
    owner = owners.get(id(param))
    if owner is None and (holder := master_holder(param)) is not None:
        raise UsageError(
            f"{call.partition('(')[0]}: the master of {name!r} is in another optimizer, of type "
            f"{type(holder).__name__}. Give every optimizer: {call}."
        )
    return owner


def _is_low(value: Tensor) -> bool:
    return isinstance(value, nn.Parameter) and value.dtype in SIXTEEN_BITS


def _check(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise UsageError(
            f"load_master_state_dict: the state has type {type(state).__name__}. Load the file first: "
            "mezzo.load_master_state_dict(model, optimizer, torch.load('weights.pt')). Nothing was changed."
        )
    missing = [name for name in own if name not in state]
    if missing:
        raise UsageError(
            f"load_master_state_dict: the state lacks {len(missing)} of the model's names, such as {missing[0]!r}. "
            "Nothing was changed."
        )
    for name, value in state.items():
        if name not in own:
            hint = did_you_mean(name, own)
            raise UsageError(f"load_master_state_dict: the model has no {name!r}.{hint} Nothing was changed.")
        mine = own[name]
        if not isinstance(mine, Tensor):
            continue
        if not isinstance(value, Tensor) or value.shape != mine.shape:
            got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"load_master_state_dict: {name!r} is {got} in the state and {list(mine.shape)} in the model. "
                "Nothing was changed."
            )
