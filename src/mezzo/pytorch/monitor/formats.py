"""OpObserver: the formats in which the ops of a step ran, compared with those that were planned.

The observer reads PyTorch's execution trace (`execution_trace.py`) and keeps, of each tree of calls, the outermost op
of the op table: ``linear``, not the ``addmm`` inside it. The formats are those of its kernel's arguments, after the
casts of autocast; a result is counted as the caller got it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from mezzo.core.policy import Policy
from mezzo.core.policy import policy as policy_of
from mezzo.core.records import OpFormats
from mezzo.core.rules import RULES, bare
from mezzo.pytorch.auto import resolve
from mezzo.pytorch.autocast.plan import FIRST, WIDEST, OpPlan, plan
from mezzo.pytorch.monitor.execution_trace import Call, ExecutionTrace

# What marks the module in which calls ran; `explain` sets such marks.
MODULE_MARK = "mezzo::module "

COMPILED = "compiled region"
_SIXTEEN = frozenset({"fp16", "bf16"})
_COPIES = frozenset({"to", "_to_copy", "copy_", "type_as", "_autocast_to_reduced_precision"})
# Calls that make, move or look at tensors without computing with them.
_NAMES = """alias arange bernoulli_ clone contiguous detach detach_ empty empty_like empty_strided equal fill_
    full full_like is_nonzero is_pinned item lift_fresh _local_scalar_dense new_empty new_empty_strided
    new_full new_ones new_zeros normal_ ones ones_like _pin_memory rand randint rand_like randn
    randn_like randperm record_stream _reshape_alias resize_ resolve_conj resolve_neg scalar_tensor set_
    uniform_ _unsafe_view zero_ zeros zeros_like"""
_BOOKKEEPING = _COPIES.union(_NAMES.split())
_ENGINE = "autograd::engine::evaluate_function: "
_OPTIMIZER = "Optimizer.step#"


@dataclass(frozen=True)
class _Seen:
    """One call of an op, resolved: the formats of its kernel, the casts around it, and how it computed."""

    op: str
    arrived: tuple[str, ...]
    inside: tuple[str, ...]
    outside: tuple[str, ...]
    casts: int
    emulated: bool
    module: str = ""


class OpObserver:
    """A context that records what runs inside; `table` has the result. It need not be nested with other contexts.

    Args:
        policy: the policy that is compared, as for `mezzo.autocast`.
        device_type: the kind of device whose plan is compared.
        whole: True if all that runs is inside of the autocast context, as in `explain`. Else an op may have run outside
            of it (a loss, a metric), which is not a departure from the plan.

    In backward an op is called ``linear.backward``; it has no plan, since it computes in the formats that forward
    saved. Calls inside compiled functions cannot be seen: they make one row, ``compiled region``. A step that could not
    be recorded has an empty table and a sentence in `note`.

    Only one execution trace can be recorded in a process at a time; it records all threads.
    """

    def __init__(self, policy: str | Policy, device_type: str = "cpu", *, whole: bool = False) -> None:
        self.policy = policy_of(policy)
        if self.policy.compute == "auto":
            self.policy = resolve(self.policy, device_type)[0]
        self.device_type = device_type
        self.note = ""
        self._whole = whole
        self._trace = ExecutionTrace()
        self._roots: list[Call] = []

    def __enter__(self) -> OpObserver:
        self._roots, self.note = [], self._trace.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self.note:
            self._roots, self.note = self._trace.stop()

    def table(self) -> list[OpFormats]:
        """What ran, a row for each op, formats and module, in the order of the first call."""
        rows: dict[OpFormats, OpFormats] = {}

        def count(row: OpFormats, casts: int = 0) -> None:
            found = rows.get(row, row)
            rows[row] = replace(found, calls=found.calls + 1, casts=found.casts + casts)

        found = _Reading(self._roots)
        # Where nothing at all was lowered, the context did not work, and no op can be excused.
        lowered = any(_SIXTEEN & set(seen.inside) for seen in found.forward)
        for seen in found.forward:
            count(self._judged(seen, excuse=lowered and not self._whole), seen.casts)
        for seen in found.backward:
            count(self._gradient(seen), seen.casts)
        for seen in found.others:
            reason = "no op of the table: in the formats of its tensors"
            count(OpFormats(seen.op, "", "", _arrow(seen.inside, seen.outside), 0, 0, reason), seen.casts)
        for _ in range(found.compiled):
            count(OpFormats(COMPILED, "", "", "", 0, 0, "compiled: formats not observed"))
        return list(rows.values())

    def _judged(self, seen: _Seen, *, excuse: bool) -> OpFormats:
        observed = _arrow(seen.inside, seen.outside)
        plans = (
            plan(policy, self.device_type).get(bare(seen.op)) for policy in self._policies_at(seen.module)
        )
        rows = [_row(seen, observed, found) for found in plans]
        row = next((row for row in rows if row.as_planned), rows[0])
        untouched = row.rule == "lower" and set(seen.arrived) == {"fp32"} == set(seen.outside)
        if excuse and untouched and not row.as_planned:
            return replace(row, planned="", reason="outside the region: in the format of its inputs")
        return row

    def _policies_at(self, module: str) -> Iterator[Policy]:
        """The policy in a module; any that overrides give, where the module isn't known."""
        if not self.policy.modules:
            yield self.policy
            return
        base = replace(self.policy, modules=(), params="fp32", masters="auto", state="fp32", output="fp32")
        if not module:
            yield base
            for fmt in dict.fromkeys(fmt for _, fmt in self.policy.modules):
                yield replace(base, compute=fmt, loss_scale="none")
            return
        own = self.policy.format_inside(module)
        yield base if own is None else replace(base, compute=own, loss_scale="none")

    def _gradient(self, seen: _Seen) -> OpFormats:
        op = bare(seen.op)
        decision = self.policy.rule_for(op)
        rule = decision.rule.value if decision else ""
        reason = f"gradient of {op}" + (", in FP32 from 16-bit values" if seen.emulated else "")
        observed = _arrow(seen.inside, seen.outside)
        return OpFormats(f"{op}.backward", rule, "", observed, 0, 0, reason, seen.module)


