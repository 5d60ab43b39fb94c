"""The colouring against TensorFlow's own pass: node for node, type for type and cast for cast, in each of its modes."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
import tf_list_graphs  # noqa: F401  (adds its graphs)
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.core.framework import types_pb2
from tf_graphs import GRAPHS
from tf_pass import PREFIX, by_mezzo, by_tensorflow, optimized, types_of

from mezzo.tensorflow.explain import inlined
from mezzo.tensorflow.op_lists import modes, op_lists

# An op and a graph in which the pass paints it: else the comparison could agree about nothing.
EXERCISED = {
    "BiasAddGrad": "dense_step",
    "FusedBatchNormGradV3": "conv_batch_norm_step",
    "TensorListStack": "lists_between_products",
    "Softmax": "attention",
    "Tanh": "keras_lstm",
    "NextIteration": "loop_step",
    "Merge": "cond_with_products",
    "TensorListPushBack": "loop_step",
    "IdentityN": "many_outputs",
    "Cast": "casts_from_ints",
    "Unpack": "many_outputs",
}


def fetched(graph_def: Any) -> list[str]:
    """The nodes that a caller would fetch: the results that tracing names so, or whatever is last."""
    results = [
        node.name for node in graph_def.node if node.op == "Identity" and node.name.startswith("Identity")
    ]
    return results or [graph_def.node[-1].name]


@pytest.fixture(scope="module")
def graphs() -> dict[str, Any]:
    """Every graph as it is traced, and as it is with its calls and control flow inlined."""
    found = {}
    for name, build in GRAPHS.items():
        plain = build()
        found[name] = plain
        if plain.library.function:
            found[f"{name}, inlined"] = inlined(plain, fetched(plain))
    return found


@pytest.mark.parametrize("mode", modes())
def test_every_node_of_every_graph_has_the_passs_colour(graphs: dict[str, Any], mode: str) -> None:
    lists = op_lists(mode, environ={})
    nodes = painted = 0
    different = {}
    for name, graph_def in graphs.items():
        theirs, ours = (look(graph_def, lists, fetched(graph_def)) for look in (by_tensorflow, by_mezzo))
        nodes, painted = nodes + theirs.nodes, painted + len(theirs.types)
        if theirs != ours:
            different[name] = (theirs.types ^ ours.types, theirs.casts ^ ours.casts)
    assert not different
    assert len(graphs) > 40
    assert nodes >= 3000
    assert painted >= 400


@pytest.mark.parametrize(
    ("instructions", "rewritten"), [("AMX_FP16", True), ("AVX_NE_CONVERT", True), ("AVX512_FP16", False)]
)
def test_the_instructions_that_fp16_on_a_cpu_asks_for(
    graphs: dict[str, Any], instructions: str, rewritten: bool
) -> None:
    graph_def = graphs["dense_step"]
    after = optimized(graph_def, op_lists("onednn_float16", environ={}), fetched(graph_def), instructions)
    halves = {node.op for node in after.node if types_pb2.DT_HALF in types_of(node).values()}
    assert ("MatMul" in halves) is rewritten


@pytest.mark.parametrize("op", EXERCISED)
def test_the_graphs_exercise_what_they_are_there_for(graphs: dict[str, Any], op: str) -> None:
    name = EXERCISED[op]
    ops: set[str] = set()
    for graph_def in (graphs[name], graphs.get(f"{name}, inlined")):
        if graph_def is not None:
            by_name = {node.name: node.op for node in graph_def.node}
            found = by_tensorflow(graph_def, op_lists("onednn_bfloat16", environ={}), fetched(graph_def))
            ops |= {by_name[node] for node, _ in found.types}
    assert op in ops


@pytest.mark.parametrize("mode", modes())
def test_moved_ops_have_the_passs_colour_when_the_environment_says_the_same(
    graphs: dict[str, Any], mode: str
) -> None:
    moved = {
        "deny": ["Tanh", "Relu"],
        "allow": ["Exp"],
        "infer": ["Cos"],
        "clear": ["Softmax"],
        "other": ["Identity"],
    }
    lists, own = op_lists(mode, moved, environ={}), op_lists(mode, environ={})
    changed = 0
    for name in (
        "keras_step",
        "deny_through_infer",
        "off_every_list",
        "attention_step",
        "loop_step, inlined",
    ):
        graph_def = graphs[name]
        theirs = by_tensorflow(graph_def, lists, fetched(graph_def))
        assert theirs == by_mezzo(graph_def, lists, fetched(graph_def)), name
        changed += theirs != by_tensorflow(graph_def, own, fetched(graph_def))
    assert changed >= 4


LEVELS = [
    (mode, level)
    for mode in modes()
    for level in ("TENSOR_CORES_ONLY", "TREAT_INFER_AS_DENY", "UNSAFE_FORCE_ALL")
    # TensorFlow refuses the last in the modes of oneDNN, and so does op_lists.
    if not (level == "UNSAFE_FORCE_ALL" and mode.startswith("onednn"))
]


@pytest.mark.parametrize(("mode", "level"), LEVELS)
def test_the_levels_of_the_environment(
    graphs: dict[str, Any], mode: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFIX + "LEVEL", level)
    own, ours = op_lists(mode, environ={}), op_lists(mode)
    for name in ("dense_step", "many_outputs", "deny_through_infer", "old_while_loop"):
        graph_def = graphs[name]
        # TensorFlow has its own lists and the level: `ours` would tell it how the level was understood here.
        theirs = by_tensorflow(graph_def, own, fetched(graph_def))
        assert theirs == by_mezzo(graph_def, ours, fetched(graph_def)), name


UNARY = {
    "Exp": tf.exp, "Relu": tf.nn.relu, "Tanh": tf.tanh, "Cos": tf.cos, "Softmax": tf.nn.softmax, "Neg": tf.negative,
    "Square": tf.square, "Rsqrt": tf.math.rsqrt, "Log": tf.math.log, "Identity": tf.identity, "Sum": None, "Max": None,
    "Reshape": None, "half": None, "List": None, "Unpack": None, "Select": None,
}  # fmt: skip
BINARY = {
    "MatMul": tf.matmul, "AddV2": tf.add, "Mul": tf.multiply, "Pow": tf.pow, "Maximum": tf.maximum,
    "IdentityN": None, "Concat": None, "SquaredDifference": tf.math.squared_difference, "Einsum": None,
}  # fmt: skip


def applied(op: str, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """One op, or a few that belong together, from two 3x3 matrices to one."""
    match op:
        case "Sum":
            return tf.reduce_sum(x, 1, keepdims=True) + y
        case "Max":
            return tf.reduce_max(x, 0, keepdims=True) * y
        case "Reshape":
            return tf.reshape(tf.transpose(tf.reshape(x, [9])), tf.shape(y))
        case "half":
            return tf.cast(tf.tanh(tf.cast(x, tf.float16)), tf.float32)
        case "List":
            full = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=[3])
            return tf.raw_ops.TensorListStack(input_handle=full, element_shape=[3], element_dtype=tf.float32)
        case "Unpack":
            return tf.stack(tf.unstack(x, num=3)[::-1])
        case "Select":
            return tf.where(x > y, x, tf.cast(tf.argsort(y), tf.float32))
        case "IdentityN":
            return tf.identity_n([x, y])[1]
        case "Concat":
            return tf.split(tf.concat([x, y], 0), 2)[0]
        case "Einsum":
            return tf.einsum("ij,kj->ik", x, y)
        case _:
            return UNARY[op](x) if op in UNARY else BINARY[op](x, y)


@st.composite
def random_graphs(draw: st.DrawFn) -> tuple[Any, list[str]]:
    """A graph of up to 25 steps with random wiring, its nodes in a random order, and what is fetched of it."""
    steps = draw(
        st.lists(
            st.tuples(st.sampled_from([*UNARY, *BINARY, *["MatMul"] * 6]), st.integers(0), st.integers(0)),
            min_size=2,
            max_size=25,
        )
    )
    with tf.Graph().as_default() as graph:
        tensors = [tf.compat.v1.placeholder(tf.float32, (3, 3)) for _ in range(2)]
        for op, left, right in steps:
            tensors.append(
                applied(op, tensors[-1 - left % min(len(tensors), 4)], tensors[right % len(tensors)])
            )
    graph_def = graph.as_graph_def()
    fetches = [tensors[-1].op.name] + [
        t.op.name for t in draw(st.lists(st.sampled_from(tensors), max_size=2))
    ]
    if draw(st.booleans()):
        nodes = draw(st.permutations(list(graph_def.node)))
        del graph_def.node[:]
        graph_def.node.extend(nodes)
    return graph_def, sorted(set(fetches))


@pytest.mark.parametrize("mode", modes())
@settings(max_examples=60, deadline=None)
@given(made=random_graphs())
def test_random_graphs_have_the_passs_colours(mode: str, made: tuple[Any, list[str]]) -> None:
    graph_def, fetches = made
    lists = op_lists(mode, environ={})
    assert by_tensorflow(graph_def, lists, fetches) == by_mezzo(graph_def, lists, fetches)
