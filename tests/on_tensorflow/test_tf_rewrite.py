"""The call: what is chosen where, graphs rewritten in functions, Sessions and `fit` of Keras 3, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.training.experimental import mixed_precision_global_state as global_state

import mezzo.tensorflow as mt
import one_task
from cpu import needs_avx512
from mezzo.core.errors import UnknownNameError, UnsupportedPrecisionError, UsageError
from mezzo.core.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from mezzo.keras import set_policy
from mezzo.tensorflow.rewrite import SIMULATE_GPU, choose
from mezzo.tensorflow.switch import SWITCH
from page_blocks import blocks, run

v1 = tf.compat.v1
enable = mt.enable_mixed_precision_graph_rewrite
INPUT = tf.ones([8, 32])


def adam() -> Any:
    return v1.train.AdamOptimizer()


def products() -> Any:
    weight = tf.Variable(tf.random.stateless_normal([32, 32], [1, 2]))

    @tf.function
    def three(x: Any) -> Any:
        for _ in range(3):
            x = tf.tanh(tf.matmul(x, weight))
        return tf.reduce_sum(x)

    return three


def test_a_function_is_rewritten_and_back_again() -> None:
    needs_avx512("TensorFlow leaves its graphs in FP32")
    function = products()
    full = float(function(INPUT))  # traced before the rewrite
    for _ in range(2):
        enable(adam())
        low = float(function(INPUT))
        assert low != full
        assert low == pytest.approx(full, rel=0.1)
        assert float(products()(INPUT)) == low
        mt.disable_mixed_precision_graph_rewrite()
        assert float(function(INPUT)) == float(products()(INPUT)) == full


def in_a_session(config: Any = None) -> set[str]:
    """The types of its products."""
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [8, 32])
        y = x
        weight = v1.get_variable("weight", [32, 32])
        for _ in range(3):
            y = tf.tanh(tf.matmul(y, weight))
        with v1.Session(config=config) as session:
            session.run(v1.global_variables_initializer())
            metadata = v1.RunMetadata()
            options = v1.RunOptions(output_partition_graphs=True)
            session.run(tf.reduce_sum(y), {x: np.ones((8, 32))}, options=options, run_metadata=metadata)
    nodes = (node for graph in metadata.partition_graphs for node in graph.node)
    return {tf.dtypes.as_dtype(node.attr["T"].type).name for node in nodes if node.op.endswith("MatMul")}


def test_a_session_is_rewritten_with_a_config_of_its_own_too() -> None:
    needs_avx512("TensorFlow leaves its graphs in FP32")
    assert in_a_session() == {"float32"}
    global_state.set_non_mixed_precision_session_created(False)
    enable(adam())
    assert in_a_session() == {"bfloat16"}
    config = v1.ConfigProto(allow_soft_placement=True)
    before = config.SerializeToString()
    assert in_a_session(config) == {"bfloat16"}
    assert config.SerializeToString() == before
    rewrites = config.graph_options.rewrite_options
    rewrites.auto_mixed_precision_onednn_bfloat16 = rewrites.OFF
    assert in_a_session(config) == {"float32"}  # as its owner wrote
    mt.disable_mixed_precision_graph_rewrite()
    assert in_a_session(v1.ConfigProto()) == {"float32"}


def test_a_session_from_before_is_warned_of_once() -> None:
    SWITCH.on("auto_mixed_precision")  # the rewrite to fp16, whose option TensorFlow reads in every Session
    SWITCH.off()
    for _ in range(2):
        v1.Session(graph=tf.Graph())
        with pytest.warns(UserWarning, match=r"a .*Session was made before .* Make Sessions after") as told:
            enable(adam())
        assert told[0].filename == __file__
        enable(adam())  # warnings are errors
        v1.Session(graph=tf.Graph())  # with the rewrite
        enable(adam())
        mt.disable_mixed_precision_graph_rewrite()


GPU = {"compute_capability": (8, 0), "device_name": "Some GPU"}
CHOICES = [
    # GPU, CPU's formats, TF_ENABLE_ONEDNN_OPTS, asked, chosen
    (None, "bf16", "1", "auto", "bf16"),
    (None, "", "1", "auto", "fp32"),
    (None, "bf16", "0", "auto", "fp32"),
    (None, "", "1", "Mixed_bfloat16", "bf16"),
    (GPU, "", "1", "mixed_float16", "fp16"),
    (GPU, "bf16", "1", "auto", "fp16"),
    ({**GPU, "compute_capability": (6, 1)}, "bf16", "1", "auto", "bf16"),
    (None, "bf16", "0", "bf16", "TF_ENABLE_ONEDNN_OPTS=0 turns off"),
    (None, "bf16", "1", "fp16", "TensorFlow sees none here"),
    (GPU, "bf16", "1", "bf16", "BF16 on CPUs alone, and here is Some GPU"),
]


@pytest.mark.parametrize(("gpu", "native", "onednn", "asked", "chosen"), CHOICES)
def test_choices(gpu: Any, native: str, onednn: str, asked: str, chosen: str, monkeypatch: Any) -> None:
    devices = {"GPU": ["GPU:0"] if gpu else []}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: devices.get(kind, []))
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda device: gpu)
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", native)
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", onednn)
    if chosen in ("bf16", "fp16", "fp32"):
        assert choose(asked)[0] == chosen
    else:
        with pytest.raises(UnsupportedPrecisionError, match=re.escape(chosen)):
            choose(asked)


def test_loss_scales() -> None:
    dynamic = DynamicLossScale(init=2.0**10, growth_interval=50, growth_factor=4.0, backoff_factor=0.25)
    for given, pure in (
        ("dynamic", NoLossScale()),  # BF16 has FP32's range
        (DynamicLossScale(init=8.0), DynamicLossScale(init=8.0)),
        ("2**7", StaticLossScale(128.0)),
        (v1.mixed_precision.FixedLossScale(128), StaticLossScale(128.0)),
        (v1.mixed_precision.DynamicLossScale(2.0**10, 50, 4.0), dynamic),
    ):
        assert enable(adam(), given).machine() == pure


FAMILIES = [
    (adam, v1.train.Optimizer),
    (keras.optimizers.Adam, keras.optimizers.LossScaleOptimizer),
    (tf_keras.optimizers.Adam, tf_keras.mixed_precision.LossScaleOptimizer),
    (tf_keras.optimizers.legacy.Adam, tf_keras.optimizers.legacy.Optimizer),
]


@pytest.mark.parametrize(("make", "kind"), FAMILIES)
def test_each_family_stays_what_it_is(make: Any, kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = enable(make(), 128)
    assert isinstance(optimizer, kind)
    assert "loss_scale=128, rewrite=bf16 (no GPU" in repr(optimizer)
    assert (optimizer.rewrite.precision, optimizer.rewrite.loss_scale) == ("bf16", "128")
    assert optimizer.rewrite.why in capsys.readouterr().err
    with pytest.raises(UsageError, match="scales the loss already"):
        enable(optimizer)


SCALED = "scales the loss already. Give the opt"
BAD = [
    (lambda: enable("adam"), UsageError, "optimizer is 'adam'"),
    (lambda: enable(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())), UsageError, SCALED),
    (lambda: enable(v1.mixed_precision.MixedPrecisionLossScaleOptimizer(adam(), 128)), UsageError, SCALED),
    (lambda: enable(adam(), None), UsageError, 'For no loss scale use loss_scale="none"'),
    (lambda: enable(adam(), op_lists={"deny": ["Tanh"]}), UsageError, "op_lists.*DENYLIST_ADD=Tanh"),
    (lambda: enable(adam(), precision="fp15"), UnknownNameError, "Did you mean 'fp16'"),
    (lambda: enable(adam(), -3), UsageError, "enable_mixed_precision_graph_rewrite: loss_scale: scale is -3"),
]


@pytest.mark.parametrize(("call", "kind", "said"), BAD)
def test_bad_input_changes_nothing(call: Any, kind: Any, said: str) -> None:
    environment = dict(os.environ)
    with pytest.raises(kind, match=said):
        call()
    assert not global_state.is_mixed_precision_graph_rewrite_enabled()
    assert dict(os.environ) == environment


X = np.random.default_rng(0).standard_normal((64, 8)).astype("float32")


def model() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([8]), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])


def fit(trained: Any) -> list[float]:
    return list(trained.fit(X, X[:, :1], batch_size=16, epochs=2, verbose=0, shuffle=False).history["loss"])


def test_it_fits_in_rewritten_graphs() -> None:
    needs_avx512("TensorFlow leaves its graphs in FP32")
    plain = model()
    plain.compile(keras.optimizers.SGD(0.01), "mse")
    full = fit(plain)
    trained, optimizer = model(), enable(keras.optimizers.SGD(0.01), "dynamic(init=16,growth_interval=3)")
    trained.compile(optimizer, "mse")
    low = fit(trained)
    assert low != full
    assert low == pytest.approx(full, rel=0.05)
    assert optimizer.machine() == DynamicLossScale(init=16.0, growth_interval=3, scale=64.0, good_steps=2)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert repr(again) == "GraphRewriteOptimizer(SGD, loss_scale=dynamic(init=16,growth_interval=3))"


def test_an_optimizer_that_the_first_step_in_a_function_builds() -> None:
    trained, optimizer = model(), enable(keras.optimizers.SGD(0.1), 64)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((trained(X) - X[:, :1]) ** 2)
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, trained.trainable_variables), trained.trainable_variables)
        return loss

    first = float(step())
    assert float(step()) < first
    assert int(optimizer.iterations.numpy()) == 2


@pytest.mark.parametrize("built", [False, True])
def test_a_checkpoint_of_the_plain_optimizer(built: bool, tmp_path: Path) -> None:
    plain = model()
    plain.compile(keras.optimizers.Adam(1e-2), "mse")
    fit(plain)
    path = tf.train.Checkpoint(model=plain, optimizer=plain.optimizer).save(str(tmp_path / "plain"))
    on = fit(plain)
    optimizer = enable(keras.optimizers.Adam(1e-2), 64)
    mt.disable_mixed_precision_graph_rewrite()  # so that the numbers are FP32's
    trained = model()
    trained.compile(optimizer, "mse")
    if built:
        optimizer.build(trained.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=trained, optimizer=optimizer.inner_optimizer)
    checkpoint.restore(path).expect_partial()
    assert int(optimizer.iterations.numpy()) == 8
    assert fit(trained) == on
    assert optimizer.machine().scale == 64.0


def test_a_policy_set_after_the_rewrite_is_refused() -> None:
    trained = model()
    trained.compile(enable(keras.optimizers.SGD()), "mse")
    set_policy("bf16")
    with pytest.raises(UsageError, match=r"mixed_bfloat16.*mezzo\.keras\.set_policy\('fp32'\)"):
        fit(trained)
    with pytest.raises(UsageError, match="mixed_bfloat16"):
        enable(keras.optimizers.SGD())
    set_policy("fp32")
    again = model()
    again.compile(enable(keras.optimizers.SGD()), "mse")
    fit(again)


def test_xla_is_left_out_and_refused_while_the_rewrite_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = [SimpleNamespace(device_type="GPU")]  # without one Keras leaves XLA out by itself
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *kind: gpu)
    trained = model()
    trained.compile(enable(keras.optimizers.SGD()), "mse")
    assert trained.jit_compile is False
    trained.compile(enable(keras.optimizers.SGD()), "mse", jit_compile=True)
    with pytest.raises(UsageError, match=r"XLA compiles.*jit_compile=False in model\.compile"):
        fit(trained)
    mt.disable_mixed_precision_graph_rewrite()
    trained.compile("sgd", "mse")
    assert trained.jit_compile is True


def loss_of(w: dict[str, Any], x: Any, target: Any, z: Any) -> Any:
    hidden = tf.tanh(tf.matmul(x, w["w1"]) + w["b1"])
    error = tf.matmul(hidden, w["w2"]) + w["b2"] - target
    return one_task.PART_OF_ERROR * tf.reduce_mean(tf.square(error)) + tf.reduce_mean(tf.matmul(z, w["v"]))


def test_the_task_of_every_framework_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a Session. TensorFlow simulates a GPU, and its pass for a CPU computes in FP16."""
    monkeypatch.setenv(SIMULATE_GPU, "1")
    losses, scales = [], []
    given = one_task.task()
    with tf.Graph().as_default() as graph:
        weights = {name: v1.get_variable(name, initializer=first) for name, first in given.weights.items()}
        batch = [v1.placeholder(tf.float32, part.shape[1:]) for part in (given.x, given.target, given.z)]
        momentum = v1.train.MomentumOptimizer(one_task.LEARNING_RATE, one_task.MOMENTUM)
        optimizer = enable(momentum, one_task.loss_scale("fp16"), precision="fp16")
        loss = loss_of(weights, *batch)
        step, scale = optimizer.minimize(loss), optimizer.loss_scale
        config = v1.ConfigProto()
        config.graph_options.rewrite_options.auto_mixed_precision_cpu = RewriterConfig.ON
        with v1.Session(graph=graph, config=config) as session:
            session.run(v1.global_variables_initializer())
            for parts in zip(given.x, given.target, given.z):
                losses.append(float(session.run([loss, step], dict(zip(batch, parts)))[0]))
                scales.append(float(session.run(scale)))
    one_task.check("fp16", losses, scales)
    # The rewrite did compute in it.
    assert not np.allclose(losses[:5], one_task.expected("fp32").losses[:5], rtol=1e-6)