def _row(seen: _Seen, observed: str, found: OpPlan | None) -> OpFormats:
    if found is None:
        reason = "no rule: in the format of its inputs"
        if seen.op.endswith("_") and not seen.op.startswith("_"):
            reason = "in place: in the format of the tensor that it changes"
        return OpFormats(seen.op, "", "", observed, 0, 0, reason, seen.module)
    planned = _planned(seen, found)
    return OpFormats(seen.op, found.rule, planned, observed, 0, 0, found.reason, seen.module)


def _planned(seen: _Seen, found: OpPlan) -> str:
    """The plan for this call as text; empty where the plan leaves it alone (no floats, or FP64)."""
    if not seen.arrived or "fp64" in seen.arrived or found.how == "absent":
        return ""
    out = found.output(seen.arrived)
    if found.formats_in == FIRST or (found.formats_in == WIDEST and found.how == "pytorch"):
        inside = "+".join(seen.inside)  # as they come
    elif found.formats_in == WIDEST:
        inside = found.output(seen.arrived)
    elif (
        found.rule == "fp32" and seen.outside == ("fp32",) and _SIXTEEN & set(seen.inside) and not seen.casts
    ):
        inside = "+".join(seen.inside)  # told to return FP32, the kernel converts as it reads
    else:
        inside = found.formats_in
    return f"{inside} -> {out}" if seen.outside else ""


def _arrow(inside: Sequence[str], outside: Sequence[str]) -> str:
    return f"{'+'.join(inside) or '-'} -> {'+'.join(outside) or '-'}" if inside or outside else ""


