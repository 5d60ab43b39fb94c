"""The part of a loss's graph that no watched call holds: losses, penalties, arithmetic between models.

It is small as a rule, so every step's is watched while it runs: which node sent on a gradient that is not finite. What
went forward there is over by then. Where the loss itself isn't finite its nodes are asked for what they saved,
before backward frees it. Neither tells a line of the user's; `KnownLines` keeps those that a live watch told.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import Any

import torch
from torch import Tensor

from mezzo.core.finding import OUTSIDE, SUM, Finding, TensorFacts
from mezzo.pytorch.monitor.backward_trace import BackwardMakers, Gradients, at, result, saved, slope_finding
from mezzo.pytorch.monitor.forward_trace import Event, Place, absorbed, finding_of
from mezzo.pytorch.monitor.operations import POLES, Line, facts, finite, op_of_node, over
from mezzo.pytorch.monitor.saved_call import OF_CALL, Uses

MOST = 300
"""Nodes that are watched; of a larger part, those nearest to the loss."""


@dataclass
class LossEvent:
    """An operation that produced something not finite, seen as it happened.

    Args:
        finding: what is told of it.
        node: of the graph that made it, where that is known.
        start: the loss's node, from which that graph goes down.
        sure: whether the values say it, and not only what is left over.
    """

    finding: Finding
    node: Any = None
    start: Any = None
    sure: bool = True


def nodes(start: Sequence[Any], *, most: int = MOST, into_calls: bool = False) -> Iterator[Any]:
    """The nodes from `start` down to those of watched calls and to leaves, which are left out."""
    seen: set[Any] = set()
    stack = list(start)
    while stack and len(seen) < most:
        node = stack.pop()
        if node is None or node in seen or hasattr(node, "variable"):
            continue
        if not into_calls and OF_CALL in node.metadata:
            continue
        seen.add(node)
        yield node
        stack.extend(following for following, _ in node.next_functions)


class LossGraphWatch:
    """Watches one backward in the loss's graph.

    Args:
        start: where its nodes begin: the loss's node, and those that led into later calls.
        scale: how many times the gradients are too large.
        places: node -> where it is, of those that were seen to go forward: these are watched within calls too.

    Attributes:
        event: the first that made a gradient that isn't finite.
        uses: call -> place among its outputs -> what came to it.
    """

    def __init__(
        self, start: Sequence[Any], scale: Tensor | float, places: Mapping[Any, Place] | None = None
    ) -> None:
        self._scale, self._places, self._start = scale, places, start[0]
        self._unscaled: dict[tuple[Any, int], Tensor] = {}
        self.event: LossEvent | None = None
        self.uses: dict[int, dict[int, Uses]] = {}
        seen = places is not None
        # One more pass over each gradient, so only where the step is slow anyway.
        self._makers = BackwardMakers(float(scale)) if seen else None
        self._handles = [
            node.register_hook(self._hook(node))
            for node in nodes(start, most=100_000 if seen else MOST, into_calls=seen)
        ]

    def undo(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unscaled.clear()

    def _hook(self, node: Any) -> Any:
        beneath = self._calls_beneath(node)

        def look(going: Gradients, coming: Gradients) -> None:
            with suppress(Exception), torch._C.DisableTorchFunction():  # the script's backward must go on
                self._look(node, going, coming, beneath)

        return look

    def _calls_beneath(self, node: Any) -> dict[int, tuple[int, int]]:
        """The number of what a node makes -> the call whose output it goes to, and which of its outputs."""
        return {
            made: (following.metadata[OF_CALL], following.metadata[OF_CALL, number])
            for made, (following, number) in enumerate(node.next_functions)
            if self._places is None and following is not None and (OF_CALL, number) in following.metadata
        }

    def _look(
        self, node: Any, going: Gradients, coming: Gradients, beneath: Mapping[int, tuple[int, int]]
    ) -> None:
        is_finite = [grad is None or _surely_finite(grad) for grad in going]
        for number, output in beneath.items():
            grad = going[number]
            if grad is not None and grad.layout is torch.strided and is_finite[number]:
                self._used(output, grad, float(self._scale))
        if all(is_finite) and (self._makers is None or self.event is not None):
            return
        place = (self._places or {}).get(node) or Place(OUTSIDE, op_of_node(node))
        if all(is_finite):
            if self._makers is not None:
                self._makers.ran(node, place, going, coming)
        elif self.event is None:
            self.event = replace(self._event(node, place, going, coming), start=self._start)
        else:
            deeper = None
            if self.event.finding.cause == "loss scale":
                deeper = self._look_deeper(node, place, going, coming)
            if deeper is None:
                self.event.finding.propagators.append(str(place))
            else:
                self.event = LossEvent(deeper, node, self._start)

    def _used(self, output: tuple[int, int], grad: Tensor, scale: float) -> None:
        call, number = output
        self.uses.setdefault(call, {}).setdefault(number, []).append((grad.detach(), scale))

    def _event(self, node: Any, place: Place, going: Gradients, coming: Gradients) -> LossEvent:
        scale = float(self._scale)
        if not all(grad is None or finite(grad) for grad in coming):
            cause = "loss scale" if scale > 1.0 else "overflow"
            made = [facts(grad, "gradient of output") for grad in coming if grad is not None][:3]
            return LossEvent(at(Place(place.module, SUM, place.line), cause, outputs=made, how="live"))
        by_scale = scale > 1.0 and self._goes_on(
            node, [grad if grad is None else over(grad, scale) for grad in coming], going
        )
        cause = "loss scale" if by_scale else ""
        finding = slope_finding(node, place, going, coming, self._makers, cause=cause, how="live")
        before = None if by_scale else absorbed(place)
        return LossEvent(finding, node) if before is None else of_forward(*before, self._places)

    def _look_deeper(self, node: Any, place: Place, going: Gradients, coming: Gradients) -> Finding | None:
        """With the loss scale out of the way: whether this node has another fault."""
        unscaled = [self._unscaled.pop((node, number), None) for number in range(len(coming))]
        if all(grad is None for grad in unscaled) or self._goes_on(node, unscaled, going):
            return None
        return slope_finding(node, place, (), unscaled, None, how="live")

    def _goes_on(self, node: Any, grads: Gradients, going: Gradients) -> bool:
        """Run a node by hand on unscaled gradients, and hand on what it makes of them; False if that isn't finite.

        Args:
            node: which.
            grads: what came to it, unscaled.
            going: what it made of what did come, some of which was handed on already.
        """
        if any(grad is None for grad in grads):
            return False
        run = node.apply if hasattr(node, "saved_tensors") else node
        try:
            with torch.no_grad():
                made = run(*grads)
        except Exception:  # a node that can't be run by hand
            return False
        given = made if isinstance(made, tuple) else (made,)
        if not all(grad is None or finite(grad) for grad in given):
            return False
        beneath = self._calls_beneath(node)
        for place, (grad, (following, number)) in enumerate(zip(given, node.next_functions)):
            if grad is None or following is None:
                continue
            if place not in beneath:
                self._unscaled[following, number] = grad
            elif (came := going[place]) is None or not _surely_finite(came):
                self._used(beneath[place], grad, 1.0)
        return True


def of_forward(
    first: Event, passed: Sequence[Event], places: Mapping[Any, Place] | None = None, start: Any = None
) -> LossEvent:
    """As an event of what was seen to go forward: the root of an event, by the nodes' places."""
    # An operation's own result comes before the casts of what it was given.
    node = next((node for node, place in (places or {}).items() if place is first.place), None)
    return LossEvent(finding_of(first, passed, "live"), node, start)


