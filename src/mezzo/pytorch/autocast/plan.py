"""The plan: what a policy does for each op on a device type, as a value that can be printed, before anything runs.

It compares the policy's rules (`mezzo.core.rules`) with PyTorch's own autocast and with the device's native formats.
`dispatch.py` registers a kernel only where PyTorch does not do the same already; every other op keeps its C++ path.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from mezzo.core.compute import COMPUTE, QUANTIZED, QUANTIZED_OPS
from mezzo.core.errors import UsageError, did_you_mean
from mezzo.core.policy import Decision, Policy
from mezzo.core.rules import IN_PLACE, RULES, Kernel, OpRule, Rule
from mezzo.pytorch.hardware import leaves_autocast_off, native_formats
from mezzo.pytorch.kernels import backend

# The dispatcher's key for a device type, as `torch.library` spells it.
AUTOCAST_KEYS: Mapping[str, str] = {
    device: f"Autocast{device.upper()}" for device in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")
}

# Composite ops, and overloads, that are not on a device's own list but whose parts are, with the result that the rule
# asks for: a kernel over the whole would only add casts (cross entropy ends in log_softmax and nll_loss).
_BY_PARTS: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"nll_loss_nd"}),
    "cuda": frozenset(
        {"lstm", "gru", "rnn_tanh", "rnn_relu", "cross_entropy_loss", "nll_loss_nd"}
        | {"conv1d.padding", "conv2d.padding", "conv3d.padding"}
    ),
}

# Ops of other devices, for which a build of PyTorch without CUDA has schemas alone.
_NOT_ON_CUDA = frozenset(
    ("mkldnn_rnn_layer", "_mps_convolution", "_grid_sampler_2d_cpu_fallback", "_native_multi_head_attention")
)

# `float_power` computes in FP64 by its definition, for any input.
_ALWAYS_FP64 = frozenset({"float_power"})

# Ops of several inputs that promote by themselves although ATen does not tag them as element-wise, and the reverse.
# (embedding and rsub have one floating tensor where it matters.)
_PROMOTE_BY_THEMSELVES = frozenset({"cat", "stack", "where", "embedding", "rsub"})
_DO_NOT_PROMOTE = frozenset({"heaviside", "lerp", "lerp_"})

Overload = Any  # of an op, as `torch.ops` has it

WIDEST = "widest input"
FIRST = "first input's"


@dataclass(frozen=True)
class OpPlan:
    """What one op does under a policy on a device type. Formats are names, ``widest input`` or ``first input's``.

    `how`: ``pytorch`` (nothing is registered), ``native`` (a registered kernel casts, the device's own computes),
    ``kernel`` (Mezzo's own), ``emulated`` (stored in the format, computed in FP32), ``rounded`` (the FP32 kernel
    between casts: 16 bits in and out), ``fp32``, ``promote``, ``banned``, ``absent`` (no such op on the device).
    """

    op: str
    rule: str
    formats_in: str  # of the floating inputs when the kernel runs
    format_out: str
    how: str
    reason: str  # the rule's, then the implementation's
    overloads: tuple[str, ...] = ()  # for which a kernel is registered
    remedy: str = ""  # for a banned op, what to use instead
    kernel: Kernel | None = None

    def output(self, inputs: Sequence[str]) -> str:
        """The planned output format for floating inputs in these formats, in order; FP64 is left alone."""
        if not inputs or "fp64" in inputs:
            return "fp64" if inputs else ""
        if self.format_out == FIRST:
            return inputs[0]
        if self.format_out == WIDEST:
            return inputs[0] if len(set(inputs)) == 1 else "fp32"
        return self.format_out

    def __str__(self) -> str:
        formats = f"{self.formats_in} -> {self.format_out}"
        return f"{self.op:<36} {self.rule:<14} {formats:<32} {self.how:<9} {self.reason}"


def plan(policy: Policy, device_type: str = "cpu") -> Mapping[str, OpPlan]:
    """The plan of every op that the table or the policy names, keyed by op; the policy's compute format is resolved."""
    if policy.compute == "auto":
        raise UsageError(
            f"plan: policy '{policy}' has no plan while compute is auto. Use policy.resolved('bf16')."
        )
    if device_type not in AUTOCAST_KEYS:
        raise UsageError(
            f"plan: unknown device type {device_type!r}. Use one of {', '.join(sorted(AUTOCAST_KEYS))}."
        )
    return _plan(policy, device_type, native_formats(device_type))


@functools.lru_cache(maxsize=64)
def _plan(policy: Policy, device_type: str, native: frozenset[str]) -> Mapping[str, OpPlan]:
    plans = {}
    for op in [*RULES, *(name for name, _ in policy.ops if name not in RULES)]:
        decision = policy.rule_for(op)
        if decision is not None:
            plans[op] = _plan_op(op, decision, policy, device_type, policy.activations in native)
    if policy.is_by_parts:  # the action notes the weight
        names = overloads_of("embedding", device_type)
        plans["embedding"] = replace(plans["embedding"], overloads=names)
    for op in policy.recomputed:
        if plans[op].format_out in (FIRST, policy.activations):
            reason = f"{plans[op].reason}; backward makes the output again"
            plans[op] = replace(plans[op], overloads=overloads_of(op, device_type), reason=reason)
    return MappingProxyType(plans)


_WHY_SCALED = "factors of {} with scales; products are exact in FP32 and summed there"
_QUANTIZED = Kernel("quantized", _WHY_SCALED, "quantized_linear:quantized_linear")
_WHY_TF32 = "its factors are rounded to TF32's 10 bits of mantissa; the products are summed in FP32"
_TF32 = Kernel("tf32", _WHY_TF32, "tf32:product")


def _plan_op(op: str, decision: Decision, policy: Policy, device_type: str, native: bool) -> OpPlan:
    rule, compute, row = decision.rule, policy.activations, RULES.get(op)

    def planned(
        how: str, formats: tuple[str, str], why: str, names: Sequence[str] = (), kernel: Kernel | None = None
    ) -> OpPlan:
        reason = f"{decision.reason}; {why}" if why else decision.reason
        return OpPlan(op, rule.value, *formats, how, reason, tuple(names), decision.remedy, kernel)

    def by_kernel(kernel: Kernel, formats: tuple[str, str], why: str = "") -> OpPlan:
        if kernel.kind == "number":
            return planned("kernel", formats, "", [n for n in names if n.endswith(".Scalar")], kernel)
        return planned("kernel", formats, why + kernel.why, names, kernel)

    def unlike_torch(
        how: str, formats: tuple[str, str], wanted: Rule | None, why: str = "", same: str = ""
    ) -> OpPlan:
        """``pytorch`` where its own autocast treats every overload as wanted, or its parts do; else `how`."""
        if decision.source == "table" and op in by_parts:
            rest = []
        elif wanted is Rule.PROMOTE:
            rest = [n for n in names if n in theirs or not _promotes_by_itself(op, n)]
        else:
            rest = [n for n in names if theirs.get(n) is not wanted]
        rest = [n for n in rest if n not in by_parts]
        return planned(how, formats, why, rest) if rest else planned("pytorch", formats, same or why)

    names = () if device_type == "cuda" and op in _NOT_ON_CUDA else overloads_of(op, device_type)
    theirs, by_parts = own_table(device_type), _BY_PARTS.get(device_type, frozenset())
    if not names:
        return planned("absent", ("", ""), "this build of PyTorch has no such op on this device")
    if policy.compute == "fp32":
        return planned("pytorch", ("fp32", "fp32"), "the policy computes in FP32: autocast is off")
    if leaves_autocast_off(policy, device_type):
        why = "the device's own TF32: autocast is off, PyTorch's switch is on"
        return planned("pytorch", ("fp32", "fp32"), why)
    if policy.compute == "tf32":
        if rule is Rule.LOWER:
            return OpPlan(op, rule.value, "fp32", "fp32", "kernel", _TF32.why, names, kernel=_TF32)
        why = "FP32: only the factors of products are shorter"
        out = "fp64" if op in _ALWAYS_FP64 else FIRST
        return OpPlan(op, rule.value, FIRST, out, "pytorch", why, remedy=decision.remedy)

    if op in IN_PLACE and rule is not Rule.BANNED:
        rule = Rule.PROMOTE  # no rule may cast the tensor that is written
    kernel = _kernel_on(row, device_type, policy)
    kind = kernel.kind if kernel else ""
    evidence = row.evidence(device_type) if row else ""
    if rule is Rule.BANNED:
        return planned("banned", ("fp32", "fp32"), "FP32 inputs pass", names)
    if rule is Rule.PROMOTE:
        formats = (FIRST, FIRST) if op in IN_PLACE or kind == "number" else (WIDEST, WIDEST)
        if kernel and kind in ("gradient", "indices", "number"):
            return by_kernel(kernel, formats)
        return unlike_torch(
            "promote", formats, Rule.PROMOTE, same="PyTorch does so itself, without a cast of Mezzo's"
        )
    if rule is Rule.LOWER:
        if policy.compute in QUANTIZED and op in QUANTIZED_OPS:
            named = COMPUTE[policy.compute]
            why = _QUANTIZED.why.format(" and ".join(dict.fromkeys((named.forward, named.backward))))
            return OpPlan(op, rule.value, FIRST, compute, "kernel", why, names, kernel=_QUANTIZED)
        if kernel and kind in ("layer", "cell"):
            return by_kernel(kernel, (FIRST, "fp32" if kind == "cell" else f"{compute}+fp32"))
        if kernel and kind == "inside":
            return by_kernel(kernel, (FIRST, compute), f"its first input goes to {compute}; ")
        if not native:
            why = "computed in FP32 between casts on this device"
            return planned("emulated", (compute, compute), why, names)
        why, same = "not on PyTorch's list for this device", "same rule as in torch.autocast"
        return unlike_torch("native", (compute, compute), Rule.LOWER, why, same)
    if kernel and kind == "result":
        return by_kernel(kernel, (FIRST, "fp32"))
    gives_fp32 = op in _ALWAYS_FP64 or (row and row.kernel and row.kernel.kind == "result")
    if rule is Rule.INTERNAL_FP32 and not gives_fp32:
        if kernel and kind == "inside":
            return by_kernel(kernel, (FIRST, FIRST))
        if evidence:
            return unlike_torch("native", (FIRST, FIRST), None, evidence)
        why = "no evidence that the 16-bit kernel here accumulates in FP32, so FP32's between casts"
        return planned("rounded", (FIRST, FIRST), why, names)
    out = "fp64" if op in _ALWAYS_FP64 else "fp32"
    return unlike_torch("fp32", ("fp32", out), Rule.FP32)


def _kernel_on(row: OpRule | None, device_type: str, policy: Policy) -> Kernel | None:
    """The kernel of a row where it runs on this device type and the policy uses it."""
    kernel = row.kernel_on(device_type) if row else None
    if kernel is None or (kernel.kind in ("layer", "cell") and policy.hidden != "fp32"):
        return None
    if kernel.kind in ("inside", "result") and not backend.serves_custom_kernels(device_type):
        return None
    return kernel


def _promotes_by_itself(op: str, name: str) -> bool:
    if op in _PROMOTE_BY_THEMSELVES or op in _DO_NOT_PROMOTE:
        return op in _PROMOTE_BY_THEMSELVES
    overload = overload_named(name)
    return takes_one_tensor(overload) or torch.Tag.pointwise in overload.tags


def takes_one_tensor(overload: Overload) -> bool:
    """Whether the first argument is a tensor and none of the others is, or could be."""
    types = [str(argument.type) for argument in overload._schema.arguments]
    return types[0] == "Tensor" and sum("Tensor" in kind for kind in types) == 1


def has_own_rule(op: str, device_type: str) -> bool:
    """Whether an op of another library has an autocast kernel there, as `torch.library.register_autocast` makes it."""
    namespace, _, name = op.rpartition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None) if namespace not in ("", "aten") else None
    return packet is not None and any(
        getattr(packet, each).has_kernel_for_dispatch_key(AUTOCAST_KEYS[device_type])
        for each in packet.overloads()
    )


