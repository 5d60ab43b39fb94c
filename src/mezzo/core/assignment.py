"""Assignment: which modules run in 16 bits, as a minimum cut.

Each module is a node with two formats, FP32 and the lower one. It has a time in each, and an error that lowering it
brings. Where two modules hand a tensor on, an edge has the time of a cast, paid if their formats differ, and the
error of rounding the tensor, paid if the one that makes it stays in FP32 and the one that takes it is lowered. Both
kinds of term are what a cut counts, so the cheapest assignment for a price on error is a minimum s-t cut (Greig,
Porteous and Seheult 1989), exactly. The price is raised until the error is within its budget.

Errors are variances: expected squared changes of the loss, which add for roundings that know nothing of each other.

A price finds the assignments on the lower hull of time against error and none above it. So the last step is plain:
single modules are moved, the one that saves most first, as long as the budget allows it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx  # type: ignore[import-untyped]

from mezzo.core.errors import UsageError

_RESOLUTION = 2.0**-40  # of the whole time: capacities are integers, so that a cut is exact


@dataclass(frozen=True)
class Node:
    """A module that may run in either format.

    Args:
        path: its name.
        fp32_seconds: a step's forward and backward in FP32.
        low_seconds: the same in the lower format.
        error: expected squared change of the loss if it is lowered, at least 0.
        stays: why it must stay in FP32; ``""`` if it need not.
    """

    path: str
    fp32_seconds: float
    low_seconds: float
    error: float = 0.0
    stays: str = ""


@dataclass(frozen=True)
class Edge:
    """A tensor that one module makes and another one takes.

    Args:
        producer, consumer: paths of nodes.
        seconds: of the casts, forward and backward, if the two differ in format.
        error: expected squared change of the loss from rounding the tensor.
    """

    producer: str
    consumer: str
    seconds: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class Assignment:
    """Which modules are lowered, and what that is predicted to take.

    Args:
        lowered: their paths.
        seconds: of all modules and casts.
        error: expected squared change of the loss.
        price: seconds that a unit of error was charged with; 0 where the budget did not bind.
    """

    lowered: frozenset[str]
    seconds: float
    error: float
    price: float = 0.0


class Graph:
    """Modules and the tensors between them.

    Args:
        nodes: each path once.
        edges: between paths of `nodes`; several between the same two add up.

    Raises:
        UsageError: a path twice, an edge to a path that is none, a number that is negative or not finite.
    """

    def __init__(self, nodes: Sequence[Node], edges: Sequence[Edge] = ()) -> None:
        self.nodes = {node.path: node for node in nodes}
        if len(self.nodes) != len(nodes):
            raise UsageError("an assignment's nodes must have different paths")
        for edge in edges:
            for path in (edge.producer, edge.consumer):
                if path not in self.nodes:
                    raise UsageError(f"an edge names {path!r}, which is no node")
        numbers = [x for n in nodes for x in (n.fp32_seconds, n.low_seconds, n.error)]
        if not all(
            math.isfinite(x) and x >= 0.0
            for x in [*numbers, *(x for e in edges for x in (e.seconds, e.error))]
        ):
            raise UsageError(
                "times and errors must be finite and not negative; say `stays` where an error is infinite"
            )
        merged: dict[tuple[str, str], tuple[float, float]] = {}
        for edge in edges:
            if edge.producer != edge.consumer:
                seconds, error = merged.get((edge.producer, edge.consumer), (0.0, 0.0))
                merged[edge.producer, edge.consumer] = (seconds + edge.seconds, error + edge.error)
        self.edges = tuple(Edge(*ends, *values) for ends, values in merged.items())

    def evaluate(self, lowered: Collection[str], price: float = 0.0) -> Assignment:
        """What an assignment takes."""
        low = frozenset(lowered)
        seconds = [n.low_seconds if n.path in low else n.fp32_seconds for n in self.nodes.values()]
        errors = [n.error for n in self.nodes.values() if n.path in low]
        seconds += [e.seconds for e in self.edges if (e.producer in low) != (e.consumer in low)]
        errors += [e.error for e in self.edges if e.consumer in low and e.producer not in low]
        return Assignment(low, math.fsum(seconds), math.fsum(errors), price)

    def cheapest(self, price: float) -> Assignment:
        """The assignment of the least ``seconds + price * error``: a minimum cut. Of equals, the one that lowers most.

        Args:
            price: seconds for a unit of error, at least 0.
        """
        unit = self._whole_time * _RESOLUTION
        graph = networkx.DiGraph()
        graph.add_nodes_from(("low", "fp32"))  # on the side of "low": lowered

        def charge(tail: object, head: object, cost: float) -> None:
            before = graph.edges[tail, head]["capacity"] if graph.has_edge(tail, head) else 0
            graph.add_edge(tail, head, capacity=before + round(min(cost / unit, 1e300)))

        for node in self.nodes.values():
            inner = ("module", node.path)
            charge("low", inner, node.fp32_seconds)
            if node.stays:
                graph.add_edge(inner, "fp32")  # without a capacity: infinite
            else:
                charge(inner, "fp32", node.low_seconds + price * node.error)
        for edge in self.edges:
            producer, consumer = ("module", edge.producer), ("module", edge.consumer)
            charge(producer, consumer, edge.seconds)
            charge(consumer, producer, edge.seconds + price * edge.error)
        # networkx gives the sink's side no more than it must have: ties are lowered.
        _, (low, _) = networkx.minimum_cut(graph, "low", "fp32")
        return self.evaluate({name[1] for name in low if name != "low"}, price)

    @cached_property
    def _whole_time(self) -> float:
        longest = [max(node.fp32_seconds, node.low_seconds) for node in self.nodes.values()]
        return math.fsum([*longest, *(edge.seconds for edge in self.edges)]) or 1.0


def assign(nodes: Sequence[Node], edges: Sequence[Edge] = (), *, budget: float = math.inf) -> Assignment:
    """The assignment that takes least time and whose error is within a budget.

    Args:
        nodes, edges: see `Graph`.
        budget: the largest error (a variance, as the nodes'), at least 0. All FP32 has none, so there is always one.

    Raises:
        UsageError: see `Graph`; a negative budget.

    >>> layers = [Node("a", 2.0, 1.0, error=1.0), Node("b", 2.0, 1.0, error=9.0)]
    >>> sorted(assign(layers, budget=4.0).lowered)
    ['a']
    """
    if not budget >= 0.0:
        raise UsageError(f"the budget of an assignment is {budget}: give a number of 0 or more")
    graph = Graph(nodes, edges)
    free = graph.cheapest(0.0)
    if free.error <= budget:
        return free
    errors = [x for x in [*(n.error for n in nodes), *(e.error for e in edges)] if x > 0.0]
    # At the upper price each error that counts outweighs all time; at the lower one, all error is worth a billionth.
    least = min(error for error in errors if error > budget / (len(errors) + 1))
    low, high = graph._whole_time * 1e-9 / math.fsum(errors), 2.0 * graph._whole_time / least
    best = graph.cheapest(high)
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        found = graph.cheapest(middle)
        if found.error <= budget:
            high, best = middle, found
        else:
            low = middle
    return _improved(graph, best, budget)


def _improved(graph: Graph, best: Assignment, budget: float) -> Assignment:
    """Single modules moved while that saves time within the budget, the one that saves most first."""
    movable = [path for path, node in graph.nodes.items() if not node.stays]
    while True:
        moves = [graph.evaluate(best.lowered ^ {path}, best.price) for path in movable]
        better = [move for move in moves if move.seconds < best.seconds and move.error <= budget]
        if not better:
            return best
        best = min(better, key=lambda move: move.seconds)


def lines_of(paths: Mapping[str, bool], base: bool) -> dict[str, bool]:
    """The fewest lines of a policy that say which modules are lowered.

    A module without a line runs as the nearest one around it that has one.

    Args:
        paths: dotted path -> whether it is lowered; ``""`` is the model itself.
        base: whether what no line names is lowered.

    >>> lines_of({"block": False, "block.proj": True, "block.norm": False, "head": True}, base=True)
    {'block': False, 'block.proj': True}
    """
    lines: dict[str, bool] = {}
    for path in sorted(paths, key=lambda path: (path.count("."), path)):
        if not path:
            continue
        pieces = path.split(".")
        around = (".".join(pieces[:length]) for length in range(len(pieces) - 1, 0, -1))
        inherited = next((lines[outer] for outer in around if outer in lines), base)
        if paths[path] != inherited:
            lines[path] = paths[path]
    return lines
