"""The part of a loss's graph that no watched call holds: losses, penalties, arithmetic between models.

It is small as a rule, so every step's is watched while it runs: which node sent on a gradient that is not finite. What
went forward there is over by then. Where the loss itself isn't finite its nodes are asked for what they saved,
before backward frees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mezzo.core.finding import TensorFacts
from mezzo.pytorch.monitor import op_names
from mezzo.pytorch.monitor.backward_trace import SUM, saved
from mezzo.pytorch.monitor.kept_call import OF_CALL
from mezzo.pytorch.monitor.tensor_facts import facts, finite

MOST = 300
"""Nodes that are watched; of a larger part, those nearest to the loss."""


@dataclass
class OutsideEvent:
    """An operation outside that produced something not finite.

    Args:
        op: its name.
        cause: a key of `mezzo.core.finding.CAUSES`.
        inputs, outputs: as in `Finding`.
        passed: names of the operations that passed it on.
        sure: whether the values say it, and not only what is left over.
    """

    op: str
    cause: str
    inputs: list[TensorFacts] = field(default_factory=list)
    outputs: list[TensorFacts] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    sure: bool = True


def nodes(start: Sequence[Any]) -> Iterator[Any]:
    """The nodes from `start` down to those of watched calls and to leaves, which are left out."""
    seen: set[Any] = set()
    stack = list(start)
    while stack and len(seen) < MOST:
        node = stack.pop()
        if node is None or node in seen or hasattr(node, "variable") or OF_CALL in node.metadata:
            continue
        seen.add(node)
        yield node
        stack.extend(following for following, _ in node.next_functions)


class OutsideBackward:
    """Watches one backward in the nodes outside.

    Args:
        start: where they begin: the loss's node, and those that led into later calls.
        scale: how many times the gradients are too large.
    """

    def __init__(self, start: Sequence[Any], scale: Tensor | float) -> None:
        self._scale = scale
        self._sent: set[int] = set()
        self.event: OutsideEvent | None = None
        for node in nodes(start):
            node.register_hook(_Look(self, node))

    def look(self, node: Any, going: Sequence[Tensor | None], coming: Sequence[Tensor | None]) -> None:
        """A node has run."""
        bad = [grad is not None and not _surely_finite(grad) for grad in going]
        if not any(bad):
            return
        if self.event is not None:
            self.event.passed.append(op_names.of_node(node))
            return
        op = op_names.of_node(node)
        if any(grad is not None and not finite(grad) for grad in coming):
            self.event = OutsideEvent(
                SUM, "loss scale", outputs=[facts(g, "gradient of output") for g in coming if g is not None]
            )
            return
        kept = saved(node)
        outputs = [facts(grad, f"gradient of input {n}") for n, grad in enumerate(going) if grad is not None][
            :3
        ]
        inputs = [facts(grad, "gradient of output") for grad in coming if grad is not None][:3] + kept
        self.event = OutsideEvent(op, self._cause(node, op, coming, kept, outputs), inputs, outputs)

    def _cause(
        self,
        node: Any,
        op: str,
        coming: Sequence[Tensor | None],
        kept: Sequence[TensorFacts],
        outputs: Sequence[TensorFacts],
    ) -> str:
        scale = float(self._scale)
        if scale > 1.0 and self._is_finite_unscaled(node, coming, scale):
            return "loss scale"
        if any(one.nans for one in outputs) or (op in op_names.POLES and any(one.zeros for one in kept)):
            return "invalid"
        return "overflow"

    def _is_finite_unscaled(self, node: Any, coming: Sequence[Tensor | None], scale: float) -> bool:
        smaller = [
            None if grad is None else (grad.detach().double() / scale).to(grad.dtype) for grad in coming
        ]
        if any(grad is None for grad in smaller):
            return False
        run = node.apply if hasattr(node, "saved_tensors") else node
        try:
            with torch.no_grad():
                again = run(*smaller)
        except Exception:  # a node that can't be run by hand
            return False
        given = again if isinstance(again, tuple) else (again,)
        return all(grad is None or finite(grad) for grad in given)


class _Look:
    """The hook on a node; it must not hold the node, which holds it."""

    def __init__(self, watch: OutsideBackward, node: Any) -> None:
        self._watch = watch
        self._node = node

    def __call__(self, going: Sequence[Tensor | None], coming: Sequence[Tensor | None]) -> None:
        self._watch.look(self._node, going, coming)


def _surely_finite(grad: Tensor) -> bool:
    """Finite, told by one cheap pass: a sum in FP32 is finite only if every element is."""
    if grad.layout is torch.strided and grad.is_floating_point() and grad.dtype.itemsize > 1:
        total = grad.detach().sum(dtype=torch.float64 if grad.dtype is torch.float64 else torch.float32)
        if bool(torch.isfinite(total)):
            return True
    return finite(grad)


# ---------------------------------------------------------------------------------------------- forward


def forward(loss: Tensor) -> OutsideEvent:
    """Which operation outside made a loss that isn't finite: by what its nodes saved, so before backward.

    A node's value is known where it saved its result, or all that it was computed from. Blamed is the first, from the
    model on, whose value isn't finite; if it was given one that wasn't, or if none is known, the first unknown.
    """
    order = _towards_the_loss(loss)
    known = {node: _value(node) for node in order}
    good = {node: None if value is None else finite(value) for node, value in known.items()}
    culprit = next((node for node in order if good[node] is False), None)
    if culprit is not None and any(not one.finite for one in _inputs(culprit)):
        behind = [following for following, _ in culprit.next_functions if good.get(following, True) is None]
        culprit = _earliest_unknown(order, good, behind) or culprit
    if culprit is None:
        culprit = _earliest_unknown(order, good, [loss.grad_fn])
    if culprit is None:
        return OutsideEvent("", "invalid", outputs=[facts(loss, "output")], sure=False)
    op, kept, value = op_names.of_node(culprit), saved(culprit), known[culprit]
    cause = "invalid" if op in op_names.POLES else "overflow"
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
        [op_names.of_node(node) for node in after if good[node] is not True],
        sure=value is not None,
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


def _earliest_unknown(order: Sequence[Any], good: dict[Any, bool | None], ends: Sequence[Any]) -> Any:
    """Of the operations of unknown value that lead to `ends`, the one nearest to the model that computes something."""
    reached = set(nodes(ends))
    unknown = [node for node in order if node in reached and good[node] is None]
    return next(
        (node for node in unknown if op_names.of_node(node) not in _MOVES.split()),
        unknown[0] if unknown else None,
    )


_MOVES = """view unsafe_view squeeze unsqueeze expand permute transpose t slice select to_copy clone reshape alias index
split chunk unbind cat stack as_strided neg"""


def _inputs(node: Any) -> list[TensorFacts]:
    """Of what a node saved, that which its operation was given."""
    return [
        one for one in saved(node) if not one.name.startswith(("saved result", "saved output", "saved total"))
    ]


def _value(node: Any) -> Tensor | None:
    """What an operation returned, or None where its node doesn't tell."""
    try:
        for name in ("_saved_result", "_saved_output", "_saved_result0"):
            value = getattr(node, name, None)
            if isinstance(value, Tensor):
                return value
        return _computed_again(node)
    except Exception:  # not an operation that can be repeated from what it saved
        return None


_FORWARD = {"nll_loss": "nll_loss_forward", "nll_loss2d": "nll_loss2d_forward"}


def _computed_again(node: Any) -> Tensor | None:
    name = op_names.of_node(node)
    packet = getattr(torch.ops.aten, _FORWARD.get(name, name), None)
    if packet is None:
        return None
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments: dict[str, Any] = {}
        for argument in overload._schema.arguments:
            if hasattr(node, f"_saved_{argument.name}"):
                arguments[argument.name] = getattr(node, f"_saved_{argument.name}")
            elif not argument.has_default_value():
                break
        else:
            if "out" in arguments or not any(isinstance(v, Tensor) for v in arguments.values()):
                continue
            device = next(v for v in arguments.values() if isinstance(v, Tensor)).device.type
            with torch.no_grad(), torch.autocast(device, enabled=False):
                value = overload(**arguments)
            value = value[0] if isinstance(value, tuple) else value
            return value if isinstance(value, Tensor) else None
    return None
