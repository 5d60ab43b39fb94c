"""Which parameters a model stores in 16 bits, and where their FP32 values wait until an optimizer takes them.

`lower_weights` turns a model's FP32 weights into 16-bit ones in place. Nothing is lost by it: what the
rounding took off a bf16 weight is an int16 (`mezzo.pytorch.kernels.optimizer_step.formulas`), an fp16 weight's FP32
value is kept whole, and either waits here, held weakly by its `Parameter`, for the optimizer that will own it. A
weight that bf16 or fp16 holds exactly (a 16-bit checkpoint) has nothing to keep.

`Parameter` objects stay the same objects, for optimizers, hooks, tied weights, parametrizations and moving
averages hold them: only their `.data` is replaced. What is left in FP32: the parameters of normalisation
modules, whose gradients are sums over the whole batch and which are few; and what the policy or the caller
names.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from mezzo.core.errors import UnknownNameError, UsageError, unknown_name
from mezzo.core.masters import bytes_per_parameter
from mezzo.core.policy import Policy
from mezzo.core.policy import policy as policy_of
from mezzo.core.policy_text import matches
from mezzo.pytorch.dtypes import dtype_of, name_of
from mezzo.pytorch.kernels.optimizer_step.reference import decode_master, encode_master
from mezzo.pytorch.kernels.plain import is_dense

LOWERED = (torch.bfloat16, torch.float16)

# Parameter -> what its 16-bit weight lacks: the int16 remainder of a bf16 weight, the FP32 value of an fp16 one.
_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()

# Elements that are encoded at a time, so that the temporaries stay small beside the parameter.
_PIECE = 1 << 20

_TORCH_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_NORM_NAME = re.compile(r"norm(?:ali[sz]ation)?(?:[123]d)?$", re.IGNORECASE)


@dataclass(frozen=True)
class _Owned:
    """One place in a model where a parameter is registered; a tied one has several."""

    path: str
    module: nn.Module
    name: str
    param: nn.Parameter


def lower_weights(
    model: nn.Module, precision: str | Policy = "bf16", *, keep: Iterable[str] = ()
) -> list[str]:
    """Store a model's FP32 weights in 16 bits, in place, and keep what that rounds off for the optimizer.

    Naive code::

        for name, param in model.named_parameters():
            if param.dtype is torch.float32 and not stays_fp32(name):
                master[param] = param.data
                param.data = half_away16(param.data)        # bf16; fp16: ties to even

    It is done one parameter at a time: at its peak it needs the model and one parameter more. Frozen
    parameters are lowered too. FP64, complex, integer and 16-bit parameters are left as they are, and so are
    buffers. A gradient that is there is lowered with its weight.

    In FP32 stay the parameters of

    - normalisation modules: PyTorch's own, and any class whose name ends in ``Norm`` (``1d`` to ``3d`` aside:
      ``LlamaRMSNorm``, ``LayerNorm2d``), as far as they are registered in it directly and have one dimension
      longer than 1 at most (``PreNorm`` around a whole layer is not meant);
    - modules, and what is inside them, that the policy gives a format other than the weights';
    - modules and parameters that `keep` names.

    A tied parameter stays in FP32 if one of its owners wants it so.

    Args:
        model: any module, its checkpoint loaded. Compile it and wrap it in DDP afterwards. A copy of a lowered
            model starts from its rounded weights, since what was kept belongs to this model's parameters; and an
            FP32 checkpoint that comes later brings its masters by `mezzo.load_master_state_dict`.
        precision: ``"bf16"``, ``"fp16"``, a policy's string or file, or a `Policy`: its ``params`` format, or,
            where that is fp32, its ``compute`` format.
        keep: patterns, as of a policy's modules, of module paths or parameter names: ``"head"``,
            ``"blocks.*.mlp"``, ``"**.bias"``.

    Returns:
        The names of the parameters that were lowered, each under its first name, as in `named_parameters`.

    Raises:
        UsageError: no module; a precision without 16-bit format; a parameter that has no values yet (lazy, or
            on the meta device), whose tensor is of a class of its own (DTensor, quantised), or that holds a
            finite value beyond the format's range. The message names it, and nothing was changed.
        UnknownNameError: a pattern that matches nothing.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"lower_weights: the model is a {type(model).__name__}; give a torch.nn.Module")
    policy = policy_of(precision)
    dtype = dtype_of(_format_of(policy))
    owned = list(_owned(model))
    stays = _staying(owned, policy, _format_of(policy), list(keep))
    chosen = {}
    for name, param in model.named_parameters():
        if id(param) not in stays and (is_lazy(param) or param.dtype is torch.float32):
            _refuse_unfit(name, param, dtype)
            chosen[name] = param
    for param in chosen.values():
        _lower(param, dtype)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants them in one buffer, as Module.to leaves them
    torch.clear_autocast_cache()
    return list(chosen)


