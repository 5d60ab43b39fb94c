"""BackwardTrace: where the gradients of a backward pass cease to be finite, and who made large ones first.

Each node is looked at as it runs: in a replay those of a call that was traced forward, in a step those of the loss's
graph outside of the calls. A node of autograd's graph tells of its operation what it saved, its result, its slope,
while the graph has not been freed. Where it doesn't tell, the answer is None.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mezzo.core.overflow import SUM, Maker, OverflowReport, TensorFacts
from mezzo.pytorch.monitor.forward_trace import ForwardTrace, Operation, beyond, finding_of
from mezzo.pytorch.monitor.operations import COMPOSED, HOOK, POLES, facts, finite, line_text, op_of_node, over
from mezzo.pytorch.monitor.replay import OF_CALL

Gradients = Sequence[Tensor | None]

# ------------------------------------------------------------------------------------ what a node tells

_FORWARD = {"nll_loss": "nll_loss_forward", "nll_loss2d": "nll_loss2d_forward"}
_RESULTS = ("_saved_result", "_saved_output", "_saved_result0")


def saved(node: Any) -> list[TensorFacts]:
    """Facts of the floating tensors that a node saved in forward, at most four."""
    found: list[TensorFacts] = []
    for name in dir(node):
        if name.startswith("_saved_"):
            with suppress(Exception):  # freed, changed in place, or a checkpoint's that is gone
                value = getattr(node, name)
                if isinstance(value, Tensor) and value.is_floating_point():
                    found.append(facts(value, f"saved {name.removeprefix('_saved_')}"))
    return found[:4]


def result(node: Any) -> Tensor | None:
    """What the operation returned."""
    try:
        for name in _RESULTS:
            value = getattr(node, name, None)
            if isinstance(value, Tensor):
                return value
        return _computed(node, wide=False)
    except Exception:  # not an operation that can be repeated from what it saved
        return None


def has_pole(node: Any) -> bool | None:
    """Whether the operation's slope isn't finite at what went in, even in FP64; None if it can't be computed."""
    try:
        with torch.enable_grad():
            value = _computed(node, wide=True)
    except Exception:
        return None
    if value is None or value.grad_fn is None:
        return None
    behind: list[Any] = [following for following, _ in value.grad_fn.next_functions]
    leaves = [node.variable for node in behind if hasattr(node, "variable")]
    slopes = torch.autograd.grad(value, leaves, torch.ones_like(value))
    return not all(finite(slope) for slope in slopes)


def _computed(node: Any, *, wide: bool) -> Tensor | None:
    """The operation once more, from what was saved; in FP64 on fresh leaves if `wide`."""
    name = op_of_node(node)
    packet = getattr(torch.ops.aten, _FORWARD.get(name, name), None)
    for variant in [] if packet is None else packet.overloads():
        overload = getattr(packet, variant)
        needed = overload._schema.arguments
        given = {one.name: getattr(node, f"_saved_{one.name}", None) for one in needed}
        kept = {one: value for one, value in given.items() if hasattr(node, f"_saved_{one}")}
        if any(one.name not in kept and not one.has_default_value() for one in needed):
            continue
        of_tensors = [value for value in kept.values() if isinstance(value, Tensor)]
        if of_tensors and "out" not in kept:
            with torch.autocast(of_tensors[0].device.type, enabled=False):
                value = overload(**{one: _off_graph(kept_one, wide) for one, kept_one in kept.items()})
            value = value[0] if isinstance(value, tuple) else value
            return value if isinstance(value, Tensor) else None
    return None


