"""The dispatch plan: for each op, what this policy does on this kind of device, decided before anything runs.

`plan(policy, device_type)` is a value that can be printed. It sets three things side by side, op by op: the
policy's rule, PyTorch's own autocast table, and what the device has natively. Only where the first differs
from what the second already does is a kernel registered (`mezzo.pytorch.region.dispatch`); everything else keeps
PyTorch's C++ path.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from mezzo.core.compute import FP8_OPS
from mezzo.core.errors import UsageError
from mezzo.core.policy import Decision, Policy
from mezzo.core.rules import (
    IN_PLACE,
    KEEPS_INDICES,
    OWN_GIVES_FP32,
    RECURRENT,
    RECURRENT_CELLS,
    RULES,
    SUMS_IN_SIXTEEN_BITS,
    WRITES_NUMBER,
    Rule,
    native_evidence,
    own_kernel,
)
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.machine import native_formats
from mezzo.pytorch.region.torch_table import AUTOCAST_KEYS, TORCH_TABLE, has_kernel
from mezzo.pytorch.tf32 import leaves_autocast_off

# Composite ops, and overloads, that are not on a device's own list but whose parts are, with the outcome that
# the rule asks for: a kernel over the whole would only add casts (cross entropy ends in log_softmax and
# nll_loss).
_BY_PARTS: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"nll_loss_nd"}),
    "cuda": frozenset(
        {"lstm", "gru", "rnn_tanh", "rnn_relu", "cross_entropy_loss", "nll_loss_nd"}
        | {"conv1d.padding", "conv2d.padding", "conv3d.padding"}
    ),
}

# Ops that belong to another device, whatever this build of PyTorch has kernels for.
_FOREIGN: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"_cudnn_rnn", "_mps_convolution"}),
    "cuda": frozenset(
        {
            "mkldnn_rnn_layer",
            "_mps_convolution",
            "_grid_sampler_2d_cpu_fallback",
            "_native_multi_head_attention",
        }
    ),
}

# `float_power` computes in FP64 by its definition, whatever comes in.
_ALWAYS_FP64 = frozenset({"float_power"})

# Ops of several inputs that promote by themselves although ATen does not tag them as element-wise, and the
# other way round. (embedding and rsub have one floating tensor where it matters.)
_PROMOTE_BY_THEMSELVES = frozenset({"cat", "stack", "where", "embedding", "rsub"})
_DO_NOT_PROMOTE = frozenset({"heaviside", "heaviside_", "lerp", "lerp_"})

WIDEST = "widest input"
FIRST = "first input's"


@dataclass(frozen=True)
class OpPlan:
    """What one op does under a policy on a kind of device.

    Args:
        op: the op's name as in `mezzo.core.rules`.
        rule: the policy's rule.
        formats_in: format of the floating inputs when the kernel runs: a format's name, ``widest input``, or
            ``first input's`` (as they come).
        format_out: format of the floating outputs, in the same words.
        how: ``pytorch`` (its own table or kernel does this already; nothing is registered), ``native`` (a
            registered kernel casts, the device's own computes), ``own`` (Mezzo's kernel computes in FP32 what it
            reads in 16 bits), ``recurrent`` (a recurrent op's FP32 kernel on 16-bit
            values, with an FP32 state), ``fp8`` and ``tf32`` (factors as
            `mezzo.core.compute` has them), ``rounded`` (the FP32 kernel between casts: 16 bits in and out),
            ``emulated`` (stored in the format, computed in FP32), ``fp32``, ``promote``, ``fp32_sum`` (as it is, but
            backward sums in FP32), ``short_indices`` (as it is, but backward keeps shorter indices), ``number``
            (as it is; FP32 for a number beyond the format), ``banned``, ``absent`` (this build has no such op on the
            device).
        reason: the rule's reason, then why it is done so here.
        overloads: the ATen overloads for which a kernel is registered; () for ``pytorch``.
        remedy: for a banned op, what to use in its place.
    """

    op: str
    rule: str
    formats_in: str
    format_out: str
    how: str
    reason: str
    overloads: tuple[str, ...] = ()
    remedy: str = ""

    def output(self, inputs: Sequence[str]) -> str:
        """The planned output format when the floating inputs arrive in these formats (names, in order).

        Empty where nothing floating came in; FP64 among the inputs is left alone, and stays.
        """
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
    """The plan of every op that the table or the policy names, keyed by op.

    Raises:
        UsageError: the policy's compute format is still ``auto``, autocast does not know the device type, or the
            policy gives a rule to another library's op that is not loaded.
    """
    if policy.compute == "auto":
        raise UsageError("plan: compute=auto has no plan. Resolve it first: policy.resolved('bf16').")
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
    for op in policy.recomputed:
        if plans[op].format_out in (FIRST, policy.activations):
            plans[op] = replace(
                plans[op],
                overloads=overloads_of(op, device_type),
                reason=f"{plans[op].reason}; backward makes the output again",
            )
    return MappingProxyType(plans)


def _plan_op(op: str, decision: Decision, policy: Policy, device_type: str, native: bool) -> OpPlan:
    rule, compute = decision.rule, policy.activations

    def planned(inside: str, out: str, how: str, why: str, overloads: tuple[str, ...] = ()) -> OpPlan:
        reason = f"{decision.reason}; {why}" if why else decision.reason
        return OpPlan(op, rule.value, inside, out, how, reason, overloads, decision.remedy)

    foreign = _FOREIGN.get(device_type, frozenset())
    names = () if op in foreign else overloads_of(op, device_type)
    if not names:
        return planned("", "", "absent", "this build of PyTorch has no such op on this device")
    theirs = own_table(device_type)
    by_parts = _BY_PARTS.get(device_type, frozenset())
    categories = {name: theirs.get(name, "") for name in names}
    if policy.compute == "fp32":
        return planned("fp32", "fp32", "pytorch", "the policy computes in FP32: autocast is off")
    if leaves_autocast_off(policy, device_type):
        return planned(
            "fp32", "fp32", "pytorch", "the device's own TF32: autocast is off, PyTorch's switch is on"
        )
    if policy.compute == "tf32":
        if rule is Rule.LOWER:
            why = "its factors are rounded to TF32's 10 bits of mantissa; the products are summed in FP32"
            return OpPlan(op, rule.value, "fp32", "fp32", "tf32", why, names)
        why = "FP32: only the factors of products are shorter"
        out = "fp64" if op in _ALWAYS_FP64 else FIRST
        return OpPlan(op, rule.value, FIRST, out, "pytorch", why, remedy=decision.remedy)

    def others(*wanted: str) -> tuple[str, ...]:
        """The overloads that PyTorch's own table does not already treat in the wanted way."""
        if decision.source == "table" and op in by_parts:
            return ()
        return tuple(name for name in names if categories[name] not in wanted and name not in by_parts)

    ours = own_kernel(device_type, compute, op) if backend.serves_custom_kernels(device_type) else ""
    if op in IN_PLACE and rule is not Rule.BANNED:
        rule = Rule.PROMOTE  # no rule may cast the tensor that is written
    if rule is Rule.LOWER:
        if policy.compute == "fp8" and op in FP8_OPS:
            why = "factors of 8 bits with a scale (e4m3fn, gradients e5m2); products are exact in FP32 and summed there"
            return OpPlan(op, rule.value, FIRST, compute, "fp8", why, names)
        if op in RECURRENT and policy.hidden == "fp32":
            out = "fp32" if op in RECURRENT_CELLS else f"{compute}+fp32"
            return planned(FIRST, out, "recurrent", "hidden and cell state stay FP32 between steps", names)
        if ours and op not in OWN_GIVES_FP32:
            return planned(FIRST, compute, "own", f"its first input goes to {compute}; {ours}", names)
        if not native:
            return planned(
                compute, compute, "emulated", "computed in FP32 between casts on this device", names
            )
        rest = others("lower")
        if rest:
            return planned(compute, compute, "native", "not on PyTorch's list for this device", rest)
        return planned(compute, compute, "pytorch", "as PyTorch's own table has it")

    if rule is Rule.INTERNAL_FP32 and op not in OWN_GIVES_FP32:
        evidence = native_evidence(device_type, compute, op)
        if ours:
            return planned(FIRST, FIRST, "own", ours, names)
        if evidence:
            rest = others("")
            return planned(FIRST, FIRST, "native" if rest else "pytorch", evidence, rest)
        if op not in _ALWAYS_FP64:
            why = "no evidence that the 16-bit kernel here accumulates in FP32, so FP32's between casts"
            return planned(FIRST, FIRST, "rounded", why, names)

    if rule in (Rule.FP32, Rule.INTERNAL_FP32):
        if ours and op in OWN_GIVES_FP32:
            return planned(FIRST, "fp32", "own", ours, names)
        rest = others("fp32", "fp32_dtype")
        out = "fp64" if op in _ALWAYS_FP64 else "fp32"
        return planned("fp32", out, "fp32" if rest else "pytorch", "", rest)

    if rule is Rule.PROMOTE and (device_type, op) in SUMS_IN_SIXTEEN_BITS:
        why = "the gradient of a 16-bit weight is summed in FP32"
        return planned(WIDEST, WIDEST, "fp32_sum", why, names)

    if rule is Rule.PROMOTE and op in KEEPS_INDICES:
        why = "backward keeps its indices in 16 or 32 bits, not 64"
        return planned(WIDEST, WIDEST, "short_indices", why, names)

    if rule is Rule.PROMOTE and op in WRITES_NUMBER:
        return planned(FIRST, FIRST, "number", "", tuple(name for name in names if name.endswith(".Scalar")))

    if rule is Rule.PROMOTE:
        widest = FIRST if op in IN_PLACE else WIDEST
        rest = tuple(name for name in others() if categories[name] or not _promotes_by_itself(op, name))
        return planned(
            widest, widest, "promote" if rest else "pytorch", "" if rest else "it does so by itself", rest
        )

    return planned("fp32", "fp32", "banned", "FP32 inputs pass", names)


