"""KnownLines: the user's lines of operations outside of the models, kept from steps that were watched live.

A step that is not watched tells of such an operation by its node in the loss's graph, which has no line. Where a node
at the same place of the same graph was watched before, its line is said again, and nobody has to watch for it again.
The same graph is: the same operations, wired in the same way, with the same settings (dimensions, exponents; not sizes,
which go with the batch), between calls of models and a step on the same lines. All else is another fault.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from mezzo.pytorch.monitor import op_names
from mezzo.pytorch.monitor.kept_call import OF_CALL
from mezzo.pytorch.monitor.outside import OutsideEvent
from mezzo.pytorch.monitor.user_line import Line

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
    return op_names.of_node(node), tuple(found)