def _off_graph(value: Any, wide: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return value.double().requires_grad_() if wide and value.is_floating_point() else value


def _cause_of_slope(node: Any, op: str, kept: list[TensorFacts], outputs: list[TensorFacts]) -> str:
    """``invalid`` if an operation has no finite slope where it was, ``overflow`` if it is one beyond the format."""
    if op == HOOK:
        return "invalid"
    if op in POLES:
        pole = has_pole(node)
        if pole is None:  # what was saved is gone, or can't be computed with
            blamed = [one for one in kept if op != "div" or one.name != "saved self"]
            pole = not kept or any(one.zeros for one in blamed)
        return "invalid" if pole else "overflow"
    # Inside of an operation of many steps NaN comes of an overflow: inf - inf.
    return "invalid" if op not in COMPOSED and any(one.nans for one in outputs) else "overflow"


def at(
    place: Operation, cause: str, inputs: Sequence[Any] = (), outputs: Sequence[Any] = ()
) -> OverflowReport:
    """A finding in backward; inputs and outputs are facts."""
    line = line_text(place.line)
    return OverflowReport(cause, place.module, place.op, "backward", [*inputs], [*outputs], line=line)


# ------------------------------------------------------------------------------------------- the trace


@dataclass(eq=False)
class Found:
    """What produced something not finite, outside of the calls or in a backward.

    Args:
        finding: the report.
        node: of the graph, where that is known.
        start: the loss's node, from which that graph goes down.
    """

    finding: OverflowReport
    node: Any = None
    start: Any = None


class BackwardTrace:
    """Watches nodes of one backward pass.

    Args:
        nodes: which.
        starts: nodes that are given a gradient by the caller of backward.
        place: what is known of a node's operation.
        scale: how many times the gradients are too large, where the loss scale is to be told from other causes.
        whole: `nodes` are all that run. Then the effect of a gradient hook is recognised, and the makers of large
            gradients are recorded, which takes one more pass over each gradient.

    Attributes:
        found: the first that made a gradient that isn't finite of ones that are.
    """

    def __init__(
        self,
        nodes: Iterable[Any],
        starts: Sequence[Any],
        place: Callable[[Any], Operation],
        *,
        scale: Tensor | float = 1.0,
        whole: bool = True,
    ) -> None:
        self._place, self._scale, self._whole = place, scale, whole
        self._sent_bad: set[Any] = set()
        self._senders, self._start = Counter(starts), next(iter(starts), None)
        self._makers: dict[Any, tuple[float, Maker]] = {}  # of the largest that was sent to a node
        self.found: Found | None = None
        self._handles = [node.register_hook(self._hook(node)) for node in nodes]

    def undo(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def sent_to(self, call: int) -> int:
        """How many gradients the nodes have sent to one of those that a saved call, by its number, returned."""
        return max((n for node, n in self._senders.items() if node.metadata.get(OF_CALL) == call), default=0)

    def _hook(self, node: Any) -> Any:
        def look(going: Gradients, coming: Gradients) -> None:
            with suppress(Exception), torch._C.DisableTorchFunction():  # the script's backward must go on
                self._look(node, going, coming)

        return look

    def _look(self, node: Any, going: Gradients, coming: Gradients) -> None:
        all_finite = True
        for (following, _), grad in zip(node.next_functions, going):
            if grad is not None and following is not None:
                self._senders[following] += 1
                if not _surely_finite(grad):
                    all_finite = False
                    self._sent_bad.add(following)
        if all_finite:
            if self._whole and self.found is None:
                self._note_makers(node, going, coming)
        elif self.found is not None:
            self.found.finding.propagators.append(str(self._place(node)))
        elif all(grad is None or finite(grad) for grad in coming):
            self.found = self._slope(node, going, coming)
        elif node not in self._sent_bad:
            self.found = self._arrived(node, coming)

    def _slope(self, node: Any, going: Gradients, coming: Gradients) -> Found:
        """The node made gradients that aren't finite, `going`, of ones that are, `coming`."""
        place, scale = self._place(node), float(self._scale)
        by_scale = scale > 1.0 and _is_finite_without(scale, node, coming)
        before = None if by_scale else place.absorbed()
        if before is not None:
            return Found(finding_of(*before), None, self._start)
        kept = saved(node)
        outputs = [facts(grad, f"gradient of input {n}") for n, grad in enumerate(going) if grad is not None]
        cause = "loss scale" if by_scale else _cause_of_slope(node, place.op, kept, outputs)
        inputs = [facts(grad, "gradient of output") for grad in coming if grad is not None][:3] + kept
        finding = at(place, cause, inputs, outputs[:3])
        if self._whole and cause == "overflow":
            finding = replace(finding, maker=self._maker(node, coming))
        return Found(finding, node, self._start)

    def _arrived(self, node: Any, coming: Gradients) -> Found | None:
        """What came to the node isn't finite, and what was sent to it is: a sum, or a hook's doing."""
        place, several = self._place(node), self._senders[node] > 1
        if not several and not self._whole:  # it came from within a call
            return None
        cause = "overflow" if several else "invalid"
        if several and float(self._scale) > 1.0:  # so few parts, each finite, and this much smaller
            cause = "loss scale"
        made = [facts(grad, SUM) for grad in coming if grad is not None][:3]
        finding = at(Operation(place.module, SUM if several else HOOK, place.line), cause, (), made)
        return Found(finding, node, self._start)

    # who made gradients beyond fp16 first

    def _note_makers(self, node: Any, going: Gradients, coming: Gradients) -> None:
        given = any(one is not None and beyond(one, float(self._scale)) for one in coming)
        for number, ((following, _), grad) in enumerate(zip(node.next_functions, going)):
            size = 0.0 if grad is None or following is None else beyond(grad, float(self._scale))
            if not size or grad is None:
                continue
            made = self._maker(node, coming)
            if not given:
                made = self._place(node).made(facts(grad, f"gradient of input {number}"))
            if made is not None and size > self._makers.get(following, (0.0,))[0]:
                self._makers[following] = size, made

    def _maker(self, node: Any, coming: Gradients) -> Maker | None:
        """Who made the gradients that came to a node; None where fp16 holds them, or their maker was not seen."""
        large = [one for one in coming if one is not None and beyond(one, float(self._scale))]
        if not large or node in self._makers:
            return self._makers[node][1] if large else None
        if self._senders[node] > 1:  # each fits, and not their sum
            place = self._place(node)
            return Operation(place.module, SUM, place.line).made(facts(large[0], SUM))
        return None


def _surely_finite(grad: Tensor) -> bool:
    """Finite, told by one cheap pass: a sum in FP32 is finite only if every element is."""
    if grad.layout is torch.strided and grad.is_floating_point() and grad.dtype.itemsize > 1:
        wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
        total = grad if grad.numel() == 1 else grad.detach().sum(dtype=wide)
        if math.isfinite(total.item()):  # torch.isfinite is four operations
            return True
    return finite(grad)


def _is_finite_without(scale: float, node: Any, coming: Gradients) -> bool:
    """Whether a node, run by hand on gradients without the loss scale, makes finite ones."""
    run = node.apply if hasattr(node, "saved_tensors") else node
    try:
        with torch.no_grad():
            made = run(*[grad if grad is None else over(grad, scale) for grad in coming])
    except Exception:  # a node that can't be run by hand
        return False
    return all(grad is None or finite(grad) for grad in (made if isinstance(made, tuple) else (made,)))


def replay_backward(
    trace: ForwardTrace, outputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> OverflowReport | None:
    """Backward from the outputs of a traced call to its leaves, whose `.grad` does not change.

    Returns the first operation that made a gradient that isn't finite of ones that are; None where every leaf's is.

    Args:
        trace: of the call.
        outputs: tensors on the graph, each with its gradient in `grads`, of its shape.
        grads: finite.
    """
    starts = [output.grad_fn for output in outputs]
    watch = BackwardTrace(trace.operations, starts, trace.operations.__getitem__)
    leaves = list(trace.leaves.values())
    try:
        given = torch.autograd.grad(
            list(outputs), leaves, list(grads), retain_graph=True, allow_unused=True, materialize_grads=False
        )
    finally:
        watch.undo()
    bad = [leaf for leaf, grad in zip(leaves, given) if grad is not None and not finite(grad)]
    if bad and watch.found is None:  # each of several uses was finite, and not their sum
        return at(Operation(trace.module_of(bad[0]), SUM), "overflow")
    return watch.found.finding if bad and watch.found is not None else None
