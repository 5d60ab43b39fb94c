"""A policy's plan as kernels at the dispatcher's Autocast keys.

PyTorch's autocast is a table: for each op on its lists, a kernel at the key `AutocastCPU` or `AutocastCUDA`
that casts the arguments, excludes the key, and calls the op again. A policy edits that table: for each op
that its plan does not leave to PyTorch, a Python kernel takes the place of PyTorch's, process-wide, at the
first region that needs it, and stays. Each kernel asks for the label in force (`mezzo.pytorch.region.identity`) and
then does what that policy's plan says; where no policy is in force, or another one that has no say over this
op, it calls the very kernel that it replaced, taken from the dispatcher beforehand. So a plain
`torch.autocast` computes what it always did.

A Python kernel costs some microseconds a call. Ops on the hot path (linear, matmul, conv) are never replaced
where the device has the format.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mezzo.core.errors import BannedOpError
from mezzo.core.policy import Policy
from mezzo.pytorch.dtypes import dtype_of, name_of
from mezzo.pytorch.region import identity
from mezzo.pytorch.region.plan import OpPlan, overload_named, own_table, plan
from mezzo.pytorch.region.torch_table import AUTOCAST_KEYS, TORCH_TABLE, has_kernel

__all__ = ["OpPlan", "plan", "registered"]

Action = Callable[..., Any]

_lock = threading.RLock()
_libraries: dict[str, torch.library.Library] = {}
_kernels: dict[tuple[str, str], _Kernel] = {}

# Ops whose output dtype can be set in the stead of their inputs': those for which PyTorch's CUDA table does
# so. (Others take the argument too, but `_safe_softmax` in fp16, for one, can't run backward then.)
_DTYPE_SETTABLE = frozenset(
    name.partition(".")[0] for name, category in TORCH_TABLE["cuda"].items() if category == "fp32_dtype"
)

_get_dtype = torch.get_autocast_dtype
_label = identity.label
_ExcludeKey = torch._C._ExcludeDispatchKeyGuard


@dataclass
class _Kernel:
    """The kernel of one overload on one kind of device: what each (label, autocast dtype) makes it do."""

    overload: str
    device_type: str
    actions: dict[tuple[int, torch.dtype], Action] = field(default_factory=dict)


def registered(device_type: str | None = None) -> tuple[str, ...]:
    """The overloads for which this process has registered kernels so far, on one kind of device or on all."""
    return tuple(sorted(op for device, op in _kernels if device_type in (None, device)))


def install(code: int, device_type: str, policy: Policy) -> None:
    """Make every kernel that the policy's plan asks for do the plan's bidding under the label `code`."""
    if policy.compute == "fp32":
        return  # the region is a disabled one: no Autocast key is ever reached
    compute = dtype_of(policy.compute)
    with _lock:
        for op_plan in plan(policy, device_type).values():
            for name in op_plan.overloads:
                action = _action(op_plan, name, device_type, compute)
                _kernel(name, device_type).actions[code, compute] = action


def _kernel(name: str, device_type: str) -> _Kernel:
    found = _kernels.get((device_type, name))
    if found is None:
        found = _kernels[device_type, name] = _Kernel(name, device_type)
        _register(found)
    return found


def _register(kernel: _Kernel) -> None:
    import warnings

    overload = overload_named(kernel.overload)
    device_type = kernel.device_type
    key_name = AUTOCAST_KEYS[device_type]
    key = torch._C.DispatchKey.__members__[key_name]
    excluded = torch._C.DispatchKeySet(key)
    below = torch._C._dispatch_keyset_full_after(key)
    own_table(device_type)  # remember PyTorch's own table before the first entry of it is replaced
    original = (
        torch.library.get_kernel(overload, key_name) if has_kernel(overload.name(), device_type) else None
    )
    actions = kernel.actions
    number_places = _number_places(overload)

    def run(keyset: torch._C.DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        code = _label()
        if code:
            action = actions.get((code, _get_dtype(device_type)))
            if action is not None:
                with _ExcludeKey(excluded):
                    return action(*args, **kwargs)
        if any(not isinstance(args[i], torch.Tensor) for i in number_places if i < len(args)):
            # Calling the op wraps a number again, redispatching does not. (An element-wise op has no parts that
            # could have met autocast's table.)
            with _ExcludeKey(excluded):
                return overload(*args, **kwargs)
        if original is not None:
            return original.call_boxed(keyset, *args, **kwargs)
        return overload.redispatch(keyset & below, *args, **kwargs)

    namespace, _, op = overload.name().partition("::")
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        # The dispatcher says once that a kernel of its own is replaced; that is the purpose.
        warnings.simplefilter("ignore", UserWarning)
        _libraries[namespace].impl(op, run, key_name, with_keyset=True)


def _number_places(overload: torch._ops.OpOverload) -> tuple[int, ...]:
    """Where a number may stand in a tensor's place: `x * 0.1` calls `mul.Tensor` with a wrapped number."""
    tensors = [i for i, argument in enumerate(overload._schema.arguments) if str(argument.type) == "Tensor"]
    return tuple(tensors) if len(tensors) > 1 and torch.Tag.pointwise in overload.tags else ()


