"""`mezzo.tensorflow.explain`: what it takes, the reasons it gives, what it prints, and what TensorFlow then runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import mezzo.tensorflow as mtf
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.tensorflow.explanation import CastRow, Explanation
from mezzo.tensorflow.op_lists import op_lists

X = tf.TensorSpec((4, 3), tf.float32)
BF16 = "onednn_bfloat16"


def net(x: tf.Tensor) -> tf.Tensor:
    w = tf.ones((3, 3))
    return tf.exp(tf.tanh(x @ w) @ w)


def colours(explanation: Explanation) -> dict[str, bool]:
    return {row.op: row.painted for row in explanation.rows if row.rule != "value"}


EXPECTED = {"MatMul": True, "Tanh": True, "Exp": False, "Identity": False}


def test_functions_of_every_kind_and_graphs() -> None:
    function = tf.function(net)
    concrete = function.get_concrete_function(X)
    with tf.Graph().as_default() as graph:
        net(tf.compat.v1.placeholder(tf.float32, (4, 3)))
    found = [
        mtf.explain(net, X, mode=BF16),
        mtf.explain(net, np.ones((4, 3), np.float32), mode=BF16),
        mtf.explain(function, tf.ones((4, 3)), mode=BF16),
        mtf.explain(concrete, mode=BF16),
        mtf.explain(concrete.graph, mode=BF16),
        mtf.explain(graph, mode=BF16),
        mtf.explain(graph.as_graph_def(), mode=BF16),
    ]
    assert [colours(one) for one in found[:5]] == [EXPECTED] * 5
    assert [colours(one) for one in found[5:]] == [{k: v for k, v in EXPECTED.items() if k != "Identity"}] * 2


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_models_of_keras_3_and_2(library: Any) -> None:
    layers = library.layers
    model = library.Sequential([library.Input((6,)), layers.Dense(4, activation="relu"), layers.Dense(2)])
    painted = [row.op for row in mtf.explain(model, mode=BF16).painted]
    assert painted.count("MatMul") == painted.count("BiasAdd") == 2
    assert "Relu" in painted
    assert colours(mtf.explain(model, tf.ones((2, 6)), mode=BF16)) == colours(mtf.explain(model, mode=BF16))
    dropping = library.Sequential([library.Input((6,)), layers.Dense(4), layers.Dropout(0.5)])
    assert "Random" in str([row.op for row in mtf.explain(dropping, mode=BF16, training=True).rows])
    assert "Random" not in str([row.op for row in mtf.explain(dropping, mode=BF16).rows])


@pytest.mark.parametrize("library", [keras, tf_keras])
@pytest.mark.parametrize("structure", [list, dict])
def test_a_model_of_two_inputs_is_called_with_their_structure(library: Any, structure: type) -> None:
    a, b = (library.Input((3,), name=name) for name in "ab")
    out = library.layers.Dense(2)(library.layers.Subtract()([a, b]))
    model = library.Model([a, b] if structure is list else {"a": a, "b": b}, out)
    assert [row.op for row in mtf.explain(model, mode=BF16).painted].count("MatMul") == 1


def test_the_training_step_of_a_compiled_keras_model() -> None:
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(3)]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.ones((8, 6), np.float32), np.zeros(8, np.int32)
    found = mtf.explain(lambda x, y: model.train_step((x, y)), x, y, mode=BF16)
    assert [row.op for row in found.painted].count("MatMul") == 5  # two forward, three for the gradients
    assert {row.rule for row in found.rows if row.op == "Pow"} == {"deny list"}
    assert model.optimizer.iterations.numpy() == 0, "nothing was computed"


def test_a_training_step_shows_its_gradients_and_that_variables_stay_fp32() -> None:
    w, v = tf.Variable(tf.ones((3, 5))), tf.Variable(tf.ones((5, 2)))

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, tf.nn.relu(x @ w) @ v)
        for variable, gradient in zip([w, v], tape.gradient(loss, [w, v]), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    found = mtf.explain(step, X, tf.TensorSpec((4,), tf.int32), mode="cpu")
    assert found.row("gradient_tape/ReluGrad").painted
    assert not found.row("matmul/ReadVariableOp").painted
    assert "variables stay FP32" in found.row("matmul/ReadVariableOp").why
    assert "variables stay FP32" in found.row("AssignSubVariableOp").why


def why(fn: Any, node: str, mode: str = BF16, **settings: Any) -> str:
    return mtf.explain(fn, X, mode=mode, **settings).row(node).why


W = tf.ones((3, 3))
REASONS: dict[str, tuple[Any, str, str]] = {
    "allow list": (lambda x: x @ W, "matmul", "MatMul is on the allow list"),
    "between": (lambda x: tf.tanh(x @ W) @ W, "Tanh", "between allow nodes matmul and matmul_1"),
    "follows": (lambda x: tf.tanh(x @ W), "Tanh", "infer op that reads matmul, which is 16 bits"),
    "spread": (lambda x: tf.reshape(x, (4, 3)) @ W, "Reshape", "takes the colour of matmul"),
    "deny list": (lambda x: tf.exp(x @ W), "Exp", "Exp is on the deny list"),
    "below deny": (lambda x: tf.nn.relu(tf.exp(x) + 1.0) @ W, "add", "below Exp, which is on the deny list"),
    "on no list": (lambda x: tf.cos(x @ W), "Cos", "on no list"),
    "painted too late": (
        lambda x: tf.math.rsqrt(tf.abs(x @ W)),
        "Rsqrt",
        "Abs, which it reads, became 16 bits only after",
    ),
    "infer without paint": (
        lambda x: tf.tanh(x) @ W,
        "Tanh",
        r"none of its inputs is 16 bits \(x \(Placeholder\)\)",
    ),
    "clear without paint": (lambda x: (tf.identity(x, "i"), x @ W), "i", "no 16-bit node is next to it"),
    "on another device": (
        lambda x: on_gpu(x @ W) @ W,
        "Tanh",
        "on /device:GPU:0, and the pass looks at CPUs only",
    ),
    "list": (
        lambda x: through_list(tf.exp(x), x @ W),
        "TensorListSetItem",
        "shares a tensor list with TensorListFromTensor",
    ),
    "argument": (lambda x: x @ W, "x", "an argument: it stays FP32"),
    "call": (lambda x: called(x @ W), "PartitionedCall", "calls a function that TensorFlow does not inline"),
}


def on_gpu(x: tf.Tensor) -> tf.Tensor:
    with tf.device("/device:GPU:0"):
        return tf.tanh(x)


def through_list(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    full = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=[3])
    full = tf.raw_ops.TensorListSetItem(input_handle=full, index=0, item=y[0])
    return tf.tanh(tf.raw_ops.TensorListStack(input_handle=full, element_shape=[3], element_dtype=tf.float32))


@tf.function(autograph=False, experimental_attributes={"_noinline": True})
def called(x: tf.Tensor) -> tf.Tensor:
    return tf.tanh(x)


@pytest.mark.parametrize("case", REASONS)
def test_the_reason(case: str) -> None:
    fn, node, expected = REASONS[case]
    assert re.search(expected, why(fn, node)), why(fn, node)


def test_a_node_without_a_kernel_says_so_and_one_with_two_types_too() -> None:
    def pooled(x: tf.Tensor) -> tf.Tensor:
        k = tf.ones((1, 1, 1, 3, 3))
        h = tf.nn.conv3d(tf.reshape(x, (1, 2, 2, 1, 3)), k, [1] * 5, "SAME")
        return tf.nn.conv3d(tf.nn.max_pool3d(h, 2, 2, "SAME"), k, [1] * 5, "SAME")

    def norm(x: tf.Tensor) -> tf.Tensor:
        h = tf.nn.conv2d(tf.reshape(x, (1, 2, 2, 3)), tf.ones((1, 1, 3, 3)), 1, "SAME")
        h, *_ = tf.compat.v1.nn.fused_batch_norm(h, tf.ones(3), tf.zeros(3))
        return tf.nn.conv2d(h, tf.ones((1, 1, 3, 3)), 1, "SAME")

    row = mtf.explain(norm, X, mode=BF16).row("FusedBatchNormV3")
    assert row.types == {"T": "bfloat16", "U": "float32"}
    assert row.why.endswith("; its type U stays FP32")
    assert not mtf.explain(pooled, X, mode="cpu").row("MaxPool3D").painted
    assert why(pooled, "MaxPool3D", "cpu") == "CPU has no float16 kernel of MaxPool3D"
    assert mtf.explain(pooled, X, mode=BF16).row("MaxPool3D").painted


def test_casts_say_where_they_go() -> None:
    found = mtf.explain(lambda x: tf.cos(x @ W) + tf.sin(x @ W), X, mode=BF16)
    assert CastRow("x", 0, "bfloat16", ("matmul", "matmul_1")) in found.casts
    assert CastRow("matmul", 0, "float32", ("Cos",)) in found.casts


def test_op_lists_by_mapping_by_file_and_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "lists.toml"
    file.write_text('deny = ["Tanh"]\n')
    for given in ({"deny": ["Tanh"]}, file, str(file), op_lists(BF16, {"deny": ["Tanh"]}, environ={})):
        assert why(net, "Tanh", op_lists=given) == "Tanh is on the deny list"
    assert why(net, "Tanh").startswith("between")


def test_modes_and_their_other_names() -> None:
    assert mtf.explain(net, X).mode == BF16  # no GPU is visible to these tests
    assert mtf.explain(net, X, mode="bf16") == mtf.explain(net, X, mode=BF16)
    assert mtf.explain(net, X, mode="bf16", op_lists=op_lists(BF16, environ={})).mode == BF16
    cuda = mtf.explain(net, X, mode="fp16")
    assert (cuda.mode, cuda.dtype, cuda.device) == ("cuda", "float16", "GPU")
    assert colours(cuda) == EXPECTED
    assert "no GPU kernels to look up" in cuda.notes[0]
    assert "two casts" in mtf.explain(net, X, mode="cpu").notes[0]
    assert "AMX-FP16 or AVX-NE-CONVERT" in mtf.explain(net, X, mode="onednn_float16").notes[0]


def test_a_graph_without_an_allow_op_is_left_as_it_is() -> None:
    found = mtf.explain(lambda x: tf.tanh(tf.nn.relu(x)), X, mode=BF16)
    assert (found.painted, found.casts) == ((), ())
    assert "no op on the allow list that could become 16 bits" in found.notes[0]
    for node in ("Tanh", "Relu"):
        assert found.row(node).rule == "no allow op"
        assert "no op on the allow list can become 16 bits in this graph" in found.row(node).why


@pytest.mark.parametrize("case", ["denied", "off every list", "none"])
def test_a_denied_op_says_so_also_in_a_graph_without_an_allow_op(case: str) -> None:
    moved = {"denied": {"deny": ["MatMul"]}, "off every list": {"other": ["MatMul"]}, "none": None}[case]
    found = mtf.explain(lambda x: tf.exp(x if case == "none" else x @ W), X, mode=BF16, op_lists=moved)
    assert not found.painted
    assert (found.row("Exp").rule, found.row("Exp").why) == ("deny list", "Exp is on the deny list")
    if case == "denied":
        assert found.row("matmul").why == "MatMul is on the deny list"
        assert "MatMul is on the deny list" in str(found)
    if case == "off every list":
        assert found.row("matmul").why.startswith("MatMul is on no list")


def test_an_allow_op_that_the_pass_must_not_change_is_none_that_could_become_16_bits() -> None:
    def away(x: tf.Tensor) -> tf.Tensor:
        with tf.device("/device:GPU:0"):
            x = x @ W
        return tf.exp(tf.tanh(x))

    found = mtf.explain(away, X, mode=BF16)
    assert "no op on the allow list that could become" in found.notes[0]
    assert found.row("matmul").rule == "left out"
    assert (found.row("Tanh").rule, found.row("Exp").rule) == ("no allow op", "deny list")


def test_a_denied_op_that_is_not_even_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LEVEL", "UNSAFE_FORCE_ALL")
    found = mtf.explain(
        lambda x: tf.nn.softmax_cross_entropy_with_logits(tf.ones((4, 3)), x @ W), X, mode="cuda"
    )
    row = next(row for row in found.rows if row.op == "SoftmaxCrossEntropyWithLogits")
    assert (row.painted, row.why) == (False, "SoftmaxCrossEntropyWithLogits is on the deny list")


def test_a_function_that_xla_compiles_has_a_note() -> None:
    compiled = tf.function(net, jit_compile=True)
    assert "jit_compile=False" in mtf.explain(compiled, X, mode=BF16).notes[0]
    assert mtf.explain(tf.function(net), X, mode=BF16).notes == ()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("every_node", [False, True])
def test_the_text_fits_its_width(width: int, every_node: bool) -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape, tf.name_scope("a_long_name_for_a_scope/and_another_one_within"):
            tape.watch(x)
            for _ in tf.range(3):
                x = tf.tanh(x @ W) + tf.exp(x)
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(x, x @ W))
        return tape.gradient(loss, x)

    found = mtf.explain(step, X, mode=BF16)
    text = found.as_text(width, every_node=every_node)
    lines = text.splitlines()
    too_long = [line for line in lines if len(line) > width]
    assert not too_long
    assert lines[0].startswith(f"{BF16}: {len(found.painted)} of the {len(found.rows)}")
    assert sum(line.startswith("Stays FP32 (") for line in lines) == 1
    for op in {row.op for row in found.unpainted if row.rule != "value"}:
        assert re.search(rf"^  (deny |infer|clear|allow|-    ) {op}", text, re.MULTILINE), op
    if width == 80 and not every_node:
        assert str(found) == text


def test_groups_count_every_node_once() -> None:
    found = mtf.explain(lambda x: tf.exp(tf.exp(x @ W) + tf.exp(x)) @ W, X, mode=BF16)
    assert "deny  Exp x3" in str(found)
    assert found.as_text(every_node=True).count("is on the deny list") == 4  # and the AddV2 below them


def test_json_has_every_row() -> None:
    found = mtf.explain(net, X, mode=BF16)
    data = json.loads(found.to_json())
    assert [row["node"] for row in data["rows"]] == [row.node for row in found.rows]
    assert data["casts"][0]["readers"]
    assert data["mode"] == BF16


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: mtf.explain(net, X, mode="fp17"), UnknownNameError, "onednn_bfloat16.* mean 'fp16'"),
        (
            lambda: mtf.explain(net, X, mode=None),
            UsageError,
            "mode is None; give one of the names auto, cuda",
        ),
        (lambda: mtf.explain(net, X, mode=1), UsageError, "mode is 1; give one of the names auto, cuda"),
        (lambda: mtf.explain(net, X, mode="FP32"), UsageError, "'FP32', in which nothing is rewritten"),
        (lambda: mtf.explain(3), UsageError, "a tf.function"),
        (lambda: mtf.explain(net), UsageError, "TensorSpec"),
        (lambda: mtf.explain(tf.Graph(), X), UsageError, "takes no arguments"),
        (lambda: mtf.explain(tf.function(net).get_concrete_function(X), X), UsageError, "takes no arguments"),
        (lambda: mtf.explain(keras.Sequential([keras.layers.Dense(2)])), UsageError, "TensorSpec"),
        (lambda: mtf.explain(net, X, op_lists={"deny": ["Tahn"]}), UnknownNameError, "Tahn"),
        (lambda: mtf.explain(net, X, mode="cpu", op_lists=op_lists("cuda")), UsageError, "one of them"),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def two(x: Any) -> Any:
    return inside(x)


def inside(x: Any) -> Any:
    return tf.matmul(x, tf.ones((3, 3)))


def test_the_cause_is_told() -> None:
    with pytest.raises(UsageError, match=r"traced with 1 arguments: ValueError: Dimensions must be equal"):
        mtf.explain(two, tf.TensorSpec((2, 5)))
    layers = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    with pytest.raises(UsageError, match=r"calling Sequential\.call\(\)\. Input 0 .* incompatible"):
        mtf.explain(lambda x: layers(x), tf.TensorSpec((2, 5)))


def test_a_row_that_is_not_there() -> None:
    found = mtf.explain(net, X, mode=BF16)
    assert [row.node for row in found.rows if row.op == "MatMul"]
    with pytest.raises(UnknownNameError, match=r"'MatMul' is an op; the names of its nodes are '"):
        found.row("MatMul")
    name = next(row.node for row in found.rows if row.op == "MatMul")
    with pytest.raises(UnknownNameError, match=f"no node '{name}x' .*Did you mean '{name}'"):
        found.row(name + "x")


REAL = """
import tensorflow as tf
from tensorflow.python.eager import context
from mezzo.tensorflow import explain
from tensorflow.core.framework.types_pb2 import DT_BFLOAT16

