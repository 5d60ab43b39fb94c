"""What a registered kernel does with a call: one function per overload, format and device type.

An action receives the arguments as the dispatcher passes them, while the Autocast key is excluded. It runs at every
call, so what can be known beforehand is determined when it is built.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mezzo.core.compute import QUANTIZED
from mezzo.core.errors import BannedOpError
from mezzo.core.policy import Policy
from mezzo.pytorch.autocast.fallback import noted, widen
from mezzo.pytorch.autocast.plan import OpPlan, Overload, overload_named, takes_one_tensor
from mezzo.pytorch.dtypes import SIXTEEN_BITS, dtype_of, name_of
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.emulated import KEEP_RANK, emulated, saving_low
from mezzo.pytorch.kernels.packing import Rounded
from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.nested import changed, mapped, tensors

Action = Callable[..., Any]

# Ops whose output dtype can be set instead of casting their inputs, as PyTorch's CUDA autocast does.
# (Others take the argument too, but `_safe_softmax` in fp16, for one, can't run backward then, and the nuclear norm of
# `linalg_matrix_norm` refuses 16-bit inputs with any dtype.)
_DTYPE_SETTABLE = frozenset(
    {"cumprod", "cumsum", "linalg_vector_norm", "log_softmax", "prod", "softmax", "sum"}
)

# Ops that `torch` binds with the arguments of the overload: the binding parses them faster than `torch.ops`.
# (Where one tensor is the only argument that holds for every op.)
_SAME_ARGUMENTS = frozenset(
    {"cat", "group_norm", "layer_norm", "log_softmax", "rms_norm", "softmax", "stack"}
)

# Ops whose further results are statistics of their input's rows and stay FP32.
_GIVES_STATISTICS = frozenset({"native_layer_norm", "native_group_norm"})

# Hooks cost some 10 us per call: as much as a core takes to widen this many elements.
_WORTH_PACKING = 1 << 16

_FP32, _FP64 = torch.float32, torch.float64
# Weights that an embedding has looked up, also of graphs that are being traced.
_tables: Any = WeakIdKeyDictionary()


def action(op_plan: OpPlan, name: str, device_type: str, policy: Policy) -> Action:
    """The action of one overload under a policy's plan."""
    overload, compute = overload_named(name), dtype_of(policy.activations)
    if op_plan.kernel is not None:
        return _custom_kernel(op_plan, overload, device_type, policy)
    if op_plan.how == "emulated":
        return _if_floats(emulated(overload, compute, KEEP_RANK.get(op_plan.op)), overload, device_type)
    if op_plan.how == "promote":
        return _promoted(overload, device_type)
    builders = {"banned": _banned, "fp32": _in_fp32, "rounded": _rounded}
    if op_plan.how in builders:
        return builders[op_plan.how](op_plan, overload, device_type)
    return _cast_to(overload, device_type, compute) if op_plan.rule == "lower" else _fastest(overload)


def _custom_kernel(op_plan: OpPlan, overload: Overload, device_type: str, policy: Policy) -> Action:
    assert op_plan.kernel is not None
    kind, compute = op_plan.kernel.kind, dtype_of(policy.activations)
    if kind == "number":
        return _writing_number(op_plan, overload)
    function = backend.kernel(op_plan.kernel.path)
    if kind == "gradient":
        return function
    if kind == "indices":
        made: Action = function(op_plan.op, _fastest(overload))
        return made
    if kind == "quantized":
        quantized = functools.partial(function, recipe=policy.quantization)
        low = backend.kernel("quantized_linear:in_bf16")

        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
            return (low if weight in _tables else quantized)(input, weight, bias)

        return _if_floats(linear, overload, device_type, 2)
    if kind == "tf32":
        return _if_floats(function(overload), overload, device_type)
    if kind in ("layer", "cell"):
        return _if_floats(function(overload, compute), overload, device_type)
    return _sixteen_bits(op_plan, function, overload, device_type, compute)


def noting_table(found: Action, policy: Policy) -> Action:
    """The embedding, after which its weight is not quantized where a linear product has it (mostly the head).

    A policy that quantizes only the layers that it names quantizes such a head, also after a training by another one.
    """
    named_alone = policy.compute not in QUANTIZED and policy.computed & QUANTIZED
    note = _tables.pop if named_alone else _tables.setdefault

    def looked_up(weight: Tensor, /, *rest: Any, **kwargs: Any) -> Any:
        note(weight, None)
        return found(weight, *rest, **kwargs)

    return looked_up


