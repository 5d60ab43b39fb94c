"""Cast a model's parameters to 16 bits, and keep the lost bits until an optimizer takes them.

They are kept by a weak reference to the `Parameter`: an int16 remainder for bf16, the FP32 value for fp16. `Parameter`
objects stay the same, because optimizers, hooks and tied weights refer to them.
"""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from mezzo.core.errors import UnknownNameError, UsageError, checks_keywords, did_you_mean, unknown_name
from mezzo.core.masters import bytes_per_parameter
from mezzo.core.policy import Policy
from mezzo.core.policy import policy as policy_of
from mezzo.core.policy_text import matches
from mezzo.pytorch.distributed import is_spread, local
from mezzo.pytorch.dtypes import SIXTEEN_BITS, dtype_of, name_of
from mezzo.pytorch.kernels.optimizer_step.reference import decode_master, encode_master
from mezzo.pytorch.kernels.plain import is_dense
from mezzo.pytorch.module_paths import unwrapped, unwrapped_path
from mezzo.pytorch.snapshot import has_running_statistics
from mezzo.pytorch.weights import shards

# Parameter -> what its 16-bit weight lacks: the int16 remainder of a bf16 weight, the FP32 value of an fp16 one.
_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()

# Parameter -> a weak reference to the optimizer that holds its master.
_holders: Any = WeakTensorKeyDictionary()

# Elements that are encoded at a time, so that the temporaries stay small compared to the parameter.
_PIECE = 1 << 20
_SMALL = 1 << 14  # of tensors that are gathered

_TORCH_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_NORM_NAME = re.compile(r"norm(?:ali[sz]ation)?(?:[123]d)?$", re.IGNORECASE)


# Path of a module, the module, and the name and value of one of its parameters; a tied parameter has several.
_Owned = tuple[str, nn.Module, str, nn.Parameter]


@checks_keywords
def lower_weights(
    model: nn.Module, precision: str | Policy = "bf16", *, keep: Iterable[str] = ()
) -> list[str]:
    """Store a model's FP32 weights in 16 bits, in place, and keep the lost bits for the optimizer's masters.

    Naive code::

        for name, param in model.named_parameters():
            if param.dtype is torch.float32 and not stays_fp32(name):
                master[param] = param.data
                param.data = half_away16(param.data)        # bf16; fp16: ties to even

    Peak memory is the model and one more parameter. Frozen parameters and existing gradients are cast too; buffers,
    parameters in other formats and frozen quantized ones (tensor subclasses) are not. These stay in FP32 (a tied one if
    one of its modules is listed):

    - of normalization modules: PyTorch's, and in classes named ``...Norm``, ``...Norm1d`` to ``...Norm3d`` the
      parameters with at most one dimension longer than 1;
    - of modules, and their submodules, to which the policy gives another format;
    - of modules and parameters that `keep` names.

    Args:
        model: any module, with its checkpoint loaded. Compile it and wrap it in DDP afterwards. A copy of the model
            starts from the rounded weights. To load an FP32 checkpoint later, use `mezzo.load_master_state_dict`.
        precision: ``"bf16"``, ``"fp16"``, or any policy (string, file or `Policy`): its ``params`` format, or, if that
            is fp32, its ``compute`` format.
        keep: a pattern or several, as for a policy's modules, of module paths or parameter names, such as ``"head"`` or
            ``"**.bias"``.

    Returns:
        The names of the cast parameters, each under its first name in `named_parameters`.

    Raises:
        UsageError: not a module; a precision without a 16-bit format; a parameter without values, of a tensor
            subclass, or with a finite value beyond the format's range (the message names it). Nothing was changed.
        UnknownNameError: a pattern that matches nothing.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"lower_weights: received {type(model).__name__}. Pass a torch.nn.Module.")
    patterns: list[Any] = [*keep] if hasattr(keep, "__iter__") and not isinstance(keep, str) else [keep]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise UsageError(f"lower_weights: keep is {keep!r}. Pass patterns, such as ['head', '**.bias'].")
    policy = policy_of(precision)
    dtype = dtype_of(_format_of(policy))
    owned = [
        (unwrapped_path(path), module, name, param)
        for path, module in unwrapped(model).named_modules(remove_duplicate=False)
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    stays = _staying(owned, policy, _format_of(policy), [unwrapped_path(pattern) for pattern in patterns])
    chosen = {}
    for name, param in model.named_parameters():
        if id(param) not in stays and (is_lazy(param) or param.dtype is torch.float32):
            if not param.requires_grad and _is_subclass(param) and not is_spread(param):
                continue
            _refuse_unfit(name, param, dtype)
            chosen[name] = param
    for param in chosen.values():
        _lower(param, dtype)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # into one buffer for cuDNN, as Module.to does
    torch.clear_autocast_cache()
    return list(chosen)


def take_master(param: Tensor) -> Tensor | None:
    """The FP32 value kept for a 16-bit parameter, which is then no longer kept; None if there is none."""
    master = peek_master(param)
    _kept.pop(param, None)
    return master


def peek_master(param: Tensor) -> Tensor | None:
    """As `take_master`, but the value stays kept: FP32, of the parameter's shape, strides and device."""
    kept: Tensor | None = _kept.get(param)
    if kept is None or not _belongs(kept, param):
        return None
    weight = local(param.detach())
    kept = local(kept).to(weight.device)
    master = torch.empty_like(weight, dtype=torch.float32)
    write([(master, weight, kept)], partial(decode_master, "split" if kept.dtype is torch.int16 else "fp32"))
    return shards.joined(master, param)


