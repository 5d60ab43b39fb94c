"""A model's state in FP32, whatever its weights are stored in: for export, for evaluation, and back again."""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.errors import UsageError
from mezzo.pytorch.weights import lowering


def master_state_dict(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> dict[str, Any]:
    """The model's `state_dict` with every 16-bit weight replaced by its FP32 master.

    Naive code::

        state = model.state_dict()
        for name, param in model.named_parameters():
            if param.dtype in (torch.bfloat16, torch.float16):
                state[name] = optimizer.master(param)

    An FP32 model of the same class loads it with `load_state_dict`; to evaluate or to export, that is all.
    A 16-bit weight that no optimizer here owns gives the value that `lower_weights` kept for it, or else its
    own in FP32. Tied weights share one tensor. FP32 and FP64 weights and all buffers are the model's own
    storage, as in `state_dict`; masters are copies.

    Args:
        model: the model, its parameters the very objects that the optimizer holds.
        optimizer: one of `mezzo.optim`, what `with_masters` returned, or several. Any other optimizer has no
            masters, which is right where its weights are FP32.
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
            copies[id(value)] = _master(value, owners)
        state[name] = copies[id(value)]
    return state


def load_master_state_dict(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], state: Mapping[str, Any]
) -> None:
    """Set weights and masters from a state in FP32: the inverse of `master_state_dict`, to the bit.

    It also takes the `state_dict` of an FP32 or a 16-bit model. The optimizer's moments stay as they are; it
    need not have stepped yet.

    Args:
        model: as for `master_state_dict`.
        optimizer: as for `master_state_dict`. A 16-bit weight that no optimizer here owns keeps what is
            rounded off for the one that comes, as `lower_weights` does.
        state: name -> tensor, of the model's own names and shapes.

    Raises:
        UsageError: names that are missing or unknown, another shape, or a finite value beyond the range of the
            weight's format. Nothing was changed.
    """
    owners = _owners(optimizer)
    own: dict[str, Any] = model.state_dict(keep_vars=True)
    _check(own, state)
    masters = {name: value for name, value in own.items() if isinstance(value, Tensor) and _is_low(value)}
    wide = {name: _in_fp32(state[name]) for name in masters}
    for name, value in wide.items():
        if lowering.overflows(value, own[name].dtype):
            raise UsageError(
                f"load_master_state_dict: {name!r} holds a finite value that overflows its "
                f"{str(own[name].dtype).removeprefix('torch.')} weight. Nothing was changed."
            )
    # Buffers, FP32 weights and extra state by the module's own way; it reads 16-bit weights too, and rounds
    # them as `copy_` does, which is then replaced.
    metadata = getattr(state, "_metadata", None)
    loaded = OrderedDict(state)
    if metadata is not None:
        loaded._metadata = metadata  # type: ignore[attr-defined]
    model.load_state_dict(loaded)
    for name, param in masters.items():
        owner = owners.get(id(param))
        if owner is None:
            lowering.keep_master(param, wide[name])
        else:
            owner.set_master(param, wide[name])


@contextmanager
def showing_masters(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """The model with FP32 masters in place of its 16-bit weights, until the block ends.

    For an average of the weights: over thousands of steps it moves by less than a 16-bit weight can show, and PyTorch's
    averages want one format on both sides. Other `Parameter` objects stand in the modules' tables; the model's own, and
    what hangs on them (hooks, DDP's buckets), are not touched. Costs 4 bytes for each 16-bit parameter for that time.
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
    """id of a parameter -> the optimizer that has its master."""
    given: Iterable[Any] = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    owners = {}
    for one in given:
        if not isinstance(one, Optimizer):
            raise UsageError(
                f"master_state_dict and load_master_state_dict take an optimizer or several, received "
                f"{type(one).__name__}."
            )
        # An optimizer that was adopted, or handed to with_masters, has its masters with the one that took over.
        held = getattr(one.step, "_goes_through_masters", getattr(one, "fused", one))
        if hasattr(held, "master"):
            owners.update({id(p): held for group in held.param_groups for p in group["params"]})
    return owners


def _is_low(value: Tensor) -> bool:
    return isinstance(value, nn.Parameter) and value.dtype in lowering.LOWERED


def _master(param: Tensor, owners: Mapping[int, Any]) -> Tensor:
    owner = owners.get(id(param))
    if owner is not None:
        master: Tensor = owner.master(param)
        return master
    kept = lowering.peek_master(param)
    return param.detach().to(torch.float32) if kept is None else kept


def _in_fp32(value: Tensor) -> Tensor:
    return value.detach().to(torch.float32)


def _check(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    for name in own:
        if name not in state:
            raise UsageError(
                f"load_master_state_dict: {name!r} is missing from the state (and "
                f"{sum(n not in state for n in own) - 1} more). Nothing was changed."
            )
    for name, value in state.items():
        if name not in own:
            near = difflib.get_close_matches(name, own, n=1, cutoff=0.4)
            mend = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"load_master_state_dict: the model has no {name!r}.{mend} Nothing was changed.")
        mine = own[name]
        if not isinstance(mine, Tensor):
            continue
        if not isinstance(value, Tensor) or value.shape != mine.shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"load_master_state_dict: {name!r} is {got} in the state and {tuple(mine.shape)} in the model. "
                "Nothing was changed."
            )