def for_other_layouts(op_plan: OpPlan, name: str, device_type: str) -> Action | None:
    """The action of one overload where an input is sparse, nested, negated or oneDNN's; None: as with dense ones."""
    overload = overload_named(name)
    if op_plan.how == "banned":
        return None
    if op_plan.rule == "promote":
        return _promoted(overload, device_type)
    if op_plan.rule == "internal_fp32":
        return noted(op_plan.op, _rounded(op_plan, overload, device_type))
    lowers = op_plan.how != "fp32"

    def widened(*args: Any, **kwargs: Any) -> Any:
        given = list(tensors((args, kwargs)))
        low = next((t.dtype for t in given if t.dtype in SIXTEEN_BITS), _FP32)
        narrows = lowers and any(t.is_nested for t in given)  # these have 16-bit kernels
        args, kwargs = mapped((args, kwargs), (lambda t: _cast(t, low, device_type)) if narrows else widen)
        return overload(*args, **kwargs)

    return noted(op_plan.op, widened) if lowers else widened


def _fastest(overload: Overload) -> Action:
    """What calls an overload with the least overhead."""
    schema = overload._schema
    namespace, _, name = schema.name.partition("::")
    alone = len(schema.arguments) == 1 and not schema.overload_name
    bound = getattr(torch, name, None) if namespace == "aten" and (alone or name in _SAME_ARGUMENTS) else None
    return bound if isinstance(bound, types.BuiltinFunctionType) else overload._op


def _eligible(value: Any, device_type: str) -> bool:
    """Autocast's own test: a floating tensor on the device, and not FP64."""
    is_float = isinstance(value, Tensor) and value.dtype is not _FP64 and value.is_floating_point()
    return is_float and value.device.type == device_type


def _cast(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    """An argument with each eligible tensor in `dtype`, also in lists of tensors."""
    if isinstance(value, Tensor):
        if value.dtype is dtype or not _eligible(value, device_type):
            return value
        return value.to(dtype)
    if type(value) in (list, tuple):
        return [_cast(item, dtype, device_type) for item in value]
    return value


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str) -> Iterator[Tensor]:
    """The eligible tensors of a call, also in lists."""
    for value in (*args, *kwargs.values()):
        for item in value if type(value) in (list, tuple) else (value,):
            if _eligible(item, device_type):
                yield item


def _cast_to(overload: Overload, device_type: str, dtype: torch.dtype) -> Action:
    op = _fastest(overload)

    def one(x: Tensor, /, *rest: Any, **kwargs: Any) -> Any:
        return op(x if x.dtype is dtype else _cast(x, dtype, device_type), *rest, **kwargs)

    def several(*args: Any, **kwargs: Any) -> Any:
        cast = [_cast(value, dtype, device_type) for value in args]
        if not kwargs:
            return op(*cast)
        return op(*cast, **{key: _cast(value, dtype, device_type) for key, value in kwargs.items()})

    return one if takes_one_tensor(overload) else several


def _in_fp32(op_plan: OpPlan, overload: Overload, device_type: str) -> Action:
    if op_plan.op in _DTYPE_SETTABLE:
        return _with_dtype(overload)
    call, cast_all = _fastest(overload), _cast_to(overload, device_type, _FP32)

    def one(x: Tensor, /, *rest: Any, **kwargs: Any) -> Any:
        dtype = x.dtype
        if dtype is _FP32:
            return call(x, *rest, **kwargs)
        if dtype not in SIXTEEN_BITS:
            return cast_all(x, *rest, **kwargs)
        if x.requires_grad and _is_worth_packing(x):
            return _saving_halves(call, (x, *rest), kwargs, device_type)
        return call(x.float(), *rest, **kwargs)

    def several(*args: Any, **kwargs: Any) -> Any:
        x = args[0]
        if isinstance(x, Tensor) and x.dtype in SIXTEEN_BITS and x.requires_grad and _is_worth_packing(x):
            return _saving_halves(call, args, kwargs, device_type)
        return cast_all(*args, **kwargs)

    return one if takes_one_tensor(overload) else several


def _is_worth_packing(x: Tensor) -> bool:
    """Whether a 16-bit input is large enough, and an eager backward may ask for it."""
    return x.numel() >= _WORTH_PACKING and torch.is_grad_enabled() and is_plain(x)


def _saving_halves(op: Action, args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str) -> Any:
    """The op on its inputs in FP32. For backward it saves 16-bit inputs as they are."""
    halves: list[Rounded] = []
    dtype = args[0].dtype

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype is dtype and _eligible(value, device_type):
            halves.append(Rounded(value, dtype))
            return halves[-1].wide
        return _cast(value, _FP32, device_type)

    wide_kwargs = {key: _cast(value, _FP32, device_type) for key, value in kwargs.items()}
    return saving_low(op, [wide(value) for value in args], wide_kwargs, halves, dtype)


def _with_dtype(overload: Overload) -> Action:
    """A reduction with an output dtype converts as it reads, without an FP32 copy of its input."""
    position = [argument.name for argument in overload._schema.arguments].index("dtype")
    op = _fastest(overload)

    def with_dtype(*args: Any, **kwargs: Any) -> Any:
        x = args[0]
        if x.dtype is _FP32 and not kwargs:  # a shorter way for the two most frequent calls
            return op(*args)
        if x.dtype in SIXTEEN_BITS:
            if not kwargs and len(args) <= position:
                return op(*args, dtype=_FP32)
            if len(args) <= position and kwargs.get("dtype") is None:
                return op(*args, **{**kwargs, "dtype": _FP32})
            if len(args) > position and args[position] is None:
                return op(*args[:position], _FP32, *args[position + 1 :], **kwargs)
        return op(*args, **kwargs)

    return with_dtype