def set_master_holder(param: Tensor, optimizer: Optimizer) -> None:
    """Record which optimizer holds the master of a 16-bit parameter."""
    _holders[param] = weakref.ref(optimizer)


def master_holder(param: Tensor, *apart_from: Optimizer) -> Optimizer | None:
    """The optimizer, none of these, that holds the master of a 16-bit parameter; None if there is none."""

    def found() -> Optimizer | None:
        holder = _holders.get(param)
        one: Optimizer | None = None if holder is None else holder()
        return one if one is not None and one not in apart_from and one.state.get(param) else None

    if found() is not None:
        gc.collect()  # an optimizer that was dropped may live on in a cycle
    return found()


def wide_value(param: Tensor) -> Tensor:
    """The FP32 value kept for a parameter, or else its own in FP32."""
    master = peek_master(param)
    return param.detach().to(torch.float32) if master is None else master


@torch.no_grad()
def give_back(param: Tensor, master: Tensor, masters: str) -> None:
    """Set an FP32 parameter to its master if `model.float()` has made it FP32 and nothing has changed it since.

    Args:
        param: FP32; it had 16 bits when `master` was written.
        master: what an optimizer kept, of the kind `masters`: ``"fp32"``, ``"split"`` or ``"split8"``.
    """
    weight, kept = local(param.detach()), local(master).to(param.device)
    if kept.shape != weight.shape:
        return
    for dtype in SIXTEEN_BITS if masters == "fp32" else (torch.bfloat16,):
        value = kept if masters == "fp32" else decode_master(masters, weight.to(dtype), kept)
        if torch.equal(encode_master(masters, value, dtype)[0].float(), weight):
            weight.copy_(value)
            return


def has_master(param: Tensor) -> bool:
    """Whether an FP32 value is kept for this parameter."""
    kept = _kept.get(param)
    return kept is not None and _belongs(kept, param)


def keep_master(param: Tensor, master: Tensor) -> None:
    """Set a 16-bit parameter from an FP32 value of its shape, and keep the lost bits."""
    weight = local(param.detach())
    master = torch.empty_like(weight, dtype=torch.float32).copy_(shards.part(master, param))
    kept = _encode(master, weight)
    if kept is None:
        _kept.pop(param, None)
    else:
        _kept[param] = shards.joined(kept, param)