def take_master(param: Tensor) -> Tensor | None:
    """The FP32 value that was kept for a 16-bit parameter, which is then forgotten; None if there is none.

    Where the weight was edited since, the value is within one ulp of the edited weight. If its `.data` was
    replaced by another dtype or shape, nothing is left.

    Returns:
        FP32, of the parameter's shape, strides and device.
    """
    master = peek_master(param)
    _kept.pop(param, None)
    return master


def peek_master(param: Tensor) -> Tensor | None:
    """What `take_master` would return, without forgetting it."""
    kept: Tensor | None = _kept.get(param)
    if kept is None or not _belongs(kept, param):
        return None
    weight = param.detach()
    kept = kept.to(weight.device)
    master = torch.empty_like(weight, dtype=torch.float32)
    for part, low, out in pieces(weight, kept, master):
        out.copy_(decode_master("split" if kept.dtype is torch.int16 else "fp32", part, low))
    return master


def has_master(param: Tensor) -> bool:
    """Whether an FP32 value is kept for this parameter."""
    kept = _kept.get(param)
    return kept is not None and _belongs(kept, param)


def keep_master(param: Tensor, master: Tensor) -> None:
    """Write a 16-bit parameter's weight from an FP32 value, and keep what the rounding takes off.

    Args:
        param: bf16 or fp16.
        master: FP32, of its shape.
    """
    weight = param.detach()
    master = torch.empty_like(weight, dtype=torch.float32).copy_(master)
    kept = _encode(master, weight)
    if kept is None:
        _kept.pop(param, None)
    else:
        _kept[param] = kept


def overflows(master: Tensor, dtype: torch.dtype) -> bool:
    """Whether a finite FP32 value becomes infinite in a 16-bit weight."""
    return any(
        bool((encode_master("fp32", part, dtype)[0].isinf() & part.isfinite()).any())
        for (part,) in pieces(master)
    )


def is_normalisation(module: nn.Module) -> bool:
    """Whether a module is a normalisation: PyTorch's, or a class that says so at the end of its name."""
    return isinstance(module, _TORCH_NORMS) or _NORM_NAME.search(type(module).__name__) is not None


def _format_of(policy: Policy) -> str:
    fmt = policy.activations if policy.params == "fp32" else policy.params
    if fmt in ("bf16", "fp16"):
        return fmt
    if fmt == "auto":
        raise UsageError(
            "lower_weights: compute=auto is not decided yet. Use 'bf16' or 'fp16', or resolve the policy first: "
            "policy.resolved('bf16')."
        )
    raise unknown_name("16-bit format", fmt, ("bf16", "fp16"), where=f"lower_weights(precision='{policy}'): ")


def _owned(model: nn.Module) -> Iterator[_Owned]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            yield _Owned(path, module, name, param)


def _staying(owned: list[_Owned], policy: Policy, fmt: str, keep: list[str]) -> set[int]:
    """The ids of the parameters that stay in FP32."""
    paths = sorted({path for one in owned for path in _upwards(one.path)})
    names = [f"{one.path}.{one.name}".lstrip(".") for one in owned]
    for pattern in keep:
        if not any(matches(pattern, path) for path in (*paths, *names)):
            raise _no_such_name(f"lower_weights(keep=[{pattern!r}])", pattern, [*paths, *names])
    for pattern, _ in policy.modules:
        if not any(matches(pattern, path) for path in paths):
            raise _no_such_name(f"policy: module pattern {pattern!r}", pattern, paths)
    stays = set()
    for one, full in zip(owned, names):
        above = list(_upwards(one.path))
        override = next((f for path in above if (f := policy.format_for_module(path)) is not None), fmt)
        if (
            override != fmt
            or _norm_parameter(one)
            or any(matches(pattern, path) for pattern in keep for path in (full, *above))
        ):
            stays.add(id(one.param))
    return stays


