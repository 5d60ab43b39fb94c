"""Grappler's auto mixed precision as a function on a plain graph: which types become 16 bits, and by which rule.

The pass colours types (see `typed_graph`) in steps, each of which only adds to what the former ones found:

1. every type of an op on the allow list is painted;
2. deny spreads from the ops on the deny list along the edges, through infer and clear ops, as far as a type that has an
   infer or deny op below it (further on no infer op would be harmed, so that a last reshape may still be painted);
3. an infer or clear op with an allow op above it and one below it, and nothing denied between, is painted;
4. an infer op is painted when one of its inputs is and none of them is denied, whether or not there is a kernel;
5. paint spreads in both directions through clear ops;
6. an allow op whose type cannot be 16 bits after all loses its paint; the ops of one tensor list and the ends of a
   loop's back edge are given one colour; a cast to FP32 that only painted types read is painted.

Then types that are painted and were FP32 change, and a cast goes onto each edge between the two.

`tests/on_tensorflow/test_tf_explain_pass.py` holds this node for node to TensorFlow's own pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from mezzo.tensorflow.op_lists import OpLists
from mezzo.tensorflow.typed_graph import NodeType, TypedGraph

# The tensor list ops that take a tensor out of a list, and those that put one in: FP32 flows from these to those
# without an edge of its own, since the list itself is a variant.
_READERS = frozenset({
    "TensorListConcat", "TensorListConcatV2", "TensorListGather", "TensorListGetItem", "TensorListPopBack",
    "TensorListStack",
})  # fmt: skip
_WRITERS = frozenset({
    "TensorListFromTensor", "TensorListPushBack", "TensorListPushBackBatch", "TensorListScatter",
    "TensorListScatterV2", "TensorListScatterIntoExistingList", "TensorListSetItem", "TensorListSplit",
})  # fmt: skip


@dataclass(frozen=True)
class Why:
    """The rule that coloured a type.

    Attributes:
        rule: of paint: `allow list`, `forced`, `between`, `follows`, `spread`, `tensor list`, `loop`, `cast`; of deny:
            `deny list`, `below deny`, `unsafe list`, `tensor list`; of lost paint: `cannot`, `tensor list`, `loop`.
        sources: the types it came from: the allow types above and below for `between`, the nearest one else.
    """

    rule: str
    sources: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cast:
    """One cast that the pass inserts: after output `port` of `node`, before the (node, input port) pairs of `to`."""

    node: int
    port: int
    dtype: str
    to: tuple[tuple[int, int], ...]


@dataclass
class Painting:
    """The colours of a graph's types.

    Attributes:
        painted: types that become 16 bits where they are FP32 (a type of another dtype stays what it is).
        denied: types that FP32 is forced upon.
        why: the rule for each of those.
        unpainted: types that lost their paint, and the rule that took it.
        above: for a type that paint could reach from above, the allow type that it came from.
        casts: what is inserted, in the graph's order.
    """

    painted: set[int] = field(default_factory=set)
    denied: set[int] = field(default_factory=set)
    why: dict[int, Why] = field(default_factory=dict)
    unpainted: dict[int, Why] = field(default_factory=dict)
    above: dict[int, int] = field(default_factory=dict)
    casts: list[Cast] = field(default_factory=list)

    def paint(self, kind: int, why: Why) -> None:
        """Paint a type, keeping the reason of the first time."""
        if kind not in self.painted:
            self.painted.add(kind)
            self.why[kind] = why

    def deny(self, kind: int, why: Why) -> None:
        """Deny a type, keeping the reason of the first time."""
        if kind not in self.denied:
            self.denied.add(kind)
            self.why[kind] = why

    def strip(self, kind: int, why: Why) -> None:
        """Take a type's paint away."""
        if kind in self.painted:
            self.painted.discard(kind)
            self.why.pop(kind, None)
            self.unpainted[kind] = why


def paint(graph: TypedGraph, lists: OpLists) -> Painting:
    """Colour `graph` as grappler's pass of `lists.mode` does.

    Returns:
        the colours; nothing is painted in a graph without an allow op.
    """
    return _Painter(graph, lists).run()