def gives_fp32(found: Action) -> bool:
    """Whether an action is the op with an output dtype of FP32, for a 16-bit tensor and no dtype of its own."""
    return found.__name__ == "with_dtype"


def _rounded(op_plan: OpPlan, overload: Overload, device_type: str) -> Action:
    """`internal_fp32` with the FP32 kernel: results are rounded to the first floating input's format."""
    in_fp32 = _in_fp32(op_plan, overload, device_type)
    gives_statistics = op_plan.op in _GIVES_STATISTICS

    def rounded(*args: Any, **kwargs: Any) -> Any:
        first = next(_tensors(args, {}, device_type), None)
        out = in_fp32(*args, **kwargs)
        if first is None or first.dtype not in SIXTEEN_BITS or kwargs.get("dtype") is not None:
            return out
        if gives_statistics:
            return (out[0].to(first.dtype), *out[1:])
        return changed(out, lambda t: t.to(first.dtype) if isinstance(t, Tensor) and t.dtype is _FP32 else t)

    return rounded


def _sixteen_bits(
    op_plan: OpPlan, kernel: Action, overload: Overload, device_type: str, compute: torch.dtype
) -> Action:
    """A kernel for a 16-bit first tensor. An FP32 one goes to PyTorch's, or is lowered where the rule says so."""
    otherwise = _in_fp32(op_plan, overload, device_type)

    def as_it_comes(x: Tensor, /, *rest: Any, **kwargs: Any) -> Any:
        if x.dtype in SIXTEEN_BITS:
            return kernel(x, *rest, **kwargs)
        return otherwise(x, *rest, **kwargs)

    def lowered(x: Tensor, /, *rest: Any, **kwargs: Any) -> Any:
        if _eligible(x, device_type):
            return kernel(x.to(compute), *rest, **kwargs)
        return overload(x, *rest, **kwargs)

    return lowered if op_plan.rule == "lower" else as_it_comes


def _if_floats(kernel: Action, overload: Overload, device_type: str, first: int | None = None) -> Action:
    """The kernel where the first so many arguments are floating tensors (None: any of all), else the op itself."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if first is None and _eligible(args[0], device_type):  # the usual call
            return kernel(*args, **kwargs)
        if len(list(_tensors(args[:first], kwargs, device_type))) < (first or 1):
            return overload(*args, **kwargs)
        return kernel(*args, **kwargs)

    return run


def _promoted(overload: Overload, device_type: str) -> Action:
    """The widest input's dtype; fp16 and bf16 together make FP32, where PyTorch's own `promote` raises."""
    op, in_place = _fastest(overload), overload._schema.is_mutable
    if takes_one_tensor(overload):
        return op

    def promoted(*args: Any, **kwargs: Any) -> Any:
        dtypes = {tensor.dtype for tensor in _tensors(args, kwargs, device_type)}
        if not dtypes:
            return op(*args, **kwargs)
        widest = args[0].dtype if in_place else functools.reduce(torch.promote_types, dtypes)
        if widest is _FP64:
            return op(*args, **kwargs)
        cast = [_cast(value, widest, device_type) for value in args]
        return op(*cast, **{key: _cast(value, widest, device_type) for key, value in kwargs.items()})

    return promoted


def _writing_number(op_plan: OpPlan, overload: Overload) -> Action:
    """`masked_fill` with a number beyond a 16-bit range: FP32, or in place the format's largest number."""
    op = _fastest(overload)
    widened = noted(op_plan.op, lambda x, mask, value: op(x.float(), mask, value))

    def writing(x: Tensor, mask: Tensor, value: Any) -> Any:
        largest = torch.finfo(x.dtype).max if x.dtype in SIXTEEN_BITS else math.inf
        if not largest < abs(value) < math.inf:
            return op(x, mask, value)
        if overload._schema.is_mutable:
            return op(x, mask, math.copysign(largest, value))
        return widened(x, mask, value)

    return writing


def _banned(op_plan: OpPlan, overload: Overload, device_type: str) -> Action:
    in_fp32 = _cast_to(overload, device_type, _FP32)

    def banned(*args: Any, **kwargs: Any) -> Any:
        for tensor in _tensors(args, kwargs, device_type):
            if tensor.dtype is not _FP32:
                reason = op_plan.reason.partition(";")[0]
                raise BannedOpError(
                    f"{op_plan.op} is banned with {name_of(tensor.dtype)} inputs: {reason}. {op_plan.remedy} "
                    f"To run it in FP32 anyway, add it to the policy: '{name_of(tensor.dtype)},op.{op_plan.op}=fp32'."
                )
        return in_fp32(*args, **kwargs)

    return banned
