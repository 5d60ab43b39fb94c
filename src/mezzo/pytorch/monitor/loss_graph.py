"""The part of a loss's graph that no watched call holds: losses, penalties, arithmetic between models.

It is small as a rule, so every step's is watched while it runs: which node sent on a gradient that is not finite. What
went forward there is over by then. Where the loss itself isn't finite its nodes are asked for what they saved,
before backward frees it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mezzo.core.finding import OUTSIDE, SUM, Maker, TensorFacts
from mezzo.pytorch.monitor.backward_trace import BackwardMakers, cause_of_slope, result, saved
from mezzo.pytorch.monitor.forward_trace import Event, Place, root
from mezzo.pytorch.monitor.operations import POLES, Line, facts, finite, op_of_node
from mezzo.pytorch.monitor.saved_call import OF_CALL, Sent

MOST = 300
"""Nodes that are watched; of a larger part, those nearest to the loss."""


@dataclass
class OutsideEvent:
    """An operation that produced something not finite, seen as it happened.

    Args:
        op: its name.
        cause: a key of `mezzo.core.finding.CAUSES`.
        inputs, outputs: as in `Finding`.
        passed: the operations that passed it on, as in `Finding`.
        sure: whether the values say it, and not only what is left over.
        module, line: where it is, if it was seen to go forward.
        maker: as in `Finding`, where operations were watched forward.
        node: of the graph that made it, where that is known.
        start: the loss's node, from which that graph goes down.
        recalled: whether the line is that of an earlier step.
    """

    op: str
    cause: str
    inputs: list[TensorFacts] = field(default_factory=list)
    outputs: list[TensorFacts] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    sure: bool = True
    module: str = OUTSIDE
    line: Line | None = None
    maker: Maker | None = None
    node: Any = None
    start: Any = None
    recalled: bool = False


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


def _calls_beneath(node: Any) -> list[tuple[int, int, int]]:
    """Of what a node makes: its number, the call whose output it goes to, and the place among that call's outputs."""
    found: list[tuple[int, int, int]] = []
    for made, (following, number) in enumerate(node.next_functions):
        if following is None or OF_CALL not in following.metadata:
            continue
        if (OF_CALL, number) in following.metadata:
            found.append((made, following.metadata[OF_CALL], following.metadata[OF_CALL, number]))
    return found