@functools.cache
def own_table(device_type: str) -> Mapping[str, Rule]:
    """What PyTorch's own autocast does with each overload that it has a kernel for, before any registration."""

    def theirs(op: str) -> Rule:
        if op == "grid_sampler" and device_type != "cpu":
            return Rule.PROMOTE
        rule = RULES[op].rule
        return Rule.FP32 if rule is Rule.INTERNAL_FP32 else rule

    names = ((name, op) for op in RULES for name in overloads_of(op, device_type))
    key = AUTOCAST_KEYS[device_type]
    on_list = (pair for pair in names if overload_named(pair[0]).has_kernel_for_dispatch_key(key))
    return MappingProxyType({name: theirs(op) for name, op in on_list})


@functools.cache
def overloads_of(op: str, device_type: str) -> tuple[str, ...]:
    """The overloads that a rule can serve: functional ones (no `out=`; in place only `IN_PLACE`) that take tensors."""
    namespace, _, name = op.rpartition("::")
    packet = getattr(getattr(torch.ops, namespace or "aten"), name, None)
    if packet is None:
        if namespace:
            fix = did_you_mean(name, RULES) if namespace == "aten" else ""
            raise UsageError(
                f"policy: op {op!r} is not registered with PyTorch.{fix} Import the library that defines it before "
                "the context is entered, or correct the name."
            )
        return ()
    return tuple(_served_overloads(packet, device_type, name in IN_PLACE))