def comes_as_it_is(op_plan: OpPlan, name: str) -> bool:
    """Whether a planned kernel leaves a call as the caller made it, so that none is needed where no other rules."""
    if op_plan.how == "native":
        return op_plan.rule == Rule.INTERNAL_FP32.value
    return op_plan.how == "promote" and _promotes_by_itself(op_plan.op, name)


def _promotes_by_itself(op: str, name: str) -> bool:
    if op in _PROMOTE_BY_THEMSELVES or op in _DO_NOT_PROMOTE:
        return op in _PROMOTE_BY_THEMSELVES
    overload = overload_named(name)
    tensors = [argument for argument in overload._schema.arguments if "Tensor" in str(argument.type)]
    alone = len(tensors) == 1 and "[]" not in str(tensors[0].type) and "List" not in str(tensors[0].type)
    return alone or torch.Tag.pointwise in overload.tags


@functools.cache
def own_table(device_type: str) -> Mapping[str, str]:
    """PyTorch's own autocast table on a kind of device, as before any registration: overload -> category.

    XPU has CUDA's lists. Where the lists and the dispatcher disagree, the dispatcher is right: an op for
    which it has no kernel is not on the list, and a kernel that the lists do not name has the category
    ``unknown``.
    """
    lists = TORCH_TABLE.get(device_type, TORCH_TABLE["cuda"])
    table = {}
    for op in RULES:
        for name in overloads_of(op, device_type):
            if has_kernel(name, device_type):
                table[name] = lists.get(name, "unknown")
    return MappingProxyType(table)


