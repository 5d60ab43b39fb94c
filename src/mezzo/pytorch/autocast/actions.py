"""What a registered kernel does with a call, built once for each op, format and kind of device.

An action takes the arguments as the dispatcher hands them on (keyword-only ones by name) while the Autocast key is
excluded. It runs at every call, so what can be known beforehand (where the tensors stand, whether there is one or
several) is worked out when it is built.

What a 16-bit input is widened for, an FP32 op may keep for backward: its FP32 copy, twice the bytes. Where that is
worth a pair of saved-tensor hooks, the 16-bit tensor itself is kept (`mezzo.pytorch.kernels.packing`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mezzo.core.errors import BannedOpError
from mezzo.core.policy import Policy
from mezzo.pytorch.autocast.fallback import noted, widen
from mezzo.pytorch.autocast.plan import TORCH_TABLE, OpPlan, overload_named
from mezzo.pytorch.dtypes import dtype_of, name_of
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.packing import Packing, Rounded
from mezzo.pytorch.kernels.plain import is_plain

__all__ = ["Action", "action", "for_other_layouts"]

Action = Callable[..., Any]

# Ops whose output dtype can be set in the stead of their inputs': those for which PyTorch's CUDA table does
# so. (Others take the argument too, but `_safe_softmax` in fp16, for one, can't run backward then.)
_DTYPE_SETTABLE = frozenset(
    name.partition(".")[0] for name, category in TORCH_TABLE["cuda"].items() if category == "fp32_dtype"
) - {"linalg_matrix_norm"}  # its nuclear norm refuses 16-bit inputs, whatever it is to give

# Ops that `torch` binds with the very arguments of the overload: the binding parses them faster than `torch.ops`.
# (Where there is nothing to parse but one tensor that goes for every op.)
_SAME_ARGUMENTS = frozenset(
    {"cat", "group_norm", "layer_norm", "log_softmax", "rms_norm", "softmax", "stack"}
)

# Ops whose further results are statistics of their input's rows, which are no activations and stay FP32.
_GIVES_STATISTICS = frozenset({"native_layer_norm", "native_group_norm"})

# Hooks cost some 10 us a call: as much as a core takes to widen this many elements.
_WORTH_PACKING = 1 << 16

_FP32, _FP64 = torch.float32, torch.float64
_HALVES = (torch.float16, torch.bfloat16)


def action(op_plan: OpPlan, name: str, device_type: str, policy: Policy) -> Action:
    """The action of one overload under a policy's plan; the overload itself where it is to run as it comes."""
    overload, compute = overload_named(name), dtype_of(policy.activations)
    if op_plan.kernel is not None:
        return _by_kernel(op_plan, overload, device_type, policy)
    if op_plan.how == "banned":
        return _banned(op_plan, overload, device_type)
    if op_plan.how == "emulated":
        return _emulated(op_plan.op, overload, device_type, compute)
    if op_plan.how == "fp32":
        return _in_fp32(op_plan.op, overload, device_type)
    if op_plan.how == "rounded":
        return _rounded(op_plan.op, overload, device_type)
    if op_plan.how == "promote":
        return _promoted(overload, device_type)
    if op_plan.rule == "lower":
        return _cast_to(overload, device_type, compute)
    return _fastest(overload)


def _by_kernel(op_plan: OpPlan, overload: torch._ops.OpOverload, device_type: str, policy: Policy) -> Action:
    """The action of Mezzo's own kernel, by its kind: it gets the op's arguments, or makes the action itself."""
    assert op_plan.kernel is not None
    kind, path = op_plan.kernel.kind, op_plan.kernel.path
    compute = dtype_of(policy.activations)
    if kind == "number":
        return _writing_number(op_plan, overload)
    function = backend.kernel(path)
    if kind == "gradient":
        return function
    if kind == "indices":
        made: Action = function(op_plan.op, _fastest(overload))
        return made
    if kind == "fp8":
        return _if_floats(functools.partial(function, scaling=policy.scaling), overload, device_type, 2)
    if kind == "tf32":
        return _if_floats(function(overload), overload, device_type)
    if kind in ("layer", "cell"):
        return _if_floats(function(overload, compute), overload, device_type)
    return _sixteen_bits(op_plan, function, overload, device_type, compute)


