"""Backward over a graph that was traced forward: where gradients cease to be finite, and who made large ones first.

A node of autograd's graph tells of its operation what it saved, its result, its slope, while the graph has not been
freed. Where a node doesn't tell, the answer is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mezzo.core.finding import SUM, Finding, Maker, TensorFacts
from mezzo.pytorch.monitor.forward_trace import ForwardTrace, Place, beyond, maker
from mezzo.pytorch.monitor.operations import COMPOSED, HOOK, POLES, facts, finite, line_text, op_of_node

Gradients = Sequence[Tensor | None]

_FORWARD = {"nll_loss": "nll_loss_forward", "nll_loss2d": "nll_loss2d_forward"}
_RESULTS = ("_saved_result", "_saved_output", "_saved_result0")


def saved(node: Any) -> list[TensorFacts]:
    """Facts of the floating tensors that a node saved in forward, at most four."""
    return [facts(value, f"saved {name}") for name, value in _saved_tensors(node).items()][:4]


def _saved_tensors(node: Any) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except Exception:  # freed, changed in place, or a checkpoint's that is gone
                continue
            if isinstance(value, Tensor) and value.is_floating_point():
                kept[name.removeprefix("_saved_")] = value
    return kept


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
    if packet is None:
        return None
    for variant in packet.overloads():
        overload = getattr(packet, variant)
        arguments: dict[str, Any] = {}
        for argument in overload._schema.arguments:
            if hasattr(node, f"_saved_{argument.name}"):
                arguments[argument.name] = getattr(node, f"_saved_{argument.name}")
            elif not argument.has_default_value():
                break
        else:
            given = [value for value in arguments.values() if isinstance(value, Tensor)]
            if "out" in arguments or not given:
                continue
            with torch.autocast(given[0].device.type, enabled=False):
                value = overload(**{name: _off_graph(v, wide) for name, v in arguments.items()})
            value = value[0] if isinstance(value, tuple) else value
            return value if isinstance(value, Tensor) else None
    return None


def _off_graph(value: Any, wide: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return value.double().requires_grad_() if wide and value.is_floating_point() else value


def cause_of_slope(node: Any, place: Place, kept: list[TensorFacts], outputs: list[TensorFacts]) -> str:
    """``invalid`` if an operation has no finite slope where it was, ``overflow`` if it is one beyond the format.

    Args:
        node: the operation's, which made gradients that aren't finite from ones that are.
        place: the operation.
        kept: what it saved.
        outputs: the gradients that it made.
    """
    op = place.op
    if op == HOOK:
        return "invalid"
    if op in POLES:
        pole = has_pole(node)
        if pole is not None:
            return "invalid" if pole else "overflow"
        blamed = [one for one in kept if op != "div" or one.name != "saved self"]
        return "invalid" if any(one.zeros for one in blamed) or (not kept and place.zeros) else "overflow"
    # Inside of an operation of many steps NaN comes of an overflow: inf - inf.
    if op in COMPOSED:
        return "overflow"
    return "invalid" if any(one.nans for one in outputs) else "overflow"


class BackwardMakers:
    """Who made gradients beyond fp16 first, of the nodes of a backward pass: each is told once it has run.

    Args:
        scale: how many times the gradients are too large.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale
        self._sent: dict[Any, tuple[float, Maker]] = {}
        self._senders: Counter[Any] = Counter()

    def ran(self, node: Any, place: Place, going: Gradients, coming: Gradients) -> None:
        """A node has made `going`, all finite, of `coming`."""
        for number, ((following, _), grad) in enumerate(zip(node.next_functions, going)):
            if grad is None or following is None:
                continue
            self._senders[following] += 1
            size = beyond(grad, self._scale)
            if not size:
                continue
            given = any(one is not None and beyond(one, self._scale) for one in coming)
            made = self.behind(node, place, coming) if given else None
            if not given:
                made = maker(place, facts(grad, f"gradient of input {number}"))
            if made is not None and (following not in self._sent or size > self._sent[following][0]):
                self._sent[following] = size, made

    def behind(self, node: Any, place: Place, coming: Gradients) -> Maker | None:
        """Who made the gradients that came to a node; None where fp16 holds them, or nobody saw them made."""
        large = [one for one in coming if one is not None and beyond(one, self._scale)]
        if not large:
            return None
        if node in self._sent:
            return self._sent[node][1]
        if self._senders[node] > 1:  # each fits, and not their sum
            return maker(Place(place.module, SUM, place.line), facts(large[0], SUM))
        return None