def _upwards(path: str) -> Iterator[str]:
    """A module's path, then those of the modules around it, the model's own (empty) last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _norm_parameter(one: _Owned) -> bool:
    if isinstance(one.module, _TORCH_NORMS):
        return True
    return is_normalisation(one.module) and (
        is_lazy(one.param) or sum(size > 1 for size in one.param.shape) <= 1
    )


def _no_such_name(where: str, pattern: str, names: list[str]) -> UnknownNameError:
    near = difflib.get_close_matches(pattern.replace("*", "0"), [n for n in names if n], n=1, cutoff=0.0)
    mend = f" The nearest is {near[0]!r}." if near else ""
    return UnknownNameError(f"{where}: it matches nothing in the model.{mend}")


def _refuse_unfit(name: str, param: nn.Parameter, dtype: torch.dtype) -> None:
    where = f"lower_weights: parameter {name!r}"
    if is_lazy(param):
        raise UsageError(f"{where} is lazy and has no values yet. Run the model once on a batch first.")
    if param.is_meta:
        raise UsageError(
            f"{where} is on the meta device and has no values. Load the model first (to_empty, then "
            "load_state_dict), and lower it then."
        )
    data: object = param.data
    if is_traceable_wrapper_subclass(data) or param.layout is not torch.strided:
        kind = type(data).__name__ if param.layout is torch.strided else str(param.layout)
        raise UsageError(
            f"{where} is a {kind}. Lower the model before its parameters are distributed or quantised, or leave "
            f"this one out: keep=[{name!r}]."
        )
    if overflows(param.detach(), dtype):
        largest = float(param.detach().abs().nan_to_num(0.0, 0.0).max())
        short, top = ("fp16", "65504") if dtype is torch.float16 else ("bf16", "3.3895e38")
        raise UsageError(
            f"{where} holds {largest:g}, and {short} ends at {top}. Leave it in FP32: keep=[{name!r}]"
            + (", or use bf16, which has FP32's range." if short == "fp16" else ".")
        )


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
    """Fill a 16-bit weight from its FP32 value; what it lacks, or None where it lacks nothing."""
    if weight.dtype is not torch.bfloat16:
        for part, out in pieces(master, weight):
            out.copy_(part)
        exact = all(torch.equal(part, low.to(torch.float32)) for part, low in pieces(master, weight))
        return None if exact else master.clone()
    remainder = torch.empty_like(weight, dtype=torch.int16)
    for part, out, low in pieces(master, weight, remainder):
        high, rest = encode_master("split", part)
        out.copy_(high)
        low.copy_(rest)
    return remainder if bool(remainder.any()) else None


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Equal parts of tensors of one shape: in the order of memory where all lie alike, else as they are."""
    first = tensors[0]
    if not is_dense(first) or any(tensor.stride() != first.stride() for tensor in tensors):
        yield tensors
        return
    flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    for start in range(0, first.numel(), _PIECE):
        yield tuple(tensor[start : start + _PIECE] for tensor in flat)


def _belongs(kept: Tensor, param: Tensor) -> bool:
    dtype = torch.bfloat16 if kept.dtype is torch.int16 else torch.float16
    return param.dtype is dtype and param.shape == kept.shape and not param.is_meta


@contextmanager
def stored(model: torch.nn.Module, policy: Policy) -> Iterator[list[str]]:
    """While this lasts, weights are stored as the policy says; yields what a reader should know of it.

    Naive code::

        saved = [(p, p.data, p.grad) for p in model.parameters()]
        lower_weights(model, policy)
        yield
        for p, p.data, p.grad in saved: pass

    The tensors that were there come back themselves, not copies. A model whose weights can't be lowered stays as
    it is, and the sentence says why.
    """
    if policy.params == "fp32":
        yield [] if policy.state == "fp32" else [_sentence(model, policy)]
        return
    before = [(p, p.data, p.grad) for p in model.parameters()]
    for p, _, _ in before:
        p.grad = None
    try:
        try:
            lower_weights(model, policy)
            note = _sentence(model, policy)
        except UsageError as error:
            note = f"weights were left as they are. {error}"
        yield [note]
    finally:
        for p, data, grad in before:
            if p.dtype is not data.dtype:
                take_master(p)  # what was kept aside for it; that of a model lowered earlier stays
                p.data = data
            p.grad = grad


def _sentence(model: torch.nn.Module, policy: Policy) -> str:
    counts = Counter(name_of(p.dtype) for p in model.parameters())
    weights = ", ".join(f"{count} in {name}" for name, count in counts.most_common())
    masters = "" if policy.params == "fp32" else f"masters {policy.masters}, "
    each = bytes_per_parameter(policy.params, policy.masters, policy.state)
    return (
        f"parameters: {weights}; {masters}state {policy.state}: under AdamW {round(each, 2):g} bytes a "
        f"{policy.params} parameter, where FP32 takes 16."
    )