def for_other_layouts(op_plan: OpPlan, name: str, device_type: str) -> Action | None:
    """The action of one overload where an input is sparse, nested, negated or oneDNN's; None: as with dense ones.

    PyTorch has few 16-bit kernels for such tensors, and not all can be cast. So what has 16 bits is widened, the rest
    stays, and the result is FP32, or for `internal_fp32` the first input's format. Nested tensors have 16-bit kernels:
    they run as they come if nothing is in FP32.
    """
    overload = overload_named(name)
    if op_plan.how in ("banned", "number"):
        return None
    if op_plan.rule == "promote":
        return _promoted(overload, device_type)
    if op_plan.rule == "internal_fp32":
        return noted(op_plan.op, _rounded(op_plan.op, overload, device_type))

    lowers = op_plan.how != "fp32"

    def widened(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if lowers and any(t.is_nested for t in tensors) and not any(t.dtype is _FP32 for t in tensors):
            return overload(*args, **kwargs)
        wide_args, wide_kwargs = tree_map_only(Tensor, widen, (args, kwargs))
        return overload(*wide_args, **wide_kwargs)

    return noted(op_plan.op, widened) if lowers else widened


def _fastest(overload: torch._ops.OpOverload) -> Action:
    """What calls an overload with the least overhead."""
    namespace, _, name = overload._schema.name.partition("::")
    alone = len(overload._schema.arguments) == 1 and overload._overloadname == "default"
    if namespace == "aten" and (alone or name in _SAME_ARGUMENTS):
        found: Action = getattr(torch._C._VariableFunctions, name, overload._op)
        return found
    return overload._op


def _eligible(value: Any, device_type: str) -> bool:
    """Autocast's own test: a floating tensor on the device, and not FP64."""
    return (
        isinstance(value, Tensor)
        and value.dtype is not _FP64
        and value.is_floating_point()
        and value.device.type == device_type
    )


def _cast(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    """An argument with each eligible tensor in `dtype`; lists of tensors are walked, all else left alone."""
    if isinstance(value, Tensor):
        if value.dtype is dtype or not _eligible(value, device_type):
            return value
        return value.to(dtype)
    if type(value) in (list, tuple):
        return [_cast(item, dtype, device_type) for item in value]
    return value


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str) -> list[Tensor]:
    found = []
    for value in (*args, *kwargs.values()):
        for item in value if type(value) in (list, tuple) else (value,):
            if _eligible(item, device_type):
                found.append(item)
    return found


def _takes_one_tensor(overload: torch._ops.OpOverload) -> bool:
    """Whether the first argument is a tensor and none of the others is, or could be."""
    kinds = ["Tensor" in str(argument.type) for argument in overload._schema.arguments]
    return str(overload._schema.arguments[0].type) == "Tensor" and sum(kinds) == 1


def _widest(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The widest dtype; fp16 and bf16 together make FP32, where PyTorch's own `promote` raises."""
    widest = None
    for tensor in tensors:
        dtype = tensor.dtype
        widest = dtype if widest is None or widest is dtype else torch.promote_types(widest, dtype)
    return widest


def _cast_to(overload: torch._ops.OpOverload, device_type: str, dtype: torch.dtype) -> Action:
    op = _fastest(overload)

    def one(x: Tensor, /, *rest: Any, **kwargs: Any) -> Any:
        return op(x if x.dtype is dtype else _cast(x, dtype, device_type), *rest, **kwargs)

    def several(*args: Any, **kwargs: Any) -> Any:
        cast = [_cast(value, dtype, device_type) for value in args]
        if not kwargs:
            return op(*cast)
        return op(*cast, **{key: _cast(value, dtype, device_type) for key, value in kwargs.items()})

    return one if _takes_one_tensor(overload) else several


def _in_fp32(op: str, overload: torch._ops.OpOverload, device_type: str) -> Action:
    if op in _DTYPE_SETTABLE:
        return _with_dtype(overload, device_type)
    call = _fastest(overload)

    def one(x: Tensor, /, *rest: Any, **kwargs: Any) -> Any:
        dtype = x.dtype
        if dtype is _FP32:
            return call(x, *rest, **kwargs)
        if dtype not in _HALVES:
            return call(_cast(x, _FP32, device_type), *rest, **kwargs)
        if x.requires_grad and _is_worth_packing(x):
            return _keeping_halves(call, (x, *rest), kwargs, device_type)
        return call(x.float(), *rest, **kwargs)

    cast_all = _cast_to(overload, device_type, _FP32)

    def several(*args: Any, **kwargs: Any) -> Any:
        x = args[0]
        if isinstance(x, Tensor) and x.dtype in _HALVES and x.requires_grad and _is_worth_packing(x):
            return _keeping_halves(call, args, kwargs, device_type)
        return cast_all(*args, **kwargs)

    return one if _takes_one_tensor(overload) else several


def _is_worth_packing(x: Tensor) -> bool:
    """Whether a 16-bit input is large enough, and a backward may ask for it in eager mode."""
    return (
        x.numel() >= _WORTH_PACKING
        and torch.is_grad_enabled()
        and is_plain(x)
        and bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]
    )


def _keeping_halves(op: Action, args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str) -> Any:
    """The op on FP32 forms of its inputs, which keeps of each 16-bit input that input itself."""
    halves: list[Rounded] = []
    dtype = args[0].dtype

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype is dtype and _eligible(value, device_type):
            halves.append(Rounded(value, dtype))
            return halves[-1].wide
        return _cast(value, _FP32, device_type)

    wide = [widen(value) for value in args]
    named = {key: _cast(value, _FP32, device_type) for key, value in kwargs.items()}
    packing = Packing(halves, dtype, None, torch._C._autograd._top_saved_tensors_default_hooks(False))
    try:
        with torch.autograd.graph.saved_tensors_hooks(packing.pack, Packing.unpack):
            return op(*wide, **named)
    finally:
        packing.forget()


def _with_dtype(overload: torch._ops.OpOverload, device_type: str) -> Action:
    position = [argument.name for argument in overload._schema.arguments].index("dtype")
    op = _fastest(overload)

    def with_dtype(*args: Any, **kwargs: Any) -> Any:
        # Reductions that can be told their output's dtype convert as they read: no FP32 copy of the input is
        # made. A dtype that the caller gave is respected.
        x = args[0]
        if not kwargs and len(args) <= position and x.dtype in _HALVES and x.device.type == device_type:
            return op(*args, dtype=_FP32)
        if x.dtype is _FP32 and not kwargs:
            return op(*args)
        given = kwargs.get("dtype") if len(args) <= position else args[position]
        if given is not None or not _eligible(x, device_type):
            return op(*args, **kwargs)
        if len(args) > position:
            return op(*args[:position], _FP32, *args[position + 1 :], **kwargs)
        return op(*args, **{**kwargs, "dtype": _FP32})

    return with_dtype


def _rounded(op: str, overload: torch._ops.OpOverload, device_type: str) -> Action:
    """`internal_fp32` by construction: FP32 in between, and the results in the first floating input's format."""
    in_fp32 = _in_fp32(op, overload, device_type)

    def rounded(*args: Any, **kwargs: Any) -> Any:
        dtype = _first_dtype(args, device_type)
        out = in_fp32(*args, **kwargs)
        if dtype not in _HALVES or kwargs.get("dtype") is not None:
            return out
        if op in _GIVES_STATISTICS:
            return (out[0].to(dtype), *out[1:])
        return _narrowed(out, dtype)

    return rounded


def _first_dtype(args: Sequence[Any], device_type: str) -> torch.dtype | None:
    for value in args:
        for item in value if type(value) in (list, tuple) else (value,):
            if isinstance(item, Tensor) and _eligible(item, device_type):
                return item.dtype
    return None


def _sixteen_bits(
    op_plan: OpPlan, kernel: Action, overload: torch._ops.OpOverload, device_type: str, compute: torch.dtype
) -> Action:
    """A kernel that takes a 16-bit first tensor; FP32 goes to PyTorch's, or is lowered where the rule says so."""
    otherwise = _in_fp32(op_plan.op, overload, device_type)

    def as_it_comes(x: Tensor, /, *rest: Any, **kwargs: Any) -> Any:
        if x.dtype in _HALVES:
            return kernel(x, *rest, **kwargs)
        return otherwise(x, *rest, **kwargs)

    def lowered(x: Tensor, /, *rest: Any, **kwargs: Any) -> Any:
        if _eligible(x, device_type):
            return kernel(x.to(compute), *rest, **kwargs)
        return overload(x, *rest, **kwargs)

    return lowered if op_plan.rule == "lower" else as_it_comes


def _if_floats(
    kernel: Action, overload: torch._ops.OpOverload, device_type: str, first: int | None = None
) -> Action:
    """The kernel where the first so many arguments are floating tensors (None: any of all), else the op as it is."""

    def run(*args: Any, **kwargs: Any) -> Any:
        found = len(_tensors(args[:first], kwargs, device_type))
        if found < (first or 1):
            return overload(*args, **kwargs)
        return kernel(*args, **kwargs)

    return run


def _promoted(overload: torch._ops.OpOverload, device_type: str) -> Action:
    op, in_place = _fastest(overload), overload._schema.is_mutable
    if _takes_one_tensor(overload):
        return op

    def promoted(*args: Any, **kwargs: Any) -> Any:
        tensors = _tensors(args, kwargs, device_type)
        widest = args[0].dtype if in_place and tensors else _widest(tensors)
        if widest is None or widest is _FP64:
            return op(*args, **kwargs)
        cast = [_cast(value, widest, device_type) for value in args]
        return op(*cast, **{key: _cast(value, widest, device_type) for key, value in kwargs.items()})

    return promoted


def _writing_number(op_plan: OpPlan, overload: torch._ops.OpOverload) -> Action:
    op = _fastest(overload)
    widened = noted(op_plan.op, lambda x, mask, value: op(x.float(), mask, value))

    def writing(x: Tensor, mask: Tensor, value: Any) -> Any:
        largest = torch.finfo(x.dtype).max if x.dtype in _HALVES else math.inf
        if not largest < abs(value) < math.inf:
            return op(x, mask, value)
        if overload._schema.is_mutable:
            return op(x, mask, math.copysign(largest, value))
        return widened(x, mask, value)

    return writing


def _narrowed(result: Any, dtype: torch.dtype) -> Any:
    if isinstance(result, Tensor):
        return result.to(dtype) if result.dtype is _FP32 else result
    if type(result) in (list, tuple):
        return type(result)(_narrowed(item, dtype) for item in result)
    return result


def _emulated(op: str, overload: torch._ops.OpOverload, device_type: str, compute: torch.dtype) -> Action:
    from mezzo.pytorch.kernels.emulated import EMULATED

    name = overload.name().removeprefix("aten::").removesuffix(".default")
    kernel = EMULATED.get(name) or EMULATED.get(op)
    if kernel is not None:

        def emulated(*args: Any, **kwargs: Any) -> Any:
            if not _eligible(args[0], device_type) and not _tensors(args, kwargs, device_type):
                return overload(*args, **kwargs)
            return kernel(*args, compute=compute, **kwargs)

        return emulated

    def between_casts(*args: Any, **kwargs: Any) -> Any:
        # The general form, for ops that have no kernel of their own: 16-bit values, FP32 arithmetic, 16-bit
        # result.
        if not _tensors(args, kwargs, device_type):
            return overload(*args, **kwargs)
        low = [_cast(value, compute, device_type) for value in args]
        wide = [_cast(value, _FP32, device_type) for value in low]
        named = {
            key: _cast(_cast(value, compute, device_type), _FP32, device_type)
            for key, value in kwargs.items()
        }
        return _narrowed(overload(*wide, **named), compute)

    return between_casts


def _banned(op_plan: OpPlan, overload: torch._ops.OpOverload, device_type: str) -> Action:
    in_fp32 = _cast_to(overload, device_type, _FP32)

    def banned(*args: Any, **kwargs: Any) -> Any:
        for tensor in _tensors(args, kwargs, device_type):
            if tensor.dtype is not _FP32:
                reason = op_plan.reason.partition(";")[0]
                raise BannedOpError(
                    f"{op_plan.op} is banned with {name_of(tensor.dtype)} inputs: {reason}. {op_plan.remedy} "
                    f"To run it in FP32 all the same, add op.{op_plan.op}=fp32 to the policy."
                )
        return in_fp32(*args, **kwargs)

    return banned
