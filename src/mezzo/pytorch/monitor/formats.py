"""OpObserver: the formats in which the ops of a step ran, compared with those that were planned.

Of each tree of calls the outermost op of the op table counts: ``linear``, not its ``addmm``. The formats are those of
its kernel's arguments, after the casts of autocast; a result is counted as the caller got it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mezzo.core.policy import Policy
from mezzo.core.policy import policy as policy_of
from mezzo.core.records import OpFormats
from mezzo.core.rules import RULES, bare
from mezzo.pytorch.auto import resolve
from mezzo.pytorch.autocast.plan import FIRST, WIDEST, OpPlan, has_own_rule, plan
from mezzo.pytorch.monitor.execution_trace import Call, Recorded, recorded

MODULE_MARK = "mezzo::module "  # of the module in which calls run, set by `explain`
COMPILED = "compiled region"
_SIXTEEN = frozenset({"fp16", "bf16"})
# Calls that make, copy, move or look at tensors without computing with them.
_NAMES = """alias arange _autocast_to_reduced_precision bernoulli_ clone contiguous copy_ detach detach_ empty
    empty_like empty_strided equal fill_ full full_like is_nonzero is_pinned item lift_fresh _local_scalar_dense
    new_empty new_empty_strided new_full new_ones new_zeros normal_ ones ones_like _pin_memory rand randint
    rand_like randn randn_like randperm record_stream _reshape_alias resize_ resolve_conj resolve_neg
    scalar_tensor set_ to _to_copy type_as uniform_ _unsafe_view zero_ zeros zeros_like"""
_BOOKKEEPING = frozenset(_NAMES.split())
_ENGINE = "autograd::engine::evaluate_function: "
_OPTIMIZER = "Optimizer.step#"
_WITHOUT_PLAN = {
    "compiled": "compiled: formats not observed",
    "other": "not in the op table: in the formats of its tensors",
}
_COMPILED_CALLS = "Torch-Compiled Region", "CompiledFunction", _ENGINE + "CompiledFunction"


@dataclass(frozen=True)
class _Seen:
    """One call of an op, resolved: the formats of its kernel, the casts around it, and how it computed."""

    op: str
    arrived: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    casts: int = 0
    module: str = ""
    kind: str = "forward"  # or "backward", "other" (the engine's and the optimizer's own), "compiled"

    @property
    def observed(self) -> str:
        """The formats of the kernel's arguments and results."""
        inside, outside = "+".join(self.inside) or "-", "+".join(self.outside) or "-"
        return f"{inside} -> {outside}" if self.inside or self.outside else ""


class OpObserver:
    """A context that records what runs inside, in all threads; `table` compares it with the plan of a policy.

    Unless it is the `whole`, ops may run outside of the autocast context (a loss, a metric).
    """

    def __init__(self, policy: str | Policy, device_type: str = "cpu", *, whole: bool = False) -> None:
        self.policy = policy_of(policy)
        if self.policy.compute == "auto":
            self.policy = resolve(self.policy, device_type)[0]
        self.device_type = device_type
        self._whole = whole
        self._recording = recorded()
        self._recorded = Recorded()

    def __enter__(self) -> OpObserver:
        self._recorded = self._recording.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._recording.__exit__(*exc_info)

    @property
    def note(self) -> str:
        """Why nothing could be recorded, or ""."""
        return self._recorded.note

    def table(self) -> list[OpFormats]:
        """What ran, a row for each op, formats and module, in the order of the first call."""
        every = list(_seen(self._recorded.calls, "", {}))
        # Where nothing at all was lowered, the context did not work, and no op can be excused.
        excuse = not self._whole and any(_SIXTEEN & {*one.inside} for one in every if one.kind == "forward")
        return summed(self._row(seen, excuse=excuse) for seen in every)

    def _row(self, seen: _Seen, *, excuse: bool) -> OpFormats:
        if seen.kind in _WITHOUT_PLAN:
            return _row(seen, _WITHOUT_PLAN[seen.kind])
        if seen.kind == "backward":
            op = bare(seen.op)
            decision = self.policy.rule_for(op)
            rule = decision.rule.value if decision else ""
            return _row(replace(seen, op=f"{op}.backward"), f"gradient of {op}", rule)
        policies = list(self._policies_at(seen.module))
        plans = [plan(one, self.device_type).get(bare(seen.op)) for one in policies]
        lowers = any(one.compute != "fp32" for one in policies)
        if lowers and not any(plans) and has_own_rule(seen.op, self.device_type):
            return _row(seen, "the op's own rule, by torch.library.register_autocast", "registered")
        rows = [_forward_row(seen, found) for found in plans]
        row = next((row for row in rows if row.as_planned), rows[0])
        untouched = row.rule == "lower" and set(seen.arrived) == {"fp32"} == set(seen.outside)
        if excuse and untouched and not row.as_planned:
            return replace(row, planned="", reason="outside of autocast: in the format of its inputs")
        if row.rule == "lower" and self.policy.compute != "fp32" == self.policy.format_inside(seen.module):
            return replace(row, rule="fp32", reason="the policy has its module in FP32")
        return row

    def _policies_at(self, module: str) -> Iterator[Policy]:
        """The policy in a module; any that overrides give, where the module isn't known."""
        if not self.policy.modules:
            yield self.policy
            return
        inside = self.policy.format_inside(module) if module else None
        formats = [self.policy.compute] if inside is None else [inside]
        formats += [] if module else [fmt for _, fmt in self.policy.modules]
        for fmt in dict.fromkeys(formats):
            yield self.policy.of_module(fmt).with_modules(fmt, ())