def _surely_finite(grad: Tensor) -> bool:
    """Finite, told by one cheap pass: a sum in FP32 is finite only if every element is."""
    if grad.layout is torch.strided and grad.is_floating_point() and grad.dtype.itemsize > 1:
        wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
        total = grad if grad.numel() == 1 else grad.detach().sum(dtype=wide)
        if math.isfinite(total.item()):  # torch.isfinite is four operations
            return True
    return finite(grad)


def loss_event(loss: Tensor) -> LossEvent:
    """Which operation made a loss that isn't finite: by what its graph's nodes saved, so before backward.

    A node's value is known where it saved its result, or all that it was computed from. Blamed is the first, from the
    model on, whose value isn't finite; if it was given one that wasn't, or if none is known, the first unknown.
    """
    within = dict.fromkeys(nodes([loss.grad_fn]))
    # Each after those that its operation was given results of.
    order = [*TopologicalSorter({node: _given(node, within) for node in within}).static_order()]
    known = {node: result(node) for node in order}
    good = {node: None if value is None else finite(value) for node, value in known.items()}
    culprit = next((node for node in order if good[node] is False), None)
    if culprit is not None and (not _inputs(culprit) or any(not one.finite for one in _inputs(culprit))):
        behind = [following for following, _ in culprit.next_functions if good.get(following, True) is None]
        culprit = _earliest_unknown(order, good, behind) or culprit
    if culprit is None:
        culprit = _earliest_unknown(order, good, [loss.grad_fn])
    left_over = "the operation is what is left over, not what was seen"
    if culprit is None:
        told = Finding("invalid", OUTSIDE, outputs=[facts(loss, "output")], how="live", note=left_over)
        return LossEvent(told, sure=False)
    op, value, given = op_of_node(culprit), known[culprit], _inputs(culprit)
    cause = "invalid" if op in POLES else "overflow"
    if bool(torch.isnan(loss.detach() if value is None else value).any()):
        cause = "invalid"
    if any(not one.finite for one in given):
        leaves = [getattr(following, "variable", None) for following, _ in culprit.next_functions]
        cause = "state" if any(leaf is not None and not finite(leaf) for leaf in leaves) else "input"
    after = order[order.index(culprit) + 1 :]
    sure = value is not None and bool(given) and all(one.finite for one in given)
    finding = Finding(
        cause,
        OUTSIDE,
        op,
        inputs=saved(culprit),
        outputs=[facts(loss if value is None else value, "output")],
        propagators=[str(Place(OUTSIDE, op_of_node(node))) for node in after if good[node] is not True],
        how="live",
        note="" if sure else left_over,
    )
    return LossEvent(finding, culprit, loss.grad_fn, sure)


