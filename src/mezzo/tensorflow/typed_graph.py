"""A graph as a plain value: nodes, the types each of them has, and which type feeds which. No TensorFlow in it.

Grappler's auto mixed precision paints types, not nodes: `FusedBatchNormV3` has a type `T` (of its input and its output)
that may become 16 bits, and a type `U` (of its statistics) that may not. A *type* here is a type attribute of one node,
one entry of a list of types, or a type that the op fixes; ports with the same type attribute share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class NodeType:
    """One type of one node.

    Attributes:
        node: index of the node in `TypedGraph.nodes`.
        name: the type attribute: `T`, or `Tout[2]` for an entry of a list; empty when the op fixes the type.
        dtype: what it is: `float32`, `int64`, `variant`, ...
        inputs, outputs: the ports (data only) that have this type.
        allowed: whether the op's definition lets it be the 16-bit type.
        kernel: whether the device has a kernel of the op for that.
        quantized: whether any type of the node is quantized.
    """

    node: int
    name: str = "T"
    dtype: str = "float32"
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    allowed: bool = True
    kernel: bool = True
    quantized: bool = False

    @property
    def fixed(self) -> bool:
        """Whether the op's definition fixes the type, so that nothing can change it."""
        return not self.name


@dataclass(frozen=True)
class Node:
    """One node.

    Attributes:
        name, op: as in the graph.
        inputs: (node, output port) of each data input, in order; control inputs are left out.
        input_types, output_types: for each port the index of its type in `TypedGraph.types`.
        left_out: why the pass does not look at this node; empty when it does.
        reads_variable: whether it is an Identity (or an Enter of one) that reads a variable of TensorFlow 1.
        forcible: whether TF's level UNSAFE_FORCE_ALL would paint it.
        border: whether tensors enter or leave the graph here (arguments, results, calls).
    """

    name: str
    op: str
    inputs: tuple[tuple[int, int], ...] = ()
    input_types: tuple[int, ...] = ()
    output_types: tuple[int, ...] = ()
    left_out: str = ""
    reads_variable: bool = False
    forcible: bool = True
    border: bool = False


@dataclass(frozen=True)
class TypedGraph:
    """Nodes in the graph's order, and all their types in the same order.

    Attributes:
        dtype: the 16-bit type that `NodeType.allowed` and `.kernel` are about.
        kernels_known: False where the kernels of the device are not in this build of TensorFlow, and taken as given.
    """

    nodes: tuple[Node, ...]
    types: tuple[NodeType, ...]
    dtype: str = "float16"
    kernels_known: bool = True

    @cached_property
    def feeds(self) -> tuple[tuple[int, ...], ...]:
        """For each type, the types of the ports that feed its input ports: ascending, each once."""
        return tuple(
            tuple(
                sorted({self.source(kind.node, port) for port in kind.inputs if self._has(kind.node, port)})
            )
            for kind in self.types
        )

    @cached_property
    def fed(self) -> tuple[tuple[int, ...], ...]:
        """For each type, the types of the ports that its output ports feed: ascending, each once."""
        found: list[list[int]] = [[] for _ in self.types]
        for index, sources in enumerate(self.feeds):
            for source in sources:
                found[source].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def consumers(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """(node, output port) -> (node, input port) of each data edge that leaves it."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for index, node in enumerate(self.nodes):
            for port, source in enumerate(node.inputs):
                found.setdefault(source, []).append((index, port))
        return found

    @cached_property
    def types_of(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the indices of its types."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for index, kind in enumerate(self.types):
            found[kind.node].append(index)
        return tuple(map(tuple, found))

    def source(self, node: int, port: int) -> int:
        """The type of the output that feeds input `port` of `node`."""
        giver, output = self.nodes[node].inputs[port]
        return self.nodes[giver].output_types[output]

    def node_of(self, kind: int) -> Node:
        """The node that a type belongs to."""
        return self.nodes[self.types[kind].node]

    def _has(self, node: int, port: int) -> bool:
        giver, output = self.nodes[node].inputs[port]
        return output < len(self.nodes[giver].output_types)