def _distinct(tensors: Iterable[tuple[int, str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(fmt for _, fmt in tensors))


@dataclass
class _Reading:
    """The calls of a trace: forward ops, their backward, compiled functions, the engine's and the optimizer's own."""

    roots: list[Call]
    forward: list[_Seen] = field(default_factory=list)
    backward: list[_Seen] = field(default_factory=list)
    others: list[_Seen] = field(default_factory=list)
    compiled: int = 0

    def __post_init__(self) -> None:
        self._makers: dict[tuple[int, int], _Seen] = {}
        for root in self.roots:
            self._visit(root, "")

    def _visit(self, call: Call, module: str) -> None:
        if call.name.startswith(MODULE_MARK):
            module = call.name[len(MODULE_MARK) :]
        elif call.name.startswith(
            ("Torch-Compiled Region", "CompiledFunction", _ENGINE + "CompiledFunction")
        ):
            self.compiled += 1
            return
        elif call.name.startswith(_ENGINE):
            self._visit_backward(call)
            return
        elif marked := _optimizer(call):
            self.others.extend(_together(_Seen(marked, (), (), (), 0, False), call))
            return
        elif "::" in call.name and not call.name.startswith("autograd::") and self._is_op(call):
            seen = _resolved(call, module)
            if seen.arrived or seen.outside:
                self.forward.append(seen)
            for inner in call.walk():
                if inner.sequence[1] >= 0 and not inner.backward:
                    self._makers[inner.sequence] = seen
            return
        for child in call.children:
            self._visit(child, module)

    def _visit_backward(self, call: Call) -> None:
        made = (inner for inner in call.children if inner.backward and inner.sequence in self._makers)
        node = next(made, None)
        if node is None:
            name = call.name[len(_ENGINE) :].removeprefix("torch::autograd::")
            self.others.extend(_together(_Seen(name, (), (), (), 0, False), call))
        else:
            self.backward.extend(_together(self._makers[node.sequence], call))

    def _is_op(self, call: Call) -> bool:
        """Whether this is the call to report: an op of the table, or one that computes and holds none."""
        op = call.op
        if bare(op) in RULES:
            return True
        if op in _BOOKKEEPING or not call.name.startswith("aten::"):
            return not call.name.startswith(("aten::", "mezzo::", "profiler::")) and _is_kernel(call)
        return _is_kernel(call) and not any(
            inner.name.startswith("aten::") and inner.op in RULES for inner in call.walk()
        )


def _optimizer(call: Call) -> str:
    """The optimizer's step that this call is, or an empty string. Under a dispatch mode PyTorch's mark does not
    enclose the step: it comes first, and what it marks comes after it."""
    first = call.children[0] if call.name == "PythonDispatchMode" and call.children else call
    return first.name[len(_OPTIMIZER) :] if first.name.startswith(_OPTIMIZER) else ""


def _together(seen: _Seen, call: Call) -> list[_Seen]:
    """What computed under a call, as one observation of `seen`; none if nothing did."""
    kernels = [inner for child in call.children for inner in _outermost(child)]
    inside = _distinct(tensor for kernel in kernels for tensor in kernel.inputs)
    outside = _distinct(tensor for kernel in kernels for tensor in kernel.outputs)
    return [replace(seen, inside=inside, outside=outside, casts=_casts(call))] if kernels else []


def _is_kernel(call: Call) -> bool:
    """Whether a call computes: it takes floats, gives floats, and is no view of its input."""
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
    """The formats with which the kernel of an op ran: those of the innermost call of the same op, after the
    casts that it makes itself."""
    kernel = call
    while True:
        inner = next(
            (c for c in kernel.walk() if c is not kernel and c.name == call.name and not c.backward), None
        )
        if inner is None:
            break
        kernel = inner
    inside = _after_parts(call) if kernel is call else kernel.inputs
    outside = _distinct(call.outputs)
    if set(outside) == {"fp32"}:  # a 16-bit result says that it computed in 16 bits, whatever its parts do
        cast = {copy.inputs[0][0]: copy.outputs[0][1] for copy in kernel.walk() if _casts_now(copy)}
        inside = [(identity, cast.get(identity, fmt)) for identity, fmt in inside]
    emulated = False
    if kernel is not call and outside and set(outside) <= _SIXTEEN and _distinct(kernel.outputs) == ("fp32",):
        # FP32 inside, 16 bits outside: a format is emulated if the FP32 inputs were widened from it.
        narrow = {}
        for copy in call.walk():
            if _casts_now(copy) and copy.inputs[0][1] in _SIXTEEN:
                narrow[copy.outputs[0][0]] = copy.inputs[0][1]
        inside = [(identity, narrow.get(identity, fmt)) for identity, fmt in kernel.inputs]
        emulated = True
    return _Seen(call.op, _distinct(call.inputs), _distinct(inside), outside, _casts(call), emulated, module)


def _after_parts(call: Call) -> list[tuple[int, str]]:
    """The inputs of an op without an autocast kernel of its own, after the casts that its parts made.

    An LSTM, say, is lowered in its `mkldnn_rnn_layer`, whose inputs then tell.
    """
    for inner in call.walk():
        if inner is call or inner.op not in RULES or inner.backward:
            continue
        kernel = next((c for c in inner.walk() if c is not inner and c.name == inner.name), None)
        if kernel is not None and _distinct(kernel.inputs) != _distinct(inner.inputs):
            return kernel.inputs
    return call.inputs
