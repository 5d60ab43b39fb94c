"""BackwardTrace: where the gradients of a backward pass cease to be finite, by hooks on the nodes of the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mezzo.core.overflow import OUTSIDE, SUM, OverflowReport, TensorFacts
from mezzo.pytorch.monitor import operations as ops
from mezzo.pytorch.monitor.forward_trace import ForwardTrace, Operation
from mezzo.pytorch.monitor.replay import OF_CALL

Gradients = Sequence[Tensor | None]

MOST = 300
"""Nodes of the loss's graph that are watched: those nearest to the loss."""


def report_at(
    place: Operation, cause: str, inputs: Sequence[Any] = (), outputs: Sequence[Any] = ()
) -> OverflowReport:
    """A report on backward; inputs and outputs are facts."""
    line = ops.line_text(place.line)
    return OverflowReport(cause, place.module, place.op, "backward", [*inputs], [*outputs], line=line)


class BackwardTrace:
    """Watches nodes of one backward pass (`whole`: all) for the first to make a gradient that is not finite."""

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
        self._senders: Counter[Any] = Counter(starts)
        self.found: OverflowReport | None = None
        self.trouble = ""  # an error of looking
        self._handles = [node.register_hook(partial(self._hook, node)) for node in nodes]

    def undo(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def sent_to(self, call: int) -> int:
        """How many gradients the nodes have sent to one of those that a saved call, by its number, returned."""
        return max((n for node, n in self._senders.items() if node.metadata.get(OF_CALL) == call), default=0)

    def _hook(self, node: Any, going: Gradients, coming: Gradients) -> None:
        try:
            with torch.DisableTorchFunction():
                self._look(node, going, coming)
        except Exception as error:  # the script's backward must go on
            self.trouble = ops.in_one_line(error)

    def _look(self, node: Any, going: Gradients, coming: Gradients) -> None:
        edges = zip(node.next_functions, going)
        sent = [(to, grad) for (to, _), grad in edges if to is not None and grad is not None]
        self._senders.update(to for to, _ in sent)
        bad = {to for to, grad in sent if not ops.finite(grad)}
        self._sent_bad |= bad
        if not bad:
            return
        if self.found is not None:
            self.found.propagators.append(str(self._named(node)))
        elif all(grad is None or ops.finite(grad) for grad in coming):
            self.found = self._slope(node, going, coming)
        elif node not in self._sent_bad:
            self.found = self._arrived(node, coming)

    def _named(self, node: Any) -> Operation:
        """The operation of a node; a cast, which autocast may have made, has the name of what reads its result."""
        place = self._place(node)
        return next(self._readers(node), place) if place.op == "to_copy" else place

    def _readers(self, node: Any) -> Iterator[Operation]:
        """The operations that read a node's result, and sent it a gradient."""
        senders = (one for one in self._senders if any(other is node for other, _ in one.next_functions))
        return map(self._place, senders)

    def _gradient(self, number: int, following: Any) -> str:
        """The name of a gradient that a node sends; a parameter's, which may pass casts, has the parameter's."""
        while following is not None and ops.op_of_node(following) in ("to_copy", "t"):
            following = following.next_functions[0][0]
        name = self._place(following).op if self._whole and hasattr(following, "variable") else ""
        return f"gradient of {name or f'input {number}'}"

    def _slope(self, node: Any, going: Gradients, coming: Gradients) -> OverflowReport | None:
        """The node made gradients that are not finite, `going`, of ones that are, `coming`."""
        if node.name() == "CompiledFunctionBackward":  # many operations, which can't be run by hand
            self.trouble = "a compiled function made a gradient that is not finite"
            return None
        own, place, scale = self._place(node), self._named(node), float(self._scale)
        by_scale = scale > 1.0 and _is_finite_without(scale, node, coming)
        if not by_scale and (before := place.absorbed()):
            return before
        kept = _saved(node)
        names = [self._gradient(n, following) for n, (following, _) in enumerate(node.next_functions)]
        # A cast inside of an operation, or before it: the operation itself has made what comes to it.
        within = place.op != own.op or own in self._readers(node)
        came = "gradient of output" if not within else names[0] if len(names) == 1 else "gradient"
        by = 1.0 if by_scale else scale
        outputs = [ops.facts(grad / by, name) for name, grad in zip(names, going) if grad is not None]
        cause = "loss scale" if by_scale else _cause(own.op, kept, outputs)
        inputs = [ops.facts(grad / by, came) for grad in coming if grad is not None][:3] + kept
        return report_at(place, cause, inputs, outputs[:3])

    def _arrived(self, node: Any, coming: Gradients) -> OverflowReport | None:
        """The gradient that came to the node is not finite, and those sent to it are: a sum, or a hook's effect."""
        place, several = self._named(node), self._senders[node] > 1
        if not several and not self._whole:  # it came from within a call
            return None
        cause = "overflow" if float(self._scale) <= 1.0 else "loss scale"  # so few parts, each finite
        cause = cause if several else "invalid"
        made = [ops.facts(grad, SUM) for grad in coming if grad is not None][:3]
        return report_at(Operation(place.module, SUM if several else ops.HOOK, place.line), cause, (), made)


def _saved(node: Any) -> list[TensorFacts]:
    """Facts of the floating tensors that a node saved in forward, at most four."""
    found: list[TensorFacts] = []
    for name in dir(node):
        if name.startswith("_saved_"):
            with suppress(RuntimeError):  # freed, changed in place, or a checkpoint's that is gone
                value = getattr(node, name)
                if isinstance(value, Tensor) and value.is_floating_point():
                    found.append(ops.facts(value, f"saved {name.removeprefix('_saved_')}"))
    return found[:4]


def _cause(op: str, kept: list[TensorFacts], outputs: list[TensorFacts]) -> str:
    """``invalid`` if an operation has no finite slope where it was, ``overflow`` if it is one beyond the format."""
    if op in ops.POLES:
        # The divisor of `div` is `other`. FP32 holds any slope but that at a pole itself.
        blamed = [one for one in kept if op != "div" or one.name != "saved self"]
        pole = not kept or any(one.zeros for one in blamed)
        return "invalid" if pole or all(one.format == "fp32" for one in outputs) else "overflow"
    # Inside of an operation of many steps NaN comes of an overflow: inf - inf.
    invalid = op == ops.HOOK or (op not in ops.COMPOSED and any(one.nans for one in outputs))
    return "invalid" if invalid else "overflow"


def _is_finite_without(scale: float, node: Any, coming: Gradients) -> bool:
    """Whether a node, run by hand on gradients without the loss scale, makes finite ones."""
    run = node.apply if hasattr(node, "saved_tensors") else node
    try:
        with torch.no_grad():
            made = run(*[grad if grad is None else ops.over(grad, scale) for grad in coming])
    except (RuntimeError, TypeError):  # a node that can't be run by hand
        return False
    return all(grad is None or ops.finite(grad) for grad in (made if isinstance(made, tuple) else (made,)))


def replay_backward(trace: ForwardTrace, pairs: Sequence[tuple[Tensor, Tensor]]) -> OverflowReport | None:
    """The first operation of a traced call's backward that makes a gradient not finite, or None; keeps `.grad`."""
    outputs, grads = [output for output, _ in pairs], [grad for _, grad in pairs]
    starts = [output.grad_fn for output in outputs]
    watch = BackwardTrace(trace.operations, starts, trace.place_of)
    leaves = list(trace.leaves.values())
    try:
        given = torch.autograd.grad(outputs, leaves, grads, retain_graph=True, allow_unused=True)
    finally:
        watch.undo()
    if watch.trouble:
        raise RuntimeError(watch.trouble)
    bad = [leaf for leaf, grad in zip(trace.leaves, given) if grad is not None and not ops.finite(grad)]
    if bad and watch.found is None:  # each of several uses was finite, and not their sum
        return report_at(Operation(trace.place_of(bad[0]).module, SUM), "overflow")
    return watch.found if bad else None


def watch_loss(starts: Sequence[Any], scale: Tensor | float, live: ForwardTrace | None) -> BackwardTrace:
    """Watch one backward from the loss's node, within calls too if its forward pass was traced `live`."""
    return BackwardTrace(
        _nodes(starts, most=100_000 if live else MOST, into_calls=live is not None),
        starts[:1],
        live.place_of if live else lambda node: Operation(OUTSIDE, ops.op_of_node(node)),
        scale=scale,
        whole=live is not None,
    )


def _nodes(starts: Sequence[Any], *, most: int, into_calls: bool) -> Iterator[Any]:
    """The nodes from `starts` down to those of saved calls and to leaves, which are left out."""
    seen: set[Any] = set()
    stack = list(starts)
    while stack and len(seen) < most:
        node = stack.pop()
        if node is None or node in seen or hasattr(node, "variable"):
            continue
        if not into_calls and OF_CALL in node.metadata:
            continue
        seen.add(node)
        yield node
        stack.extend(following for following, _ in node.next_functions)