w, v = tf.Variable(tf.random.normal((64, 64))), tf.Variable(tf.random.normal((64, 10)))

def step(x, y):
    with tf.GradientTape() as tape:
        h = tf.nn.relu(x @ w + 1.0)
        for _ in tf.range(3):
            h = tf.tanh(h @ w)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, tf.exp(h) @ v))
    for variable, gradient in zip([w, v], tape.gradient(loss, [w, v])):
        variable.assign_sub(0.1 * gradient)
    return loss

x, y = tf.random.normal((8, 64)), tf.zeros((8,), tf.int32)
told = {row.node: row.painted for row in explain(step, x, y, mode="onednn_bfloat16").rows}
tf.config.optimizer.set_experimental_options({"auto_mixed_precision_onednn_bfloat16": True})
context.enable_run_metadata()
tf.function(step)(x, y)
run = {}
for graph in context.export_run_metadata().function_graphs:
    for node in graph.post_optimization_graph.node:
        run[node.name] = any(value.type == DT_BFLOAT16 for value in node.attr.values())
# Names that end in a number were made while control flow was lowered, and the numbers differ from run to run.
shared = [name for name in told.keys() & run.keys() if not name.rpartition("_")[2].isdigit() or "/_" not in name]
print(len(shared), sum(told[name] for name in shared), [name for name in shared if told[name] != run[name]])
"""


def test_what_tensorflow_runs_is_what_was_told(tmp_path: Path) -> None:
    script = tmp_path / "real.py"  # a file, since autograph reads the source
    script.write_text(REAL)
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    shared, painted, different = result.stdout.strip().split(" ", 2)
    assert different == "[]"
    assert (int(shared), int(painted)) >= (25, 10)


def test_a_name_alone_imports_no_tensorflow() -> None:
    code = (
        "import sys, mezzo.tensorflow; print('explain' in dir(mezzo.tensorflow), 'tensorflow' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == "True False\n"
