"""A policy's plan as kernels at the dispatcher's Autocast keys.

PyTorch's autocast is a table: for each op on its lists, a kernel at the key `AutocastCPU` or `AutocastCUDA`
that casts the arguments, excludes the key, and calls the op again. A policy edits that table: for each op
that its plan does not leave to PyTorch, a Python kernel takes the place of PyTorch's, process-wide, at the
first context that needs it, and stays. Each kernel reads the label of the active policy (`active_policy.py`) and
then does what that policy's plan says; where no policy is in force, or another one that has no say over this
op, it calls the very kernel that it replaced, taken from the dispatcher beforehand. So a plain
`torch.autocast` computes what it always did.

A Python kernel costs some microseconds a call. Ops on the hot path (linear, matmul, conv) are never replaced
where the device has the format.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from mezzo.core.policy import Policy
from mezzo.pytorch.autocast import active_policy, recompute
from mezzo.pytorch.autocast.actions import Action, action, for_other_layouts
from mezzo.pytorch.autocast.fallback import OTHER_LAYOUTS, quietly
from mezzo.pytorch.autocast.plan import (
    AUTOCAST_KEYS,
    OpPlan,
    comes_as_it_is,
    has_kernel,
    overload_named,
    own_table,
    plan,
)
from mezzo.pytorch.dtypes import dtype_of
from mezzo.pytorch.hardware import leaves_autocast_off
from mezzo.pytorch.kernels.unseen import unseen

__all__ = ["OpPlan", "end_rule", "passed_through", "plan", "registered", "rule_alone"]

_lock = threading.RLock()
_libraries: dict[str, torch.library.Library] = {}
_kernels: dict[tuple[str, str], _Kernel] = {}

# Kind of device -> the policy that rules it alone, and the registrations that stand while it does.
_alone: dict[str, tuple[Policy, dict[str, torch.library.Library], tuple[str, ...]]] = {}
_policies: dict[str, set[Policy]] = {}

_get_dtype = torch.get_autocast_dtype
_label = active_policy.label
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded


@dataclass
class _Kernel:
    """The kernel of one overload on one kind of device: under each label autocast's dtype there, what it does with
    dense tensors, and what it does with those of another layout."""

    overload: str
    device_type: str
    actions: dict[int, tuple[torch.dtype, Action, Action]] = field(default_factory=dict)


def registered(device_type: str | None = None) -> tuple[str, ...]:
    """The overloads for which this process has registered kernels so far, on one kind of device or on all."""
    return tuple(sorted(op for device, op in _kernels if device_type in (None, device)))


def install(code: int, device_type: str, policy: Policy) -> None:
    """Make every kernel that the policy's plan asks for do the plan's bidding under the label `code`."""
    if leaves_autocast_off(policy, device_type):
        return  # the region is a disabled one: no Autocast key is ever reached
    compute = dtype_of(policy.activations)
    with _lock:
        _policies.setdefault(device_type, set()).add(policy)
        if device_type in _alone and _alone[device_type][0] != policy:
            end_rule(device_type)
        for op_plan in plan(policy, device_type).values():
            for name in op_plan.overloads:
                found = action(op_plan, name, device_type, policy)
                if op_plan.op in policy.recomputed:
                    found = recompute.remembering(found)
                other = for_other_layouts(op_plan, name, device_type) or found
                _kernel(name, device_type).actions[code] = compute, found, other


def rule_alone(policy: Policy, device_type: str) -> tuple[str, ...]:
    """Let the ops that the policy runs as they come pass by the Autocast key at no cost: `fallthrough` kernels.

    For a process that one policy rules, as `mezzo run` starts it. Their Python kernels stay underneath, and come back
    for good when another policy is installed on this kind of device; if one already is, nothing happens. Meanwhile a
    plain `torch.autocast` region runs these ops as they come, too (`cat`, padding, max-pooling), which is the one
    difference.

    Args:
        policy: with ``auto`` resolved.
        device_type: the kind of device, as for `plan`.

    Returns:
        The overloads that pass through; () where nothing can.
    """
    with _lock:
        if leaves_autocast_off(policy, device_type) or _policies.get(device_type, set()) - {policy}:
            return ()
        if device_type not in _alone:
            names = tuple(
                name
                for op_plan in plan(policy, device_type).values()
                if op_plan.op not in policy.recomputed
                for name in op_plan.overloads
                if comes_as_it_is(op_plan, name)
            )
            libraries: dict[str, torch.library.Library] = {}
            for name in names:
                _kernel(name, device_type)
                namespace, _, op = overload_named(name).name().partition("::")
                if namespace not in libraries:
                    libraries[namespace] = torch.library.Library(namespace, "IMPL")
                with quietly():
                    libraries[namespace].impl(
                        op, torch.library.fallthrough_kernel, AUTOCAST_KEYS[device_type]
                    )
            _alone[device_type] = policy, libraries, names
        return _alone[device_type][2]


def passed_through(device_type: str) -> tuple[str, ...]:
    """The overloads that pass by the Autocast key at present, because one policy rules alone."""
    return _alone[device_type][2] if device_type in _alone else ()


def end_rule(device_type: str) -> None:
    """End what `rule_alone` began: the kernels beneath are in force again, also under a plain `torch.autocast`."""
    with _lock:
        _, libraries, _ = _alone.pop(device_type, (None, {}, ()))
        for library in libraries.values():
            library._destroy()


def _kernel(name: str, device_type: str) -> _Kernel:
    found = _kernels.get((device_type, name))
    if found is None:
        found = _kernels[device_type, name] = _Kernel(name, device_type)
        _register(found)
    return found


def _register(kernel: _Kernel) -> None:
    overload = overload_named(kernel.overload)
    device_type = kernel.device_type
    key_name = AUTOCAST_KEYS[device_type]
    key = torch._C.DispatchKey.__members__[key_name]
    below = torch._C._dispatch_keyset_full_after(key)
    own_table(device_type)  # remember PyTorch's own table before the first entry of it is replaced
    original = (
        torch.library.get_kernel(overload, key_name) if has_kernel(overload.name(), device_type) else None
    )
    number_places = _number_places(overload)

    find = kernel.actions.get

    @unseen  # else Dynamo compiles it, once a compiled function has broken its graph
    def run(keyset: torch._C.DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        found = find(_label())
        if found is not None and _get_dtype(device_type) is found[0]:
            _exclude(key, True)  # as a guard object does, for a quarter of its cost
            try:
                if keyset.raw_repr() & OTHER_LAYOUTS:
                    return found[2](*args, **kwargs)
                return found[1](*args, **kwargs)
            finally:
                _exclude(key, False)
        for place in number_places:
            if place < len(args) and not isinstance(args[place], torch.Tensor):
                # Calling the op wraps a number again, redispatching does not. (An element-wise op has no parts that
                # could have met autocast's table.)
                with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                    return overload(*args, **kwargs)
        if original is not None:
            return original.call_boxed(keyset, *args, **kwargs)
        return overload.redispatch(keyset & below, *args, **kwargs)

    namespace, _, op = overload.name().partition("::")
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    with quietly():
        _libraries[namespace].impl(op, run, key_name, with_keyset=True)


def _number_places(overload: torch._ops.OpOverload) -> tuple[int, ...]:
    """Where a number may stand in a tensor's place: `x * 0.1` calls `mul.Tensor` with a wrapped number."""
    tensors = [i for i, argument in enumerate(overload._schema.arguments) if str(argument.type) == "Tensor"]
    return tuple(tensors) if len(tensors) > 1 and torch.Tag.pointwise in overload.tags else ()