def summed(rows: Iterable[OpFormats]) -> list[OpFormats]:
    """Rows that differ only in calls and casts as one row, in the order of the first."""
    found: dict[OpFormats, OpFormats] = {}
    for row in rows:
        key = replace(row, calls=0, casts=0)
        before = found.get(key, key)
        found[key] = replace(row, calls=before.calls + row.calls, casts=before.casts + row.casts)
    return list(found.values())


def _row(seen: _Seen, reason: str, rule: str = "", planned: str = "") -> OpFormats:
    return OpFormats(seen.op, rule, planned, seen.observed, 1, seen.casts, reason, seen.module)


def _forward_row(seen: _Seen, found: OpPlan | None) -> OpFormats:
    if found is not None:
        return _row(seen, found.reason, found.rule, _planned(seen, found))
    if seen.op.endswith("_") and not seen.op.startswith("_"):
        return _row(seen, "in place: in the format of the tensor that it changes")
    return _row(seen, "no rule: in the format of its inputs")


def _planned(seen: _Seen, found: OpPlan) -> str:
    """The plan for this call as text; empty where the plan leaves it alone (no floats, or FP64)."""
    if not seen.arrived or "fp64" in seen.arrived or found.how == "absent":
        return ""
    inside, out = found.formats_in, found.output(seen.arrived)
    is_fp32 = found.rule == "fp32" and seen.outside == ("fp32",) and not seen.casts
    converts = is_fp32 and _SIXTEEN & set(seen.inside)  # asked for FP32, the kernel converts as it reads
    if inside == FIRST or (inside == WIDEST and found.how == "pytorch") or converts:
        inside = "+".join(seen.inside)  # as they come
    elif inside == WIDEST:
        inside = out
    return f"{inside} -> {out}" if seen.outside else ""


