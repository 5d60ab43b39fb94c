"""The part of a loss's graph that no watched call holds: losses, penalties, arithmetic between models.

It is small as a rule, so every step's is watched while backward runs. What went forward there is over by then. Where
the loss itself isn't finite its nodes are asked for what they saved, before backward frees it. Neither tells a line of
the user's; `KnownLines` keeps those that a live watch told.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from typing import Any

import torch
from torch import Tensor

from mezzo.core.overflow import OUTSIDE, OverflowReport
from mezzo.pytorch.monitor.backward_trace import BackwardTrace, Found, result, saved
from mezzo.pytorch.monitor.forward_trace import Operation, finding_of
from mezzo.pytorch.monitor.operations import POLES, Line, facts, finite, op_of_node
from mezzo.pytorch.monitor.replay import OF_CALL

MOST = 300
"""Nodes that are watched; of a larger part, those nearest to the loss."""


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


def watch_loss(
    start: Sequence[Any], scale: Tensor | float, operations: Mapping[Any, Operation] | None
) -> BackwardTrace:
    """Watch one backward in the loss's graph.

    Args:
        start: where its nodes begin: the loss's node, and those that led into later calls.
        scale: how many times the gradients are too large.
        operations: of nodes that were seen to go forward: these are watched within calls too. None: unknown.
    """
    live = operations is not None
    seen = operations or {}
    return BackwardTrace(
        nodes(start, most=100_000 if live else MOST, into_calls=live),
        start[:1],
        lambda node: seen.get(node) or Operation(OUTSIDE, op_of_node(node)),
        scale=scale,
        whole=live,
    )


def seen_forward(first: Operation, passed: Sequence[Operation], operations: Mapping[Any, Operation]) -> Found:
    """What was seen to go forward: the root of an operation, with the node that it made."""
    # An operation's own result comes before the casts of what it was given.
    node = next((node for node, operation in operations.items() if operation is first), None)
    return Found(finding_of(first, passed), node)


def found_in_loss(loss: Tensor) -> Found:
    """Which operation made a loss that isn't finite: by what its graph's nodes saved, so before backward.

    A node's value is known where it saved its result, or all that it was computed from. The first one, from the model
    on, that isn't finite is reported if what it was given is known to be finite, or is a leaf's. Otherwise the
    operation can't be told, and the cause is ``loss``.
    """
    within = dict.fromkeys(nodes([loss.grad_fn]))
    edges = {
        node: [following for following, _ in node.next_functions if following in within] for node in within
    }
    for node in TopologicalSorter(
        edges
    ).static_order():  # each after those that its operation was given results of
        value = result(node)
        if value is not None and not finite(value):
            break
    else:
        return _unnamed(loss)
    op, kept = op_of_node(node), saved(node)
    results = ("saved result", "saved output", "saved total")
    given = [one for one in kept if not one.name.startswith(results)]
    cause = "invalid" if op in POLES or bool(torch.isnan(value).any()) else "overflow"
    if not all(one.finite for one in given):
        leaves = [getattr(following, "variable", None) for following, _ in node.next_functions]
        cause = "state" if any(leaf is not None and not finite(leaf) for leaf in leaves) else ""
    if not given or not cause:
        return _unnamed(loss)
    return Found(OverflowReport(cause, OUTSIDE, op, inputs=kept, outputs=[facts(value, "output")]), node)


def _unnamed(loss: Tensor) -> Found:
    note = (
        "its graph does not tell which operation made it so; the next steps are watched for that, if possible"
    )
    return Found(OverflowReport("loss", OUTSIDE, outputs=[facts(loss, "output")], note=note))


class KnownLines:
    """The user's lines of operations in the loss's graph, kept from steps that were watched live.

    Where the node at the same place of the same graph was watched before, its line is reported again, and later steps
    are not watched for it. The same graph has the same operations in the same order, between calls of models and a step
    on the same lines.
    """

    def __init__(self) -> None:
        self._of: dict[Hashable, tuple[str, str] | None] = {}  # None: two lines were seen

    def tell(self, found: Found, lines: Sequence[Line | None]) -> None:
        """Learn the line of what was watched live, or give what was not the line that was learnt.

        Args:
            found: an operation.
            lines: from where the step's models were called, and the step.
        """
        told, graph = found.finding, list(nodes([found.start]))
        if told.cause == "loss scale" or found.node not in graph:
            return
        names = tuple(node.name() for node in graph)
        key = (told.direction, told.cause, tuple(lines), names, graph.index(found.node))
        new = told.line, told.module
        if told.line:
            self._of[key] = new if self._of.get(key, new) == new else None
        elif (known := self._of.get(key)) is not None:
            note = "the line is that of an earlier overflow at the same place of the same graph"
            note = "; ".join(filter(None, (told.note, note)))
            found.finding = replace(told, line=known[0], module=known[1], note=note)
