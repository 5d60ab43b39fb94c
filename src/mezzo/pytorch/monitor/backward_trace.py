"""BackwardTrace: runs backward over a graph that was traced forward, and notes where gradients cease to be finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mezzo.core.finding import SUM, Maker, TensorFacts
from mezzo.pytorch.monitor import op_names
from mezzo.pytorch.monitor.events import Place
from mezzo.pytorch.monitor.forward_trace import ForwardTrace
from mezzo.pytorch.monitor.makers import BackwardMakers
from mezzo.pytorch.monitor.node_values import cause_of_slope, saved
from mezzo.pytorch.monitor.tensor_facts import facts, finite


@dataclass
class Backward:
    """What one run of backward showed.

    Args:
        finite: whether every gradient of a leaf was.
        produced: the first operation that made a gradient that isn't finite of ones that are.
        node: its node.
        cause: ``overflow`` or ``invalid``.
        inputs, outputs: the gradients that came in and went out, and what the operation had saved.
        passed: the operations that passed it on, in order.
        maker: of an overflow, who made the finite gradient that did not fit.
    """

    finite: bool = True
    produced: Place | None = None
    cause: str = "overflow"
    inputs: list[TensorFacts] = field(default_factory=list)
    outputs: list[TensorFacts] = field(default_factory=list)
    passed: list[Place] = field(default_factory=list)
    maker: Maker | None = None


def run(trace: ForwardTrace, outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Backward:
    """Backward from the outputs of a traced call to its leaves; no `.grad` changes.

    Args:
        trace: of the call.
        outputs: tensors on the graph, each with its gradient in `grads`, of its shape.
        grads: finite.
    """
    watch = _Watch(trace, outputs)
    leaves = list(trace.leaves.values())
    handles = [node.register_hook(watch.hook(node)) for node in trace.places]
    try:
        given = torch.autograd.grad(
            list(outputs), leaves, list(grads), retain_graph=True, allow_unused=True, materialize_grads=False
        )
    finally:
        for handle in handles:
            handle.remove()
    found = watch.found
    bad = [leaf for leaf, grad in zip(leaves, given) if grad is not None and not finite(grad)]
    found.finite = not bad
    if bad and found.produced is None:  # each of several uses was finite, and not their sum
        found.produced = Place(trace.module_of(bad[0]), SUM)
    return found


class _Watch:
    def __init__(self, trace: ForwardTrace, outputs: Sequence[Tensor]) -> None:
        self._trace = trace
        self._sent: set[Any] = set()
        # What backward begins with is sent by nobody that is seen, and is added to what comes from within.
        self._senders: Counter[Any] = Counter(output.grad_fn for output in outputs)
        self._makers = BackwardMakers()
        self.found = Backward()

    def hook(self, node: Any) -> Any:
        def look(going: tuple[Tensor | None, ...], coming: tuple[Tensor | None, ...]) -> None:
            with torch._C.DisableTorchFunction():
                self._look(node, going, coming)

        return look

    def _look(self, node: Any, going: Sequence[Tensor | None], coming: Sequence[Tensor | None]) -> None:
        bad_going = [grad is not None and not finite(grad) for grad in going]
        for (following, _), grad, bad in zip(node.next_functions, going, bad_going):
            self._senders[following] += grad is not None
            if bad:
                self._sent.add(following)
        bad_coming = any(grad is not None and not finite(grad) for grad in coming)
        place = self._trace.places[node]
        if not any(bad_going) and not bad_coming:
            self._makers.ran(node, place, going, coming)
            return
        if self.found.produced is not None:
            self.found.passed.append(place)
        elif not bad_coming:
            self.found.produced = place
            self._describe(node, going, coming)
        elif node not in self._sent:
            several = self._senders[node] > 1
            self.found.produced = Place(place.module, SUM if several else op_names.HOOK, place.line)
            self.found.cause = "overflow" if several else "invalid"
            self.found.outputs = [facts(g, SUM) for g in coming if g is not None][:3]

    def _describe(self, node: Any, going: Sequence[Tensor | None], coming: Sequence[Tensor | None]) -> None:
        found = self.found
        kept = saved(node)
        found.inputs = [facts(grad, "gradient of output") for grad in coming if grad is not None][:3] + kept
        found.outputs = [
            facts(grad, f"gradient of input {n}") for n, grad in enumerate(going) if grad is not None
        ][:3]
        place = self._trace.places[node]
        found.cause = cause_of_slope(node, place.op, kept, found.outputs, place.zeros)
        if found.cause == "overflow":
            made = self._makers.behind(node, place, coming)
            found.maker = None if made is None else made.told()
