"""A policy's plan as Python kernels at the dispatcher's Autocast keys, where PyTorch's own autocast has its kernels.

They are registered process-wide from the first context that needs them. Each reads the label of the active policy and
runs that policy's action; without one it calls the kernel that it replaced. It costs some microseconds per call, so
products on the hot path are never replaced where the device has the format.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from mezzo.core.policy import Policy
from mezzo.pytorch.autocast import active_policy, recompute
from mezzo.pytorch.autocast.actions import Action, action, for_other_layouts, gives_fp32, noting_table
from mezzo.pytorch.autocast.fallback import OTHER_LAYOUTS, Kernels
from mezzo.pytorch.autocast.plan import AUTOCAST_KEYS, overload_named, own_table, plan
from mezzo.pytorch.dtypes import SIXTEEN_BITS, dtype_of
from mezzo.pytorch.hardware import leaves_autocast_off
from mezzo.pytorch.kernels.not_traced import not_traced

_lock = threading.RLock()
_registrations = Kernels()

_get_dtype = torch.get_autocast_dtype
_label = active_policy.label
_set_autocast = torch.set_autocast_enabled  # of a dispatch key: its bit in this thread's excluded set
_is_compiling, _is_overridden = torch.compiler.is_compiling, torch.overrides.has_torch_function_unary
_strided, _FP32, _TO_FP32 = torch.strided, torch.float32, (*SIXTEEN_BITS, torch.float32)


# Of one overload: by label, autocast's dtype, the actions for dense tensors and for those of another layout, and
# whether the first only gives the op an output dtype of FP32.
_Actions = dict[int, tuple[torch.dtype, Action, Action, bool]]
_actions: dict[tuple[str, str], _Actions] = {}  # by overload and device type
_NO_ACTIONS: _Actions = {}
# The key of `torch.func`'s transforms, where PyTorch takes `linear` apart before autocast's kernel would be reached.
_FRONT = "FuncTorchDynamicLayerFrontMode"


def install(code: int, device_type: str, policy: Policy) -> None:
    """Register every kernel of the policy's plan, with its actions under the label `code`."""
    if leaves_autocast_off(policy, device_type):
        return  # no Autocast key is ever reached
    compute = dtype_of(policy.activations)
    with _lock:
        for op_plan in plan(policy, device_type).values():
            for name in op_plan.overloads:
                found = action(op_plan, name, device_type, policy)
                if op_plan.op == "embedding" and policy.is_by_parts:
                    found = noting_table(found, policy)
                if op_plan.op in policy.recomputed:
                    found = recompute.remembering(found)
                other = for_other_layouts(op_plan, name, device_type) or found
                is_quantized = op_plan.kernel is not None and op_plan.kernel.kind == "quantized"
                for key, slot in ((AUTOCAST_KEYS[device_type], name), (_FRONT, _FRONT))[: 1 + is_quantized]:
                    if (slot, device_type) not in _actions:
                        _actions[slot, device_type] = {}
                        _register(name, device_type, key, slot)
                    _actions[slot, device_type][code] = compute, found, other, gives_fp32(found)


def _is_for(device_type: str, input: torch.Tensor) -> bool:
    """Whether autocast's kernel would serve a call inside `torch.func`, whose forward mode needs the parts."""
    is_forward = any(level.key().name == "Jvp" for level in torch._C._functorch.get_interpreter_stack() or ())
    return not is_forward and input.device.type == device_type and torch.is_autocast_enabled(device_type)


def _register(name: str, device_type: str, key_name: str, slot: str) -> None:
    overload = overload_named(name)
    key = torch._C._dispatch_key_parse(key_name)
    below = torch._C._dispatch_keyset_full_after(key)  # without the Python dispatcher's, which is above
    own_table(device_type)  # read PyTorch's own table before its first entry is replaced
    original = (
        torch.library.get_kernel(overload, key_name)
        if overload.has_kernel_for_dispatch_key(key_name)
        else None
    )
    # Tensor arguments that may be numbers: `x * 0.1` calls `mul.Tensor` with a wrapped number.
    tensors = [i for i, argument in enumerate(overload._schema.arguments) if str(argument.type) == "Tensor"]
    number_places = tensors if len(tensors) > 1 and torch.Tag.pointwise in overload.tags else ()
    find, is_front = _actions[slot, device_type].get, slot == _FRONT

    @not_traced  # else Dynamo compiles it, once a compiled function has broken its graph
    def run(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        found = None if is_front and not _is_for(device_type, args[0]) else find(_label())
        if found is not None and _get_dtype(device_type) is found[0]:
            call = found[2] if keyset.raw_repr() & OTHER_LAYOUTS else found[1]
        elif any(place < len(args) and not isinstance(args[place], torch.Tensor) for place in number_places):
            # Calling the op wraps a number again, redispatching does not. (An element-wise op has no parts that could
            # have met autocast's table.)
            call = overload
        elif original is not None:
            return original.call_boxed(keyset, *args, **kwargs)
        else:
            return overload.redispatch(keyset & below, *args, **kwargs)
        _set_autocast(device_type, False)
        try:
            return call(*args, **kwargs)
        finally:
            _set_autocast(device_type, True)

    _registrations.register(name, run, key_name)


def direct(original: Callable[..., Any], name: str, op: Callable[..., Any]) -> Callable[..., Any]:
    """`softmax` or `log_softmax` of `torch.nn.functional`; with an FP32 result by the policy it avoids our kernel.

    The dispatcher takes several microseconds to enter Python, more than these functions themselves on few numbers.
    """

    @functools.wraps(original)
    def function(
        input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Any:
        if dim is not None and dtype is None and not _is_compiling() and not _is_overridden(input):
            device_type = "cpu" if input.is_cpu else input.device.type
            found = _actions.get((name, device_type), _NO_ACTIONS).get(_label())
            is_action = found is not None and found[3] and _get_dtype(device_type) is found[0]
            if is_action and input.layout is _strided and input.dtype in _TO_FP32:
                _set_autocast(device_type, False)
                try:
                    return op(input, dim, dtype=_FP32)
                finally:
                    _set_autocast(device_type, True)
        return original(input, dim, _stacklevel + 1, dtype)

    function.__prepare_scriptable__ = lambda: original  # type: ignore[attr-defined]  # for torch.jit.script
    return function