class OutsideBackward:
    """Watches one backward in the nodes outside.

    Args:
        start: where they begin: the loss's node, and those that led into later calls.
        scale: how many times the gradients are too large.
        places: node -> where it is, of those that were seen to go forward: these are watched within calls too.
    """

    def __init__(
        self, start: Sequence[Any], scale: Tensor | float, places: Mapping[Any, Place] | None = None
    ) -> None:
        self._scale = scale
        self._places = places
        self._start = start[0]
        self._unscaled: dict[tuple[Any, int], Tensor] = {}
        self.event: OutsideEvent | None = None
        self.trouble = ""
        self.of_calls: dict[int, dict[int, Sent]] = {}  # call -> place among its outputs -> what came to it
        seen = places is not None
        # One more pass over each gradient, so only where the step is slow anyway.
        self._makers = BackwardMakers(float(scale)) if seen else None
        self._handles = [
            node.register_hook(_Look(self, node, [] if seen else _calls_beneath(node)))
            for node in nodes(start, most=100_000 if seen else MOST, into_calls=seen)
        ]

    def undo(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unscaled.clear()

    def _place(self, node: Any) -> Place:
        known = None if self._places is None else self._places.get(node)
        return known or Place(OUTSIDE, op_of_node(node))

    def look(
        self,
        node: Any,
        going: Sequence[Tensor | None],
        coming: Sequence[Tensor | None],
        beneath: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        """A node has run.

        Args:
            node: which.
            going, coming: the gradients that it made, of those.
            beneath: of what it made, the number, and the call and the place among its outputs that it goes to.
        """
        is_finite = [grad is None or _surely_finite(grad) for grad in going]
        for number, of_call, output in beneath:
            grad = going[number]
            if grad is not None and grad.layout is torch.strided and is_finite[number]:
                self._send(of_call, output, grad, float(self._scale))
        if all(is_finite):
            if self._makers is not None and self.event is None:
                self._makers.ran(node, self._place(node), going, coming)
            return
        place = self._place(node)
        if self.event is not None:
            if self.event.cause == "loss scale":
                alarm = self._look_deeper(node, place, going, coming)
                if alarm is not None:
                    self.event = replace(alarm, start=self._start)
                    return
            self.event.passed.append(str(place))
            return
        self.event = replace(self._event(node, place, going, coming), start=self._start)

    def _send(self, of_call: int, output: int, grad: Tensor, scale: float) -> None:
        sent = self.of_calls.setdefault(of_call, {}).setdefault(output, Sent())
        sent.parts.append((grad.detach(), scale))

    def _event(
        self, node: Any, place: Place, going: Sequence[Tensor | None], coming: Sequence[Tensor | None]
    ) -> OutsideEvent:
        inputs = [facts(grad, "gradient of output") for grad in coming if grad is not None][:3]
        if not all(one.finite for one in inputs):
            cause = "loss scale" if float(self._scale) > 1.0 else "overflow"
            return OutsideEvent(SUM, cause, outputs=inputs, module=place.module, line=place.line)
        kept = saved(node)
        outputs = [facts(grad, f"gradient of input {n}") for n, grad in enumerate(going) if grad is not None]
        cause = "loss scale"
        scale = float(self._scale)
        if scale <= 1.0 or not self._goes_on(node, [_over(grad, scale) for grad in coming], going):
            cause = cause_of_slope(node, place.op, kept, outputs, place.zeros)
        if place.event is not None and cause != "loss scale" and not place.event.meant:
            first, passed = root(place.event)
            if first.place is not place or first.kind != "invalid":
                return of_forward(first, passed, self._places)
        made = None if self._makers is None else self._makers.behind(node, place, coming)
        maker = made.told() if made is not None and cause == "overflow" else None
        return OutsideEvent(
            place.op,
            cause,
            inputs + kept,
            outputs[:3],
            module=place.module,
            line=place.line,
            maker=maker,
            node=node,
        )

    def _look_deeper(
        self, node: Any, place: Place, going: Sequence[Tensor | None], coming: Sequence[Tensor | None]
    ) -> OutsideEvent | None:
        """With the loss scale out of the way: whether this node has another fault."""
        unscaled = [self._unscaled.pop((node, number), None) for number in range(len(coming))]
        if all(grad is None for grad in unscaled):
            return None
        if self._goes_on(node, unscaled, going):
            return None
        kept = saved(node)
        cause = cause_of_slope(node, place.op, kept, [], place.zeros)
        inputs = [facts(grad, "gradient of output") for grad in unscaled if grad is not None] + kept
        return OutsideEvent(place.op, cause, inputs, module=place.module, line=place.line, node=node)

    def _goes_on(self, node: Any, grads: Sequence[Tensor | None], going: Sequence[Tensor | None]) -> bool:
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
                again = run(*grads)
        except Exception:  # a node that can't be run by hand
            return False
        given = again if isinstance(again, tuple) else (again,)
        if not all(grad is None or finite(grad) for grad in given):
            return False
        beneath = (
            {}
            if self._places is not None
            else {made: (call, output) for made, call, output in _calls_beneath(node)}
        )
        for place, (grad, (following, number)) in enumerate(zip(given, node.next_functions)):
            if grad is None or following is None:
                continue
            if place not in beneath:
                self._unscaled[following, number] = grad
            elif (made := going[place]) is None or not _surely_finite(made):
                of_call, output = beneath[place]
                self._send(of_call, output, grad, 1.0)
        return True


class _Look:
    """The hook on a node."""

    def __init__(self, watch: OutsideBackward, node: Any, beneath: Sequence[tuple[int, int, int]]) -> None:
        self._watch = watch
        self._node = node
        self._beneath = beneath

    def __call__(self, going: Sequence[Tensor | None], coming: Sequence[Tensor | None]) -> None:
        try:
            with torch._C.DisableTorchFunction():
                self._watch.look(self._node, going, coming, self._beneath)
        except Exception as error:  # the backward is the script's: it must go on
            self._watch.trouble = f"{type(error).__name__}: {error}"


def of_forward(
    first: Event, passed: Sequence[Event], places: Mapping[Any, Place] | None = None, start: Any = None
) -> OutsideEvent:
    """As an event of what was seen to go forward.

    Args:
        first: what produced it.
        passed: what passed it on.
        places: node -> where it is.
        start: the loss's node.
    """
    return OutsideEvent(
        first.place.op,
        "overflow" if first.kind == "passed" else first.kind,
        first.inputs,
        first.outputs,
        [str(one.place) for one in passed],
        module=first.place.module,
        line=first.place.line,
        maker=first.maker,
        # An operation's own result comes before the casts of what it was given.
        node=next((node for node, place in (places or {}).items() if place is first.place), None),
        start=start,
    )


def _over(grad: Tensor | None, scale: float) -> Tensor | None:
    return None if grad is None else (grad.detach().double() / scale).to(grad.dtype)


def _surely_finite(grad: Tensor) -> bool:
    """Finite, told by one cheap pass: a sum in FP32 is finite only if every element is."""
    if grad.layout is torch.strided and grad.is_floating_point() and grad.dtype.itemsize > 1:
        wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
        total = grad if grad.numel() == 1 else grad.detach().sum(dtype=wide)
        if math.isfinite(total.item()):  # torch.isfinite is four operations
            return True
    return finite(grad)


# ---------------------------------------------------------------------------------------------- forward


def loss_event(loss: Tensor) -> OutsideEvent:
    """Which operation outside made a loss that isn't finite: by what its nodes saved, so before backward.

    A node's value is known where it saved its result, or all that it was computed from. Blamed is the first, from the
    model on, whose value isn't finite; if it was given one that wasn't, or if none is known, the first unknown.
    """
    order = _towards_the_loss(loss)
    known = {node: result(node) for node in order}
    good = {node: None if value is None else finite(value) for node, value in known.items()}
    culprit = next((node for node in order if good[node] is False), None)
    if culprit is not None and (not _inputs(culprit) or any(not one.finite for one in _inputs(culprit))):
        behind = [following for following, _ in culprit.next_functions if good.get(following, True) is None]
        culprit = _earliest_unknown(order, good, behind) or culprit
    if culprit is None:
        culprit = _earliest_unknown(order, good, [loss.grad_fn])
    if culprit is None:
        return OutsideEvent("", "invalid", outputs=[facts(loss, "output")], sure=False)
    op, kept, value = op_of_node(culprit), saved(culprit), known[culprit]
    cause = "invalid" if op in POLES else "overflow"
    if bool(torch.isnan(loss.detach() if value is None else value).any()):
        cause = "invalid"
    if any(not one.finite for one in _inputs(culprit)):
        leaves = [getattr(following, "variable", None) for following, _ in culprit.next_functions]
        cause = "state" if any(leaf is not None and not finite(leaf) for leaf in leaves) else "input"
    after = order[order.index(culprit) + 1 :]
    return OutsideEvent(
        op,
        cause,
        kept,
        [facts(loss if value is None else value, "output")],
        [str(Place(OUTSIDE, op_of_node(node))) for node in after if good[node] is not True],
        sure=value is not None and bool(_inputs(culprit)) and all(one.finite for one in _inputs(culprit)),
        node=culprit,
        start=loss.grad_fn,
    )


def _towards_the_loss(loss: Tensor) -> list[Any]:
    """The nodes outside, each after those that its operation was given results of."""
    inside = set(nodes([loss.grad_fn]))
    order: dict[Any, None] = {}
    stack: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order[node] = None
        elif node in inside:
            inside.discard(node)
            stack.append((node, True))
            stack.extend((following, False) for following, _ in node.next_functions)
    return list(order)


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
_SIZES = ("size", "numel", "stride", "shape")


class KnownLines:
    """Place in a graph -> line and module; None where two were seen."""

    def __init__(self) -> None:
        self._of: dict[Hashable, tuple[Line, str] | None] = {}

    def tell(self, event: OutsideEvent, direction: str, lines: Sequence[Line | None]) -> None:
        """Learn the line of an event that was watched live, or give one that was not the line that was learnt.

        Args:
            event: of an operation outside.
            direction: forward or backward.
            lines: from where the step's models were called, and the step.
        """
        if event.cause == "loss scale" or event.node is None:
            return
        graph = _graph(event.start, event.node)
        if graph is None:
            return
        key = (direction, event.cause, tuple(lines), graph)
        if event.line is None:
            known = self._of.get(key)
            if known is not None:
                (event.line, event.module), event.recalled = known, True
            return
        new = event.line, event.module
        self._of[key] = new if self._of.get(key, new) == new else None


def _graph(start: Any, node: Any) -> Hashable | None:
    """What a graph from a loss to the models' calls is made of, and where in it a node is; None if it is not in it."""
    numbers: dict[Any, int] = {start: 0}
    stack, made = [start], []
    while stack:
        one = stack.pop()
        edges: list[Hashable] = []
        for following, place in one.next_functions:
            if following is None or hasattr(following, "variable") or OF_CALL in following.metadata:
                edges.append(_end(following, place))
                continue
            if following not in numbers:
                numbers[following] = len(numbers)
                stack.append(following)
            edges.append((numbers[following], place))
        made.append((numbers[one], one.name(), _settings(one), tuple(edges)))
        if len(numbers) > _MOST:
            return None
    return (numbers[node], tuple(made)) if node in numbers else None


def _end(node: Any, place: int) -> Hashable:
    """What a graph ends at: a constant, a leaf, an output of a model's call."""
    if node is None:
        return "constant"
    return "leaf" if hasattr(node, "variable") else ("call", node.metadata.get((OF_CALL, place), place))


def _settings(node: Any) -> Hashable:
    """The numbers that an operation was given beside its tensors."""
    found: list[Hashable] = []
    for name in dir(node):
        if not name.startswith("_saved_") or any(word in name for word in _SIZES):
            continue
        try:
            value = getattr(node, name)
        except Exception:  # a tensor that backward has let go
            continue
        if isinstance(value, (bool, int, float, str)):
            found.append((name, value))
        elif isinstance(value, (list, tuple)) and all(isinstance(one, (bool, int, float)) for one in value):
            found.append((name, tuple(value)))
    return op_of_node(node), tuple(found)