# TF1's names in today's `tf.train`, a script as the tutorials have it, and the Python of docs/keras.md.


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    mt.uninstall()


def test_the_names_come_and_go_and_replace_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.train, "FtrlOptimizer", "mine", raising=False)
    before = set(vars(tf.train)), set(vars(tf.train.experimental))
    assert not {"AdamOptimizer", "get_or_create_global_step"} & before[0]
    mt.install()
    mt.install()  # again is as once
    for name in ("AdamOptimizer", "Optimizer", "get_or_create_global_step"):
        assert getattr(tf.train, name) is getattr(tf.compat.v1.train, name)
    assert tf.train.FtrlOptimizer == "mine"
    experimental, theirs = tf.train.experimental, tf.compat.v1.mixed_precision
    enable = experimental.enable_mixed_precision_graph_rewrite
    assert enable is mt.enable_mixed_precision_graph_rewrite
    assert experimental.FixedLossScale is theirs.FixedLossScale
    with pytest.raises(AttributeError, match="GRAPH_REWRITE_LOG_PATH"):
        _ = mt.explain  # a removed name says what serves instead
    mt.uninstall()
    assert (set(vars(tf.train)), set(vars(experimental))) == before
    assert tf.train.FtrlOptimizer == "mine"
    mt.uninstall()


TUTORIAL = """
import sys
import mezzo.tensorflow as mt
mt.install()
assert "tensorflow" not in sys.modules
assert set(mt.__all__) <= set(dir(mt))

import tensorflow as tf
v1 = tf.compat.v1
v1.disable_v2_behavior()
x = v1.placeholder(tf.float32, [None])
weight = tf.Variable(1.0)
opt = tf.train.AdamOptimizer(0.1)
opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt, loss_scale=128)
step = opt.minimize(tf.reduce_mean(weight * x), global_step=tf.train.get_or_create_global_step())
with v1.Session() as session:
    session.run(v1.global_variables_initializer())
    for _ in range(5):
        session.run(step, {x: [1.0, 1.0]})
    print(session.run(tf.train.get_global_step()), round(float(session.run(weight)), 4))
"""


def test_a_tutorial_of_tf1_with_the_names_installed_before_tensorflow_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", TUTORIAL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mezzo: graph rewrite: bf16 (no GPU" in done.stderr
    assert done.stdout == "5 0.5\n"


@pytest.mark.parametrize("block", blocks("tensorflow"))
def test_a_block_runs_alone_and_prints_what_the_page_shows(block: Any, tmp_path: Path, capsys: Any) -> None:
    run(block, tmp_path, capsys)