def _distinct(tensors: Iterable[tuple[int, str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(fmt for _, fmt in tensors))


def _seen(calls: Iterable[Call], module: str, makers: dict[tuple[int, int], _Seen]) -> Iterator[_Seen]:
    """What a trace's calls in a module computed; `makers` collects which op made which node of autograd's."""
    for call in calls:
        if call.name.startswith(MODULE_MARK):
            yield from _seen(call.children, call.name[len(MODULE_MARK) :], makers)
        elif call.name.startswith(_COMPILED_CALLS):
            yield _Seen(COMPILED, kind="compiled")
        elif call.name.startswith(_ENGINE):
            name = call.name[len(_ENGINE) :].removeprefix("torch::autograd::")
            nodes = (inner.sequence for inner in call.children if inner.backward and inner.sequence in makers)
            made = makers.get(next(nodes, (0, -1)))
            yield from _together(replace(made, kind="backward") if made else _Seen(name, kind="other"), call)
        elif marked := _optimizer(call):
            yield from _together(_Seen(marked, kind="other"), call)
        elif "::" in call.name and not call.name.startswith("autograd::") and _is_op(call):
            seen = _resolved(call, module)
            nodes = (inner.sequence for inner in call.walk() if not inner.backward)
            makers.update({node: seen for node in nodes if node[1] >= 0})
            if seen.arrived or seen.outside:
                yield seen
        else:
            yield from _seen(call.children, module, makers)


def _is_op(call: Call) -> bool:
    """Whether this is the call to report: an op of the table, or one that computes and holds none."""
    if bare(call.op) in RULES:
        return True
    if call.op in _BOOKKEEPING or not call.name.startswith("aten::"):
        return not call.name.startswith(("aten::", "mezzo::", "profiler::")) and _is_kernel(call)
    inner = (inner.op for inner in call.walk() if inner.name.startswith("aten::"))
    return _is_kernel(call) and not any(op in RULES for op in inner)


def _optimizer(call: Call) -> str:
    """The optimizer's step that this call is, or "". Under a dispatch mode PyTorch's mark comes before the step."""
    first = call.children[0] if call.name == "PythonDispatchMode" and call.children else call
    return first.name[len(_OPTIMIZER) :] if first.name.startswith(_OPTIMIZER) else ""


def _together(seen: _Seen, call: Call) -> list[_Seen]:
    """What computed under a call, as one observation of `seen`; none if nothing did."""
    kernels = [inner for child in call.children for inner in _outermost(child)]
    inside = _distinct(tensor for kernel in kernels for tensor in kernel.inputs)
    outside = _distinct(tensor for kernel in kernels for tensor in kernel.outputs)
    return [replace(seen, inside=inside, outside=outside, casts=_casts(call))] if kernels else []


def _is_kernel(call: Call) -> bool:
    """Whether a call computes: it takes floats, gives floats, and is not a view of its input."""
    returned = call.schema.rpartition("->")[2]
    view = "(" in returned and "!" not in returned and "Tensor(" in returned
    return bool(call.inputs and call.outputs and call.schema and not view)


def _outermost(call: Call) -> Iterator[Call]:
    """The outermost calls that compute, in a backward function: no casts, no views, no allocations."""
    if call.name.startswith("aten::") and call.op in _BOOKKEEPING:
        return
    if call.name.startswith("aten::") and _is_kernel(call):
        yield call
        return
    for child in call.children:
        yield from _outermost(child)


def _casts_now(call: Call) -> bool:
    """Whether a call is a copy from one floating format to another; Python's numbers (FP64) don't count."""
    copies = call.op == "_to_copy" and call.inputs and call.outputs
    return bool(copies) and call.inputs[0][1] not in ("fp64", call.outputs[0][1])


def _casts(call: Call) -> int:
    """The casts under a call, each once, however often a dispatch mode hands it on."""
    return int(_casts_now(call)) or sum(_casts(child) for child in call.children)


def _resolved(call: Call, module: str) -> _Seen:
    """An op with the formats of its kernel: of the innermost call of the same op, after the casts that it makes."""
    kernel = call
    while (inner := _same_within(kernel)) is not None:
        kernel = inner
    inside = _after_parts(call) if kernel is call else kernel.inputs
    outside = _distinct(call.outputs)
    if set(outside) == {"fp32"}:  # a 16-bit result says that it computed in 16 bits, whatever its parts do
        cast = {copy.inputs[0][0]: copy.outputs[0][1] for copy in kernel.walk() if _casts_now(copy)}
        inside = [(identity, cast.get(identity, fmt)) for identity, fmt in inside]
    if kernel is not call and outside and set(outside) <= _SIXTEEN and _distinct(kernel.outputs) == ("fp32",):
        # FP32 inside, 16 bits outside: a format is emulated if the FP32 inputs were widened from it.
        casts = (copy for copy in call.walk() if _casts_now(copy) and copy.inputs[0][1] in _SIXTEEN)
        narrow = {copy.outputs[0][0]: copy.inputs[0][1] for copy in casts}
        inside = [(identity, narrow.get(identity, fmt)) for identity, fmt in kernel.inputs]
    return _Seen(call.op, _distinct(call.inputs), _distinct(inside), outside, _casts(call), module)


def _same_within(call: Call) -> Call | None:
    """The first call of the same forward op inside of a call."""
    inner = (c for c in call.walk() if c is not call and c.name == call.name and not c.backward)
    return next(inner, None)


def _after_parts(call: Call) -> list[tuple[int, str]]:
    """The inputs of an op without an autocast kernel, as of an LSTM, after the casts that its parts made."""
    for inner in call.walk():
        if inner is call or inner.op not in RULES or inner.backward:
            continue
        kernel = _same_within(inner)
        if kernel is not None and _distinct(kernel.inputs) != _distinct(inner.inputs):
            return kernel.inputs
    return call.inputs