class _Painter:
    def __init__(self, graph: TypedGraph, lists: OpLists) -> None:
        self.graph, self.lists = graph, lists
        self.colour = [lists.colour(graph.node_of(index).op) for index in range(len(graph.types))]
        self.processed = [not graph.node_of(index).left_out for index in range(len(graph.types))]
        self.feeds = [list(sources) for sources in graph.feeds]
        self.fed = [list(readers) for readers in graph.fed]
        self.result = Painting()

    def run(self) -> Painting:
        result = self.result
        clusters = self._clusters()
        self._join_list_ends(clusters)
        self._allow()
        if not result.painted:
            result.denied.clear()
            result.why.clear()
            return result
        self._deny()
        self._one_colour_a_list(clusters)
        self._between()
        self._follow()
        self._spread()
        self._remove_impossible()
        self._one_colour_a_list(clusters)
        self._one_colour_a_loop()
        self._casts_to_fp32()
        self._insert_casts()
        return result

    # Step 1

    def _allow(self) -> None:
        for index in range(len(self.graph.types)):
            if not self.processed[index]:
                continue
            if self.colour[index] == "allow":
                self.result.paint(index, Why("allow list"))
            elif self.lists.force_all and self.graph.node_of(index).forcible:
                self.result.paint(index, Why("forced"))

    # Step 2

    def _deny(self) -> None:
        if self.lists.force_all:
            return
        result, every = self.result, range(len(self.graph.types))
        roots = [index for index in every if self.colour[index] in ("deny", "infer")]
        matters = set(_reach(roots, self.feeds, lambda index: self.colour[index] == "clear"))
        roots = [index for index in every if self.colour[index] == "deny" and index not in result.denied]
        came = _reach(roots, self.fed, lambda index: index in matters and index not in result.denied)
        for index, root in came.items():
            result.deny(
                index, Why("deny list") if self.colour[index] == "deny" else Why("below deny", (root,))
            )

    # Steps 3, 4 and 5

    def _may(self, index: int, colours: tuple[str, ...]) -> bool:
        """Whether paint may come to this type from a neighbour."""
        kind = self.graph.types[index]
        return (
            self.processed[index]
            and self.colour[index] in colours
            and index not in self.result.denied
            and kind.dtype == "float32"
            and _can(kind)
            and kind.kernel
        )

    def _between(self) -> None:
        result = self.result
        roots = [i for i in range(len(self.graph.types)) if self.processed[i] and self.colour[i] == "allow"]
        above = _reach(roots, self.fed, lambda index: self._may(index, ("infer", "clear")))
        below = _reach(roots, self.feeds, above.__contains__)
        for index, allow in below.items():
            result.paint(index, Why("between", (above[index], allow)))
        result.above = above

    def _follow(self) -> None:
        result = self.result
        # In the graph's order, so that paint flows down a chain of infer ops: each sees what was painted before it.
        for index, kind in enumerate(self.graph.types):
            if (
                not self.processed[index]
                or index in result.denied
                or index in result.painted
                or self.colour[index] != "infer"
                or kind.dtype != "float32"
                or not _can(kind)
            ):
                continue  # whether there is a kernel is not asked here
            sources = self.feeds[index]
            painted = [source for source in sources if source in result.painted]
            # A denied input counts even when it comes after a painted one.
            if painted and not any(source in result.denied for source in sources):
                result.paint(index, Why("follows", (painted[0],)))

    def _spread(self) -> None:
        result = self.result
        both = [[*self.feeds[index], *self.fed[index]] for index in range(len(self.graph.types))]
        roots = [index for index in sorted(result.painted) if self.processed[index]]

        def may(index: int) -> bool:
            return (
                index not in result.painted
                and self._may(index, ("clear",))
                and not self.graph.node_of(index).reads_variable
            )

        for index, root in _reach(roots, both, may).items():
            result.paint(index, Why("spread", (root,)))

    # Step 6

    def _remove_impossible(self) -> None:
        for index, kind in enumerate(self.graph.types):
            if self.colour[index] == "allow" and (not _can(kind) or kind.quantized):
                self.result.strip(index, Why("cannot"))

    def _one_colour_a_loop(self) -> None:
        graph, result = self.graph, self.result
        for index, node in enumerate(graph.nodes):
            if node.op != "NextIteration":
                continue
            own = node.output_types[0]
            merges = [graph.nodes[to].input_types[port] for to, port in graph.consumers.get((index, 0), ())]
            if all(merge in result.painted for merge in merges):
                result.paint(own, Why("loop", tuple(merges)))
                continue
            for kind in (*merges, own):
                result.strip(kind, Why("loop", tuple(merges)))

    def _casts_to_fp32(self) -> None:
        graph, result = self.graph, self.result
        for index, node in enumerate(graph.nodes):
            if node.op != "Cast" or graph.types[node.output_types[0]].dtype != "float32":
                continue
            readers = [graph.nodes[to].input_types[port] for to, port in graph.consumers.get((index, 0), ())]
            if readers and all(reader in result.painted for reader in readers):
                result.paint(node.output_types[0], Why("cast", (readers[0],)))

    def _insert_casts(self) -> None:
        graph, result = self.graph, self.result
        for index, kind in enumerate(graph.types):
            if kind.dtype != "float32":
                continue
            painted = index in result.painted
            for port in kind.outputs:
                to = tuple(
                    (reader, at)
                    for reader, at in graph.consumers.get((kind.node, port), ())
                    if (graph.nodes[reader].input_types[at] in result.painted) != painted
                )
                if to:
                    result.casts.append(Cast(kind.node, port, "float32" if painted else self.lists.dtype, to))

    # Tensor lists: the list is a variant, so its FP32 elements are not on its edges

    def _element(self, node: int) -> int | None:
        """The type of the elements of a tensor list op, where that is FP32."""
        if "TensorList" not in self.graph.nodes[node].op:
            return None
        for index in self.graph.types_of[node]:
            kind = self.graph.types[index]
            if kind.dtype == "float32" and not kind.fixed and "[" not in kind.name:
                return index
        return None

    def _clusters(self) -> list[tuple[list[int], list[int]]]:
        """For each set of ops that share tensor lists: the types of their elements, and the variants they hang on."""
        graph = self.graph
        elements = {node: self._element(node) for node in range(len(graph.nodes))}
        both = [[*self.feeds[index], *self.fed[index]] for index in range(len(graph.types))]
        found: list[tuple[list[int], list[int]]] = []
        seen: set[int] = set()
        for index, kind in enumerate(graph.types):
            if index in seen or not kind.fixed or kind.dtype != "variant" or not self.processed[index]:
                continue
            if elements[kind.node] is None:
                continue
            reached = list(_reach([index], both, lambda _: True))
            seen.update(reached)
            members = {graph.types[i].node for i in reached}
            ops = [element for node in sorted(members) if (element := elements[node]) is not None]
            roots = [
                i for i in reached
                if graph.types[i].fixed and graph.types[i].dtype == "variant" and self.processed[i]
                and elements[graph.types[i].node] is not None
            ]  # fmt: skip
            unsafe = [node for node in sorted(members) if self._unsafe(node, elements[node])]
            for root in roots if unsafe else ():
                element = elements[graph.types[root].node]
                if element is not None:
                    self.result.deny(element, Why("unsafe list", (graph.types_of[unsafe[0]][0],)))
            found.append((ops, roots))
        return found

    def _unsafe(self, node: int, element: int | None) -> bool:
        if element is not None:
            return bool(self.graph.nodes[node].left_out)
        return self.graph.nodes[node].border

    def _join_list_ends(self, clusters: Iterable[tuple[list[int], list[int]]]) -> None:
        """Add an edge from what is put into a list to what is taken out of it.

        A variant is fed by variants alone, so no search along them meets an edge that was added for another list.
        """
        graph = self.graph
        for _, roots in clusters:
            for root in roots:
                if graph.node_of(root).op not in _READERS:
                    continue
                reader = self._element(graph.types[root].node)
                for index in _reach([root], self.feeds, lambda i: self.processed[i]):
                    node = graph.types[index].node
                    writer = self._element(node) if graph.nodes[node].op in _WRITERS else None
                    if writer is not None and reader is not None and writer not in self.feeds[reader]:
                        self.feeds[reader].append(writer)
                        self.fed[writer].append(reader)

    def _one_colour_a_list(self, clusters: Iterable[tuple[list[int], list[int]]]) -> None:
        result = self.result
        for ops, _ in clusters:
            denied = next((index for index in ops if index in result.denied), None)
            painted = next((index for index in ops if index in result.painted), None)
            for index in ops:
                if denied is not None:
                    result.strip(index, Why("tensor list", (denied,)))
                    result.deny(index, Why("tensor list", (denied,)))
                elif painted is not None:
                    result.paint(index, Why("tensor list", (painted,)))


def _can(kind: NodeType) -> bool:
    """Whether the op's definition lets this type be 16 bits (a fixed type can be nothing else)."""
    return kind.allowed and not kind.fixed


def _reach(
    roots: Sequence[int], edges: Sequence[Sequence[int]], enter: Callable[[int], bool]
) -> dict[int, int]:
    """Everything that is reached from `roots` through what `enter` lets in, with the nearest root of each."""
    came = {root: root for root in roots}
    queue = deque(roots)
    while queue:
        at = queue.popleft()
        for index in edges[at]:
            if index not in came and enter(index):
                came[index] = came[at]
                queue.append(index)
    return came