def overflows(master: Tensor, dtype: torch.dtype) -> bool:
    """Whether a finite FP32 value becomes infinite in a 16-bit weight."""
    return any(
        bool((encode_master("fp32", part, dtype)[0].isinf() & part.isfinite()).any())
        for (part,) in pieces(local(master))
    )


def _format_of(policy: Policy) -> str:
    fmt = policy.compute if policy.params == "fp32" else policy.params
    if fmt in ("bf16", "fp16"):
        return fmt
    if fmt == "auto":
        raise UsageError("lower_weights: 'auto' is not decided. Use bf16, fp16 or policy.resolved('bf16').")
    raise unknown_name("16-bit format", fmt, ("bf16", "fp16"), where=f"lower_weights(precision='{policy}'): ")


def _staying(owned: list[_Owned], policy: Policy, fmt: str, keep: list[str]) -> set[int]:
    """The ids of the parameters that stay in FP32."""
    paths = sorted({outer for path, *_ in owned for outer in _upwards(path)})
    names = [f"{path}.{name}".lstrip(".") for path, _, name, _ in owned]
    asked = [(f"lower_weights(keep=[{pattern!r}])", pattern, [*paths, *names]) for pattern in keep]
    asked += [(f"policy: module pattern {pattern!r}", pattern, paths) for pattern, _ in policy.modules]
    for where, pattern, allowed in asked:
        if not any(matches(pattern, each) for each in allowed):
            hint = did_you_mean(pattern.replace("*", "0"), filter(None, allowed))
            raise UnknownNameError(f"{where} matches nothing in the model.{hint}")
    stays = set()
    for (path, module, _, param), full in zip(owned, names):
        above = list(_upwards(path))
        override = next((f for each in above if (f := policy.format_for_module(each)) is not None), fmt)
        is_kept = any(matches(pattern, each) for pattern in keep for each in (full, *above))
        is_vector = is_lazy(param) or sum(size > 1 for size in param.shape) <= 1
        is_torchs = isinstance(module, _TORCH_NORMS) or has_running_statistics(module)
        is_named_norm = is_vector and _NORM_NAME.search(type(module).__name__) is not None
        if override != fmt or is_kept or is_torchs or is_named_norm:
            stays.add(id(param))
    return stays


def _upwards(path: str) -> Iterator[str]:
    """A module's path, then those of its parents, the model's own (empty) last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _is_subclass(param: nn.Parameter) -> bool:
    return not is_lazy(param) and hasattr(param.data, "__tensor_flatten__")


def _refuse_unfit(name: str, param: nn.Parameter, dtype: torch.dtype) -> None:
    path = unwrapped_path(name).rpartition(".")[0]
    apart = f"add module.{path}=fp32 to the policy" if path else f"lower_weights(keep=[{name!r}])"
    data: object = None if is_lazy(param) else param.data
    if data is None or param.is_meta:
        where, first = (
            ("lazy", "run the model once") if data is None else ("on the meta device", "call to_empty")
        )
        problem = f"is {where} and has no values. Before you lower the model, {first}, and load its state."
    elif _is_subclass(param) or param.layout is not torch.strided:
        kind = type(data).__name__ if param.layout is torch.strided else str(param.layout)
        problem = (
            f"is a {kind}. Lower the model before distributing or quantizing its parameters, or leave this one out: "
            f"{apart}."
        )
    elif overflows(param.detach(), dtype):
        largest = float(param.detach().abs().nan_to_num(0.0, 0.0).max())
        limit = "fp16's largest is 65504" if dtype is torch.float16 else "bf16's largest is 3.3895e38"
        hint = ", or use bf16, which has FP32's range" if dtype is torch.float16 else ""
        problem = f"has a value of {largest:g}, and {limit}. Keep it in FP32: {apart}{hint}."
    else:
        return
    raise UsageError(f"lower_weights: parameter {name!r} {problem}")


@torch.no_grad()
def _lower(param: nn.Parameter, dtype: torch.dtype) -> None:
    master = param.detach()
    if not is_dense(master):
        master = master.contiguous()
    weight = torch.empty_like(master, dtype=dtype)
    kept = _encode(master, weight)
    param.data = weight
    if param.grad is not None:
        param.grad.data = param.grad.data.to(dtype)
    if kept is not None:
        _kept[param] = kept


@torch.no_grad()
def _encode(master: Tensor, weight: Tensor) -> Tensor | None:
    """Set a 16-bit weight from its FP32 value; returns what rounding loses, or None if nothing."""
    if weight.dtype is not torch.bfloat16:
        weight.copy_(master)
        return None if torch.equal(weight.to(torch.float32), master) else master.clone()
    remainder = torch.empty_like(weight, dtype=torch.int16)
    for part, out, low in pieces(master, weight, remainder):
        high, rest = encode_master("split", part)
        out.copy_(high)
        low.copy_(rest)
    return remainder if bool(remainder.any()) else None


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors of one shape into equal parts in memory order; as a whole if their layouts differ."""
    first = tensors[0]
    if not is_dense(first) or any(tensor.stride() != first.stride() for tensor in tensors):
        yield tensors
        return
    flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    for start in range(0, first.numel(), _PIECE):
        yield tuple(flat if first.numel() <= _PIECE else [one[start : start + _PIECE] for one in flat])


