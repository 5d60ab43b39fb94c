"""Why a node has its colour, in a sentence: the rule of `painting` with the names of the nodes it was about."""

from __future__ import annotations

from collections.abc import Sequence

from mezzo.tensorflow.explanation import VALUE
from mezzo.tensorflow.op_lists import OpLists
from mezzo.tensorflow.painting import Painting, Why
from mezzo.tensorflow.typed_graph import NodeType, TypedGraph

# Ops on no list that compute nothing.
_VALUES = {
    "ReadVariableOp": "reads a variable: variables stay FP32, and a cast follows where 16 bits are read",
    "ResourceGather": "reads rows of a variable: variables stay FP32, and a cast follows where 16 bits are read",
    "VariableV2": "is a variable, and variables stay FP32",
    "Variable": "is a variable, and variables stay FP32",
    "Const": "is a constant: it stays FP32, and a cast follows where 16 bits are read",
    "Placeholder": "is an argument: it stays FP32, and a cast follows where 16 bits are read",
    "_Arg": "is an argument: it stays FP32, and a cast follows where 16 bits are read",
    "_Retval": "is a result, which keeps its type",
    "Cast": "is a cast, which gives 16 bits only where all that read it are 16 bits",
}
# Of a graph in which nothing is painted: the pass returns before it looks at the other lists.
NO_ALLOW_OP = (
    "The graph has no op on the allow list that could become 16 bits, so the pass leaves all of it as it is."
)
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_BRANCHES = ("If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase")


class Reasons:
    """The sentences about one painted graph."""

    def __init__(self, graph: TypedGraph, lists: OpLists, painting: Painting) -> None:
        self.graph, self.lists, self.painting = graph, lists, painting

    def of(self, kind: int) -> tuple[str, str]:
        """Why a type is painted or not: the rule in a few words, the same for all nodes of one kind; and a sentence."""
        if kind in self.painting.painted:
            return self._painted(kind, self.painting.why[kind])
        return self._unpainted(kind)

    def _painted(self, kind: int, why: Why) -> tuple[str, str]:
        op, names = self.graph.node_of(kind).op, [self._named(source) for source in why.sources]
        if why.rule == "between":
            return (
                "between",
                f"between allow nodes {names[0]} and {names[1]}, with nothing denied between",
            )
        sentence = {
            "allow list": f"{op} is on the allow list",
            "forced": "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LEVEL=UNSAFE_FORCE_ALL paints all that it can",
            "follows": f"infer op that reads {' '.join(names)}, which is 16 bits, and nothing denied",
            "spread": f"clear op: takes the colour of {' '.join(names)}, to which only clear ops lead",
            "tensor list": f"shares a tensor list with {' '.join(names)}, which is 16 bits",
            "loop": "takes the colour of the loop's Merge",
            "cast": "a cast to FP32 that only 16-bit nodes read",
        }[why.rule]
        return why.rule, sentence

    def _unpainted(self, index: int) -> tuple[str, str]:
        node, kind = self.graph.node_of(index), self.graph.types[index]
        colour = self.lists.colour(node.op)
        if colour == "other" and node.op in _VALUES:
            return VALUE, _VALUES[node.op]
        if node.left_out:
            return "left out", node.left_out
        if index in self.painting.denied:
            return self._denied(node.op, self.painting.why[index])
        if colour == "deny":  # the pass did not come to deny anything
            return "deny list", f"{node.op} is on the deny list"
        if colour == "other":
            return self._other(node.op)
        if kind.fixed:
            return "type fixed", f"{node.op} takes and gives only FP32 there"
        if not kind.allowed:
            return "type fixed", f"{node.op} cannot be {self.graph.dtype} there, by its definition"
        lost = self.painting.unpainted.get(index)
        if lost is not None:
            return lost.rule, {
                "cannot": f"{node.op} is on the allow list, but one of its types is quantized",
                "loop": "a Merge of the same loop stays FP32, and both ends of a loop's edge have one type",
            }.get(lost.rule, "lost its paint")
        if node.reads_variable:
            return "reads a variable", "reads a variable of TensorFlow 1, which stays FP32"
        if colour == "allow":
            return "nothing to do", "the pass did not get to it"
        if not kind.kernel:
            return "no kernel", f"{self.lists.device} has no {self.graph.dtype} kernel of {node.op}"
        return self._unreached(index, kind, colour)

    def _denied(self, op: str, why: Why) -> tuple[str, str]:
        names = " ".join(self._named(source) for source in why.sources)
        return why.rule, {
            "deny list": f"{op} is on the deny list",
            "below deny": f"below {names}, which is on the deny list, and only infer and clear ops lie between",
            "unsafe list": f"its tensor list also goes through {names}, which the pass must not change",
            "tensor list": f"shares a tensor list with {names}, which stays FP32",
        }[why.rule]

    def _other(self, op: str) -> tuple[str, str]:
        if op in _CALLS:
            return (
                "call",
                "calls a function that TensorFlow does not inline: arguments and results keep their types",
            )
        if op in _BRANCHES:
            return "control flow", "control flow that was not lowered: what goes through it keeps its type"
        if op.startswith(("Assign", "ResourceApply")):
            return VALUE, "updates a variable, and variables stay FP32"
        return "on no list", f"{op} is on no list: it stays FP32 and lets no paint through"

    def _unreached(self, index: int, kind: NodeType, colour: str) -> tuple[str, str]:
        if not self.painting.painted:
            return "no allow op", f"{colour} op, and no op on the allow list can become 16 bits in this graph"
        if colour == "clear":
            return "not reached", "clear op, and no 16-bit node is next to it"
        sources = self._inputs(kind)
        denied = [source for source in sources if source in self.painting.denied]
        if denied:
            return "not reached", f"infer op that reads {self._named(denied[0])}, which is denied"
        if not any(source in self.painting.painted for source in sources):
            what = (
                f"none of its inputs is 16 bits ({', '.join(self._named(s) for s in sources[:2])})"
                if sources
                else "no input"
            )
            return "not reached", f"infer op: {what}, and it is not between two allow nodes"
        # Its input was painted after the step that would have painted it (by a clear op's spreading).
        painted = next(source for source in sources if source in self.painting.painted)
        return "not reached", (
            f"infer op: {self._named(painted)}, which it reads, became 16 bits only after infer ops were decided"
        )

    def _inputs(self, kind: NodeType) -> Sequence[int]:
        return list(dict.fromkeys(self.graph.source(kind.node, port) for port in kind.inputs))

    def _named(self, kind: int) -> str:
        node = self.graph.node_of(kind)
        return f"{node.name} ({node.op})" if node.op.lower() not in node.name.lower() else node.name
