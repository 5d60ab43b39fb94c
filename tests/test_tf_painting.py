"""The colouring on graphs written by hand: each rule on its own, and the rule that is given as the reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from mezzo.tensorflow.op_lists import OpLists, op_lists
from mezzo.tensorflow.painting import Cast, Painting, paint
from mezzo.tensorflow.typed_graph import Node, NodeType, TypedGraph

CPU = op_lists("cpu", environ={})


def graph(*rows: tuple[str, str, Sequence[str]], **changed: Mapping[str, object]) -> TypedGraph:
    """A graph of (name, op, inputs) rows in which each node has one type and one output.

    Args:
        changed: name -> what is different about its type (`kernel=False`) or its node (`left_out="..."`).
    """
    at = {name: number for number, (name, _, _) in enumerate(rows)}
    nodes, types = [], []
    for number, (name, op, inputs) in enumerate(rows):
        own = changed.get(name, {})
        of_type = {key: value for key, value in own.items() if key in NodeType.__dataclass_fields__}
        of_node = {key: value for key, value in own.items() if key not in of_type}
        fed = tuple((at[given], 0) for given in inputs)
        kind = {"node": number, "inputs": tuple(range(len(inputs))), "outputs": (0,), **of_type}
        types.append(NodeType(**kind))  # type: ignore[arg-type]
        nodes.append(Node(name, op, fed, (number,) * len(inputs), (number,), **of_node))  # type: ignore[arg-type]
    return TypedGraph(tuple(nodes), tuple(types))


def colours(given: TypedGraph, lists: OpLists = CPU) -> tuple[set[str], Painting]:
    found = paint(given, lists)
    return {given.node_of(index).name for index in found.painted}, found


def rule(given: TypedGraph, found: Painting, name: str) -> str:
    index = next(at for at, node in enumerate(given.nodes) if node.name == name)
    return (found.why.get(index) or found.unpainted[index]).rule


CASES: dict[str, tuple[list[tuple[str, str, list[str]]], set[str], dict[str, str]]] = {
    "no allow op: nothing": ([("x", "Const", []), ("r", "Relu", ["x"]), ("e", "Exp", ["r"])], set(), {}),
    "an allow op, and not what feeds it from no list": (
        [("x", "Const", []), ("m", "MatMul", ["x", "x"])],
        {"m"},
        {"m": "allow list"},
    ),
    "infer between two allow ops": (
        [("x", "Const", []), ("m", "MatMul", ["x", "x"]), ("t", "Tanh", ["m"]), ("n", "MatMul", ["t", "x"])],
        {"m", "t", "n"},
        {"t": "between"},
    ),
    "infer below an allow op, with nothing after it": (
        [("x", "Const", []), ("m", "MatMul", ["x", "x"]), ("t", "Tanh", ["m"])],
        {"m", "t"},
        {"t": "follows"},
    ),
    "infer above an allow op only": (
        [("x", "Const", []), ("t", "Tanh", ["x"]), ("m", "MatMul", ["t", "x"])],
        {"m"},
        {},
    ),
    "clear ops on both sides of an allow op, as far as they go": (
        [("x", "Const", []), ("r", "Relu", ["x"]), ("s", "Reshape", ["r"]), ("m", "MatMul", ["s", "s"]),
         ("i", "Identity", ["m"]), ("c", "Cos", ["i"]), ("j", "Identity", ["c"])],
        {"r", "s", "m", "i"},
        {"r": "spread", "i": "spread"},
    ),
    "deny goes through infer ops to the next allow op": (
        [("x", "Const", []), ("m", "MatMul", ["x", "x"]), ("e", "Exp", ["m"]), ("a", "AddV2", ["e", "m"]),
         ("t", "Tanh", ["a"]), ("n", "MatMul", ["t", "x"])],
        {"m", "n"},
        {"e": "deny list", "a": "below deny", "t": "below deny"},
    ),
    "deny ends before a clear op that no infer op is below, and paint comes back from there": (
        [("x", "Const", []), ("e", "Exp", ["x"]), ("r", "Reshape", ["e"]), ("m", "MatMul", ["r", "x"])],
        {"r", "m"},
        {"e": "deny list", "r": "spread"},
    ),
    "deny holds a clear op that an infer op is below": (
        [("x", "Const", []), ("e", "Exp", ["x"]), ("r", "Reshape", ["e"]), ("t", "Tanh", ["r"]),
         ("m", "MatMul", ["r", "t"])],
        {"m"},
        {"r": "below deny", "t": "below deny"},
    ),
    "an infer op with one painted and one denied input": (
        [("x", "Const", []), ("m", "MatMul", ["x", "x"]), ("e", "Exp", ["x"]), ("a", "AddV2", ["m", "e"])],
        {"m"},
        {"a": "below deny"},
    ),
    "a chain of infer ops is painted down its length": (
        [("x", "Const", []), ("m", "MatMul", ["x", "x"]), ("t", "Tanh", ["m"]), ("u", "Tanh", ["t"])],
        {"m", "t", "u"},
        {"u": "follows"},
    ),
    "and not against the order of the nodes": (
        [("u", "Tanh", ["t"]), ("t", "Tanh", ["m"]), ("m", "MatMul", ["x", "x"]), ("x", "Const", [])],
        {"m", "t"},
        {"t": "follows"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_who_is_painted_and_by_which_rule(case: str) -> None:
    rows, expected, rules = CASES[case]
    given = graph(*rows)
    painted, found = colours(given)
    assert painted == expected
    assert {name: rule(given, found, name) for name in rules} == rules


MIDDLE = (("x", "Const", []), ("m", "MatMul", ["x", "x"]), ("r", "Relu", ["m"]), ("n", "MatMul", ["r", "x"]))


@pytest.mark.parametrize(
    "change",
    [{"kernel": False}, {"allowed": False}, {"name": ""}, {"left_out": "elsewhere"}, {"dtype": "float64"}],
)
def test_what_keeps_paint_from_a_node_between_two_allow_nodes(change: dict[str, object]) -> None:
    assert colours(graph(*MIDDLE))[0] == {"m", "r", "n"}
    assert colours(graph(*MIDDLE, r=change))[0] == {"m", "n"}


def test_an_allow_op_needs_no_kernel_but_a_type_that_can_be_16_bits() -> None:
    assert colours(graph(*MIDDLE, m={"kernel": False}))[0] == {"m", "r", "n"}
    given = graph(*MIDDLE, m={"quantized": True})
    painted, found = colours(given)
    assert painted == {"r", "n"}, "it loses its paint last, after its neighbours had theirs from it"
    assert rule(given, found, "m") == "cannot"


def test_an_infer_op_that_follows_is_not_asked_for_a_kernel() -> None:
    rows = (("x", "Const", []), ("m", "MatMul", ["x", "x"]), ("t", "Tanh", ["m"]))
    assert colours(graph(*rows, t={"kernel": False}))[0] == {"m", "t"}


def test_a_variable_that_is_read_by_reference_takes_no_paint() -> None:
    rows = (("v", "VariableV2", []), ("i", "Identity", ["v"]), ("m", "MatMul", ["i", "i"]))
    assert colours(graph(*rows))[0] == {"i", "m"}
    assert colours(graph(*rows, i={"reads_variable": True}))[0] == {"m"}


def test_one_cast_for_all_readers_of_an_output() -> None:
    given = graph(
        ("x", "Const", []),
        ("m", "MatMul", ["x", "x"]),
        ("c", "Cos", ["m"]),
        ("s", "Sin", ["m"]),
        ("r", "Relu", ["m"]),
    )
    _, found = colours(given)
    assert found.casts == [Cast(0, 0, "float16", ((1, 0), (1, 1))), Cast(1, 0, "float32", ((2, 0), (3, 0)))]


def test_a_cast_to_fp32_is_painted_when_only_painted_nodes_read_it() -> None:
    rows = [("x", "Const", []), ("k", "Cast", ["x"]), ("m", "MatMul", ["k", "k"])]
    assert colours(graph(*rows))[0] == {"k", "m"}
    assert colours(graph(*rows, ("c", "Cos", ["k"])))[0] == {"m"}


@pytest.mark.parametrize(
    ("without", "expected", "why"),
    [
        ((), {"g", "m", "n"}, "between"),
        (("n",), {"g", "m", "n"}, "loop"),  # painted to match, though it has no kernel
        (("g",), {"m"}, "loop"),  # painted from m, and stripped to match
    ],
)
def test_both_ends_of_a_loops_edge_have_the_merges_colour(
    without: tuple[str, ...], expected: set[str], why: str
) -> None:
    rows = [
        ("x", "Const", []),
        ("g", "Merge", ["x", "n"]),
        ("m", "MatMul", ["g", "x"]),
        ("n", "NextIteration", ["m"]),
    ]
    given = graph(*rows, **{name: {"kernel": False} for name in without})
    painted, found = colours(given)
    assert (painted, rule(given, found, "n")) == (expected, why)


def lists_of(*ends: str) -> TypedGraph:
    """MatMul -> TensorListFromTensor -> TensorListStack -> MatMul; the list goes to nodes of the ops `ends` too."""
    nodes = [
        Node("x", "Const", (), (), (0,)),
        Node("m", "MatMul", ((0, 0), (0, 0)), (1, 1), (1,)),
        Node("put", "TensorListFromTensor", ((1, 0),), (2,), (3,)),
        Node("get", "TensorListStack", ((2, 0),), (4,), (5,)),
        Node("n", "MatMul", ((3, 0), (0, 0)), (6, 6), (6,)),
    ]
    types = [
        NodeType(0, outputs=(0,)),
        NodeType(1, inputs=(0, 1), outputs=(0,)),
        NodeType(2, "element_dtype", inputs=(0,)),
        NodeType(2, "", "variant", outputs=(0,)),
        NodeType(3, "", "variant", inputs=(0,)),
        NodeType(3, "element_dtype", outputs=(0,)),
        NodeType(4, inputs=(0, 1), outputs=(0,)),
    ]
    for op in ends:
        nodes.append(Node(op, op, ((2, 0),), (len(types),), (), border=True))
        types.append(NodeType(len(nodes) - 1, "T", "variant", inputs=(0,)))
    return TypedGraph(tuple(nodes), tuple(types))


def test_the_elements_of_a_tensor_list_are_painted_together() -> None:
    painted, found = colours(lists_of())
    assert painted == {"m", "put", "get", "n"}
    assert found.above[5] == 1, "paint went through the list, along which FP32 has no edge"


def test_a_list_that_leaves_the_graph_stays_fp32() -> None:
    given = lists_of("_Retval")
    painted, found = colours(given)
    assert painted == {"m", "n"}
    assert {found.why[2].rule, found.why[5].rule} == {"unsafe list"}


def test_force_all_paints_what_may_be_forced_and_denies_nothing() -> None:
    forced = OpLists(**{**CPU.__dict__, "force_all": True})
    rows = (("x", "Const", []), ("e", "Exp", ["x"]), ("c", "Cos", ["e"]))
    painted, found = colours(graph(*rows, x={"forcible": False}), forced)
    assert (painted, found.denied) == ({"e", "c"}, set())


def test_the_colouring_needs_no_tensorflow() -> None:
    code = "import sys, mezzo.tensorflow.painting; print('tensorflow' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False\n"
    )