def _action(op_plan: OpPlan, name: str, device_type: str, compute: torch.dtype) -> Action:
    overload = overload_named(name)
    if op_plan.how == "banned":
        return _banned(op_plan, overload, device_type, compute)
    if op_plan.how == "emulated":
        return _emulated(op_plan.op, overload, device_type, compute)
    if op_plan.how == "fp32":
        return _in_fp32(op_plan.op, overload, device_type)
    if op_plan.how == "fp32_sum":
        from mezzo.pytorch.kernels.embedding import reference

        action: Action = getattr(reference, op_plan.op)
        return action
    if op_plan.how == "promote":
        return _promoted(overload, device_type)
    if op_plan.rule == "lower":
        return _lowered(overload, device_type, compute)
    return overload


def _eligible(value: Any, device_type: str) -> bool:
    """Autocast's own test: a floating tensor on the device, and not FP64."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.device.type == device_type
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    """An argument with each eligible tensor in `dtype`; lists of tensors are walked, all else left alone."""
    if isinstance(value, torch.Tensor):
        if value.dtype is dtype or not _eligible(value, device_type):
            return value
        return value.to(dtype)
    if type(value) in (list, tuple):
        return [_cast(item, dtype, device_type) for item in value]
    return value


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str) -> list[torch.Tensor]:
    found = []
    for value in (*args, *kwargs.values()):
        for item in value if type(value) in (list, tuple) else (value,):
            if _eligible(item, device_type):
                found.append(item)
    return found


def _widest(tensors: Sequence[torch.Tensor]) -> torch.dtype | None:
    """The widest dtype; fp16 and bf16 together make FP32, where PyTorch's own `promote` raises."""
    widest = None
    for tensor in tensors:
        dtype = tensor.dtype
        widest = dtype if widest is None or widest is dtype else torch.promote_types(widest, dtype)
    return widest


def _lowered(overload: torch._ops.OpOverload, device_type: str, compute: torch.dtype) -> Action:
    def lowered(*args: Any, **kwargs: Any) -> Any:
        cast = [_cast(value, compute, device_type) for value in args]
        return overload(*cast, **{key: _cast(value, compute, device_type) for key, value in kwargs.items()})

    return lowered


def _in_fp32(op: str, overload: torch._ops.OpOverload, device_type: str) -> Action:
    if op not in _DTYPE_SETTABLE:
        return _lowered(overload, device_type, torch.float32)
    position = [argument.name for argument in overload._schema.arguments].index("dtype")

    def with_dtype(*args: Any, **kwargs: Any) -> Any:
        # Reductions that can be told their output's dtype convert as they read: no FP32 copy of the input is
        # made. A dtype that the caller gave is respected.
        given = kwargs.get("dtype") if len(args) <= position else args[position]
        if given is not None or not _eligible(args[0], device_type):
            return overload(*args, **kwargs)
        if len(args) > position:
            return overload(*args[:position], torch.float32, *args[position + 1 :], **kwargs)
        return overload(*args, **{**kwargs, "dtype": torch.float32})

    return with_dtype


def _promoted(overload: torch._ops.OpOverload, device_type: str) -> Action:
    def promoted(*args: Any, **kwargs: Any) -> Any:
        widest = _widest(_tensors(args, kwargs, device_type))
        if widest is None:
            return overload(*args, **kwargs)
        cast = [_cast(value, widest, device_type) for value in args]
        return overload(*cast, **{key: _cast(value, widest, device_type) for key, value in kwargs.items()})

    return promoted


def _returned(result: Any, dtype: torch.dtype) -> Any:
    if isinstance(result, torch.Tensor):
        return result.to(dtype) if result.dtype is torch.float32 else result
    if type(result) in (list, tuple):
        return type(result)(_returned(item, dtype) for item in result)
    return result


def _emulated(op: str, overload: torch._ops.OpOverload, device_type: str, compute: torch.dtype) -> Action:
    from mezzo.pytorch.kernels.emulated import EMULATED

    name = overload.name().removeprefix("aten::").removesuffix(".default")
    kernel = EMULATED.get(name) or EMULATED.get(op)
    if kernel is not None:

        def emulated(*args: Any, **kwargs: Any) -> Any:
            if not _tensors(args, kwargs, device_type):
                return overload(*args, **kwargs)
            return kernel(*args, compute=compute, **kwargs)

        return emulated

    def rounded(*args: Any, **kwargs: Any) -> Any:
        # The general form, for ops that have no kernel of their own: 16-bit values, FP32 arithmetic, 16-bit
        # result.
        if not _tensors(args, kwargs, device_type):
            return overload(*args, **kwargs)
        low = [_cast(value, compute, device_type) for value in args]
        wide = [_cast(value, torch.float32, device_type) for value in low]
        named = {
            key: _cast(_cast(value, compute, device_type), torch.float32, device_type)
            for key, value in kwargs.items()
        }
        return _returned(overload(*wide, **named), compute)

    return rounded


def _banned(
    op_plan: OpPlan, overload: torch._ops.OpOverload, device_type: str, compute: torch.dtype
) -> Action:
    in_fp32 = _lowered(overload, device_type, torch.float32)

    def banned(*args: Any, **kwargs: Any) -> Any:
        for tensor in _tensors(args, kwargs, device_type):
            if tensor.dtype is not torch.float32:
                reason = op_plan.reason.partition(";")[0]
                raise BannedOpError(
                    f"{op_plan.op} is banned with {name_of(tensor.dtype)} inputs: {reason}. {op_plan.remedy} "
                    f"To run it in FP32 all the same, add op.{op_plan.op}=fp32 to the policy."
                )
        return in_fp32(*args, **kwargs)

    return banned