@functools.cache
def overloads_of(op: str, device_type: str) -> tuple[str, ...]:
    """The overloads that a rule can serve: functional ones (no `out=`; in place only `IN_PLACE`) that take tensors.

    Overloads with a dtype that the caller must give (`norm.ScalarOpt_dtype`) already say what they return;
    those called `vec` only reckon sizes and call the op's own; quantised ones take scaled integers or FP8.

    Raises:
        UsageError: an op of another library that is not loaded.
    """
    namespace, _, name = op.rpartition("::")
    packet = getattr(getattr(torch.ops, namespace or "aten"), name, None)
    if packet is None:
        if namespace:
            raise UsageError(
                f"policy: op {op!r} is not registered with PyTorch. Import the library that defines it before "
                "the region is entered."
            )
        return ()
    return tuple(_served_overloads(packet, device_type, name in IN_PLACE))


def _served_overloads(packet: torch._ops.OpOverloadPacket, device_type: str, in_place: bool) -> Iterator[str]:
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
            or not _implemented(overload.name(), device_type)
        ):
            continue
        full = overload.name().removeprefix("aten::")
        yield full.removesuffix(".default")


def _implemented(name: str, device_type: str) -> bool:
    if not torch._C._dispatch_has_kernel(name):
        return False
    if device_type != "cpu":
        return True  # a build without this device has no kernels for it to be asked about
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        for key in (
            *("CPU", "SparseCPU", "SparseCsrCPU"),
            "CompositeImplicitAutograd",
            "CompositeExplicitAutograd",
            "CompositeExplicitAutogradNonFunctional",
        )
    )


def overload_named(name: str) -> torch._ops.OpOverload:
    """The overload by the name that `overloads_of` gives it: ``softmax.int``, ``exp``, ``mylib::fused``."""
    namespace, _, rest = name.rpartition("::")
    op, _, overload = rest.partition(".")
    found: torch._ops.OpOverload = getattr(
        getattr(getattr(torch.ops, namespace or "aten"), op), overload or "default"
    )
    return found