def _served_overloads(packet: Any, device_type: str, in_place: bool) -> Iterator[str]:
    # A required dtype (`norm.ScalarOpt_dtype`) is what the overload returns; `vec` only computes sizes and calls the
    # op's own; quantized ones take scaled integers or FP8.
    for overload in (getattr(packet, name) for name in packet.overloads()):
        schema = overload._schema
        types = [str(argument.type) for argument in schema.arguments]
        returns = [str(value.type) for value in schema.returns]
        dtypes = [a for a in schema.arguments if a.name in ("dtype", "out_dtype")]
        if (
            schema.is_mutable is not in_place
            or any("Optional" not in str(argument.type) for argument in dtypes)
            or schema.overload_name in ("vec", "quantized")
            or not any("Tensor" in kind for kind in types)
            or not any("Tensor" in kind for kind in returns)
            or any("Dimname" in kind for kind in types)
            or not _implemented(overload, device_type)
        ):
            continue
        yield overload.name().removeprefix("aten::").removesuffix(".default")


# What an op must have one of to run on a CPU.
_CPU_KEYS = (
    *("CPU", "SparseCPU", "SparseCsrCPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd"),
    "CompositeExplicitAutogradNonFunctional",
)


def _implemented(overload: Overload, device_type: str) -> bool:
    """Whether an op can run on a device type; True for all ops where this build lacks the device."""
    try:
        return any(map(overload.has_kernel_for_dispatch_key, _CPU_KEYS)) or device_type != "cpu"
    except RuntimeError:  # an op of TorchScript's only
        return False


def overload_named(name: str) -> Overload:
    """The overload by the name that `overloads_of` gives it: ``softmax.int``, ``exp``, ``mylib::fused``."""
    namespace, _, rest = name.rpartition("::")
    op, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace or "aten"), op), overload or "default")