def write(rows: Iterable[tuple[Tensor, ...]], change: Callable[..., Tensor]) -> None:
    """``out.copy_(change(*sources))`` for each ``(out, *sources)``, element by element; small tensors in one call."""
    small = defaultdict(list)
    for parts in itertools.chain.from_iterable(itertools.starmap(pieces, rows)):
        if parts[0].numel() > _SMALL or parts[0].dim() != 1:
            parts[0].copy_(change(*parts[1:]))
        else:
            small[tuple((one.dtype, one.device) for one in parts)].append(parts)
    for alike in small.values():
        for start in range(0, len(alike), _PIECE // _SMALL):
            outs, *columns = zip(*alike[start : start + _PIECE // _SMALL])
            values = change(*map(torch.cat, columns))
            torch._foreach_copy_(outs, values.split([out.numel() for out in outs]))


def _belongs(kept: Tensor, param: Tensor) -> bool:
    dtype = torch.bfloat16 if kept.dtype is torch.int16 else torch.float16
    return param.dtype is dtype and param.shape == kept.shape and not param.is_meta


@contextmanager
def stored(model: torch.nn.Module, policy: Policy) -> Iterator[list[str]]:
    """Store the weights in the policy's format during a `with` block, if possible; yields notes for the user."""
    if policy.params == "fp32":
        yield [] if policy.state == "fp32" else [_sentence(model, policy)]
        return
    before = [(p, p.data, p.grad) for p in model.parameters()]
    for p, _, _ in before:
        p.grad = None
    try:
        lower_weights(model, policy)
        note = _sentence(model, policy)
    except UsageError as error:
        note = f"weights were left as they are. {error}"
    try:
        yield [note]
    finally:
        for p, data, grad in before:
            if p.dtype is not data.dtype:
                take_master(p)  # kept by the call above; that of a model lowered earlier stays
                p.data = data
            p.grad = grad


def _sentence(model: torch.nn.Module, policy: Policy) -> str:
    counts = Counter(name_of(p.dtype) for p in model.parameters())
    weights = ", ".join(f"{count} in {name}" for name, count in counts.most_common())
    masters = "" if policy.params == "fp32" else f"masters {policy.masters}, "
    each = bytes_per_parameter(policy.params, policy.masters, policy.state)
    return (
        f"parameters: {weights}; {masters}state {policy.state}: with AdamW {round(each, 2):g} bytes per "
        f"{policy.params} parameter, FP32 takes 16."
    )