def _given(node: Any, within: Collection[Any]) -> list[Any]:
    return [following for following, _ in node.next_functions if following in within]


def _earliest_unknown(order: Sequence[Any], good: Mapping[Any, bool | None], ends: Sequence[Any]) -> Any:
    """Of the operations of unknown value that lead to `ends`, the one nearest to the model that computes something."""
    reached = set(nodes(ends))
    unknown = [node for node in order if node in reached and good[node] is None]
    computes = (node for node in unknown if op_of_node(node) not in _MOVES)
    return next(computes, unknown[0] if unknown else None)


_MOVING = """view unsafe_view squeeze unsqueeze expand permute transpose t slice select to_copy clone reshape
alias index split chunk unbind cat stack as_strided neg"""
_MOVES = frozenset(_MOVING.split())


def _inputs(node: Any) -> list[TensorFacts]:
    """Of what a node saved, that which its operation was given."""
    return [
        one for one in saved(node) if not one.name.startswith(("saved result", "saved output", "saved total"))
    ]


_MOST = 1000  # nodes of a graph that are compared; a larger one is not known again


class KnownLines:
    """The user's lines of operations in the loss's graph, kept from steps that were watched live.

    Where the node at the same place of the same graph was watched before, its line is said again, and nobody has to
    watch for it again. The same graph is: the same operations, wired in the same way, between calls of models and a
    step on the same lines. All else is another fault.
    """

    def __init__(self) -> None:
        self._of: dict[Hashable, tuple[str, str] | None] = {}  # None: two lines were seen

    def tell(self, event: LossEvent, lines: Sequence[Line | None]) -> None:
        """Learn the line of an event that was watched live, or give one that was not the line that was learnt.

        Args:
            event: of an operation.
            lines: from where the step's models were called, and the step.
        """
        told = event.finding
        graph = None if event.node is None else _graph(event.start, event.node)
        if told.cause == "loss scale" or graph is None:
            return
        key = (told.direction, told.cause, tuple(lines), graph)
        new = told.line, told.module
        if told.line:
            self._of[key] = new if self._of.get(key, new) == new else None
        elif (known := self._of.get(key)) is not None:
            note = "the line is that of an earlier overflow at the same place of the same graph"
            note = "; ".join(filter(None, (told.note, note)))
            event.finding = replace(told, line=known[0], module=known[1], note=note)


def _graph(start: Any, node: Any) -> Hashable | None:
    """What a graph from a loss to the models' calls is made of, and where in it a node is; None if it is not in it."""
    numbers: dict[Any, int] = {start: 0}
    stack, made = [start], []
    while stack:
        one = stack.pop()
        edges: list[Hashable] = []
        for following, place in one.next_functions:
            if following is None:
                edges.append("constant")
            elif hasattr(following, "variable"):
                edges.append("leaf")
            elif OF_CALL in following.metadata:
                edges.append(("call", following.metadata.get((OF_CALL, place), place)))
            else:
                if following not in numbers:
                    numbers[following] = len(numbers)
                    stack.append(following)
                edges.append((numbers[following], place))
        made.append((numbers[one], one.name(), tuple(edges)))
        if len(numbers) > _MOST:
            return None
    return (numbers[node], tuple(made)) if node in numbers else None