def slope_finding(
    node: Any,
    place: Place,
    going: Gradients,
    coming: Gradients,
    makers: BackwardMakers | None,
    *,
    cause: str = "",
    how: str = "replay",
) -> Finding:
    """Of a node that made gradients that aren't finite, `going`, of ones that are, `coming`; `cause` if it is known."""
    kept = saved(node)
    outputs = [facts(grad, f"gradient of input {n}") for n, grad in enumerate(going) if grad is not None]
    cause = cause or cause_of_slope(node, place, kept, outputs)
    made = makers.behind(node, place, coming) if makers is not None and cause == "overflow" else None
    inputs = [facts(grad, "gradient of output") for grad in coming if grad is not None][:3] + kept
    return at(place, cause, inputs, outputs[:3], how=how, maker=made)


def at(
    place: Place,
    cause: str,
    inputs: Sequence[TensorFacts] = (),
    outputs: Sequence[TensorFacts] = (),
    *,
    how: str = "replay",
    maker: Maker | None = None,
) -> Finding:
    """A finding in backward."""
    line = line_text(place.line)
    return Finding(
        cause, place.module, place.op, "backward", [*inputs], [*outputs], line=line, how=how, maker=maker
    )


def replay_backward(
    trace: ForwardTrace, outputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Place, Finding] | None:
    """Backward from the outputs of a traced call to its leaves, whose `.grad` does not change.

    Returns the first operation that made a gradient that isn't finite of ones that are; None where every leaf's is.

    Args:
        trace: of the call.
        outputs: tensors on the graph, each with its gradient in `grads`, of its shape.
        grads: finite.
    """
    found: list[tuple[Place, Finding]] = []  # the one
    makers = BackwardMakers()
    sent: set[Any] = set()
    # What backward begins with is sent by nobody that is seen, and is added to what comes from within.
    senders = Counter(output.grad_fn for output in outputs)

    def look(node: Any, going: Gradients, coming: Gradients) -> None:
        bad_going = [grad is not None and not finite(grad) for grad in going]
        for (following, _), grad, bad in zip(node.next_functions, going, bad_going):
            senders[following] += grad is not None
            if bad:
                sent.add(following)
        bad_coming = any(grad is not None and not finite(grad) for grad in coming)
        place = trace.places[node]
        if not any(bad_going) and not bad_coming:
            makers.ran(node, place, going, coming)
        elif found:
            found[0][1].propagators.append(str(place))
        elif not bad_coming:
            found.append((place, slope_finding(node, place, going, coming, makers)))
        elif node not in sent:
            several = senders[node] > 1
            place = Place(place.module, SUM if several else HOOK, place.line)
            made = [facts(grad, SUM) for grad in coming if grad is not None][:3]
            found.append((place, at(place, "overflow" if several else "invalid", outputs=made)))

    leaves = list(trace.leaves.values())
    handles = [node.register_hook(_untraced(look, node)) for node in trace.places]
    try:
        given = torch.autograd.grad(
            list(outputs), leaves, list(grads), retain_graph=True, allow_unused=True, materialize_grads=False
        )
    finally:
        for handle in handles:
            handle.remove()
    bad = [leaf for leaf, grad in zip(leaves, given) if grad is not None and not finite(grad)]
    if bad and not found:  # each of several uses was finite, and not their sum
        place = Place(trace.module_of(bad[0]), SUM)
        return place, at(place, "overflow")
    return found[0] if bad else None


def _untraced(look: Any, node: Any) -> Any:
    def hook(going: Gradients, coming: Gradients) -> None:
        with torch._C.DisableTorchFunction():
            look(node, going, coming)

    return hook
