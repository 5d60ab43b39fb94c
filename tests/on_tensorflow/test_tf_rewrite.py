"""The call: what is chosen where, that graphs are rewritten in functions and Sessions, and who is turned away."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types as types_module
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.training.experimental import mixed_precision_global_state as global_state
from tf_switched import INPUT, a_fresh_switch, adam, layers, made_of

import mezzo.tensorflow as mt
from mezzo.core.errors import UnknownNameError, UnsupportedPrecisionError, UsageError
from mezzo.core.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from mezzo.tensorflow import precision
from mezzo.tensorflow.rewrite import Rewrite

v1 = tf.compat.v1
enable = mt.enable_mixed_precision_graph_rewrite
PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with a_fresh_switch():
        yield


def types(function: Any, *args: Any) -> dict[str, set[str]]:
    """Op -> the types it has in the graph that TensorFlow made of `function`; none where it had made it before."""
    return _types(made_of(function, *args))


def _types(graphs: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for graph in graphs:
        for node in graph.node:
            if node.attr["T"].type:
                name = re.sub("^_(Fused|Mkl)?", "", node.op)
                found.setdefault(name, set()).add(tf.dtypes.as_dtype(node.attr["T"].type).name)
    return found


def test_a_function_is_rewritten_and_back_again() -> None:
    function = layers()
    full = float(function(INPUT))  # traced before the rewrite
    enable(adam())
    assert types(function, INPUT)["MatMul"] == {"bfloat16"}
    assert float(function(INPUT)) != full
    assert types(layers(), INPUT)["MatMul"] == {"bfloat16"}
    mt.disable_mixed_precision_graph_rewrite()
    assert float(function(INPUT)) == full
    assert types(layers(), INPUT)["MatMul"] == {"float32"}
    layers()(INPUT)  # in FP32, and no part of what comes next
    enable(adam())
    assert types(layers(), INPUT)["MatMul"] == {"bfloat16"}


def in_a_session(config: Any = None) -> dict[str, set[str]]:
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
    return _types(metadata.partition_graphs)


def test_a_session_is_rewritten_with_a_config_of_its_own_too() -> None:
    assert in_a_session()["MatMul"] == {"float32"}
    global_state.set_non_mixed_precision_session_created(False)
    enable(adam())
    assert in_a_session()["MatMul"] == {"bfloat16"}
    config = v1.ConfigProto(allow_soft_placement=True)
    before = config.SerializeToString()
    assert in_a_session(config)["MatMul"] == {"bfloat16"}
    assert config.SerializeToString() == before
    rewrites = config.graph_options.rewrite_options
    rewrites.auto_mixed_precision_onednn_bfloat16 = rewrites.OFF
    assert in_a_session(config)["MatMul"] == {"float32"}  # as its owner wrote
    mt.disable_mixed_precision_graph_rewrite()
    assert in_a_session(v1.ConfigProto())["MatMul"] == {"float32"}


def test_a_session_from_before_is_warned_of_once() -> None:
    with v1.Session(graph=tf.Graph()):
        with pytest.warns(
            UserWarning, match=r"a .*Session was made before .*: it goes on in FP32\. Make the Session after"
        ) as told:
            enable(adam())
        assert told[0].filename == __file__
        enable(adam())  # warnings are errors
        mt.disable_mixed_precision_graph_rewrite()
        with (
            v1.Session(graph=tf.Graph()),
            v1.Session(graph=tf.Graph()),
            pytest.warns(UserWarning, match=r"^2 .*Sessions were .*: they go .* Make the Sessions after"),
        ):
            enable(adam())


def test_sessions_that_do_not_go_on_in_fp32_are_not_warned_of() -> None:
    class Proxy:
        @property
        def __class__(self) -> Any:
            raise AssertionError("a proxy was asked what it stands for")

    closed, proxy = v1.Session(graph=tf.Graph()), Proxy()
    closed.close()
    enable(adam())  # warnings are errors
    del closed, proxy
    config = v1.ConfigProto()
    with v1.Session(graph=tf.Graph()), v1.Session(graph=tf.Graph(), config=config):
        mt.disable_mixed_precision_graph_rewrite()
        enable(adam())
    config.graph_options.rewrite_options.auto_mixed_precision_onednn_bfloat16 = 1
    mt.disable_mixed_precision_graph_rewrite()
    with v1.Session(graph=tf.Graph(), config=config):
        enable(adam())


def test_a_session_is_looked_for_also_while_a_function_is_traced() -> None:
    with v1.Session(graph=tf.Graph()):

        @tf.function
        def traced() -> Any:
            enable(adam())
            return tf.constant(1.0)

        with pytest.warns(UserWarning, match="a .*Session was made before"):
            traced()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("BF16", "bf16"),
        ("bfloat16", "bf16"),
        ("Mixed_bfloat16", "bf16"),
        ("float16", "fp16"),
        ("mixed_float16", "fp16"),
    ],
)
def test_other_names_of_precisions(given: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if meant == "fp16":
        monkeypatch.setenv(PREFIX + "SIMULATE_GPU", "1")
    assert precision.choose(given).precision == meant


@pytest.mark.parametrize("written", ["mapping", "toml"])
def test_op_lists_change_the_graph_and_go_again(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFIX + "DENYLIST_ADD", "Cos")
    given: Any = {"deny": ["Tanh"], "other": ["MatMul"]}
    if written == "toml":
        given = tmp_path / "lists.toml"
        given.write_text('deny = ["Tanh"]\nother = ["MatMul"]\n')
    enable(adam())
    assert types(layers(), INPUT)["MatMul"] == {"bfloat16"}
    optimizer = enable(adam(), op_lists=given)
    assert types(layers(), INPUT)["MatMul"] == {"float32"}
    assert dict(optimizer.rewrite.environment) == {
        PREFIX + "ALLOWLIST_REMOVE": "MatMul",
        PREFIX + "DENYLIST_ADD": "Cos,Tanh",
        PREFIX + "INFERLIST_REMOVE": "Tanh",
    }
    assert os.environ[PREFIX + "ALLOWLIST_REMOVE"] == "MatMul"
    enable(adam())  # without lists: they are TensorFlow's again
    assert types(layers(), INPUT)["MatMul"] == {"bfloat16"}
    mt.disable_mixed_precision_graph_rewrite()
    assert {name: value for name, value in os.environ.items() if name.startswith(PREFIX)} == {
        PREFIX + "DENYLIST_ADD": "Cos"
    }


def test_what_was_chosen_is_said_and_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = enable(adam())
    assert optimizer.rewrite == Rewrite("bf16", "no GPU, and this CPU multiplies BF16 through oneDNN", "none")
    line = "bf16 (no GPU, and this CPU multiplies BF16 through oneDNN)"
    assert capsys.readouterr().err == f"mezzo: graph rewrite: {line}; loss scale: none\n"
    assert repr(optimizer) == f"LossScaleOptimizer(AdamOptimizer, loss_scale=none, rewrite={line})"


GPU = {"compute_capability": (8, 0), "device_name": "Some GPU"}
CHOICES = [
    # GPU, CPU's formats, TF_ENABLE_ONEDNN_OPTS, asked, chosen
    (None, "bf16", "1", "auto", "bf16"),
    (None, "", "1", "auto", "fp32"),
    (None, "bf16", "0", "auto", "fp32"),
    (None, "", "1", "bf16", "bf16"),
    (GPU, "bf16", "1", "auto", "fp16"),
    (GPU, "bf16", "0", "fp16", "fp16"),
    ({**GPU, "compute_capability": (6, 1)}, "bf16", "1", "auto", "bf16"),
    (None, "bf16", "0", "bf16", "TF_ENABLE_ONEDNN_OPTS=0 turns off"),
    (None, "bf16", "1", "fp16", "TensorFlow sees none here"),
    ({**GPU, "compute_capability": (6, 1)}, "bf16", "1", "fp16", "TensorFlow sees none here"),
    (GPU, "bf16", "1", "bf16", "BF16 on CPUs alone, and here is Some GPU"),
]


@pytest.mark.parametrize(("gpu", "native", "onednn", "asked", "chosen"), CHOICES)
def test_choices(
    gpu: Any, native: str, onednn: str, asked: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tf.config, "get_visible_devices", lambda kind: ["GPU:0"] if gpu and kind == "GPU" else []
    )
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda device: gpu)
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", native)
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", onednn)
    if chosen in precision.MODES or chosen == "fp32":
        assert precision.choose(asked).precision == chosen
    else:
        with pytest.raises(UnsupportedPrecisionError, match=re.escape(chosen)):
            precision.choose(asked)


def test_the_processors_own_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEZZO_ASSUME_NATIVE")
    monkeypatch.setattr(precision, "_cpu_flags", lambda: frozenset({"avx512f", "avx512_bf16"}))
    assert precision.choose("auto").precision == "bf16"
    monkeypatch.setattr(precision, "_cpu_flags", lambda: frozenset({"avx512f", "avx_ne_convert"}))
    assert precision.choose("auto").precision == "fp32"


def test_fp16_on_a_pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "SIMULATE_GPU", "1")
    monkeypatch.setattr(tf.config.optimizer, "set_experimental_options", lambda options: told.update(options))
    told: dict[str, bool] = {}
    optimizer = enable(adam())
    assert told == {"auto_mixed_precision": True}
    assert repr(optimizer).startswith(
        "LossScaleOptimizer(AdamOptimizer, loss_scale=dynamic, rewrite=fp16 (on the GPU"
    )


LOSS_SCALES = [
    ("dynamic", NoLossScale()),  # BF16 has FP32's range
    ("none", NoLossScale()),
    ("dynamic(init=1024)", DynamicLossScale(init=1024.0)),
    (DynamicLossScale(init=8.0), DynamicLossScale(init=8.0)),
    (128, StaticLossScale(128.0)),
    ("2**7", StaticLossScale(128.0)),
    (v1.mixed_precision.FixedLossScale(128), StaticLossScale(128.0)),
    (
        v1.mixed_precision.DynamicLossScale(2.0**10, 50, 4.0),
        DynamicLossScale(init=2.0**10, growth_interval=50, growth_factor=4.0, backoff_factor=0.25),
    ),
]


@pytest.mark.parametrize(("given", "pure"), LOSS_SCALES, ids=str)
def test_loss_scales(given: Any, pure: Any) -> None:
    assert enable(adam(), given).machine() == pure


FAMILIES = {
    "v1": (adam, "LossScaleOptimizer(AdamOptimizer"),
    "keras 3": (keras.optimizers.Adam, "GraphRewriteOptimizer(Adam"),
    "tf_keras": (tf_keras.optimizers.Adam, "LossScaleOptimizer(Adam"),
    "legacy": (tf_keras.optimizers.legacy.Adam, "LegacyLossScaleOptimizer(Adam"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_stays_what_it_is(family: str) -> None:
    make, said = FAMILIES[family]
    optimizer = enable(make(), 128)
    assert isinstance(optimizer, {
        "v1": v1.train.Optimizer,
        "keras 3": keras.optimizers.LossScaleOptimizer,
        "tf_keras": (tf_keras.optimizers.Optimizer, tf_keras.mixed_precision.LossScaleOptimizer),
        "legacy": tf_keras.optimizers.legacy.Optimizer,
    }[family])  # fmt: skip
    assert repr(optimizer).startswith(f"{said}, loss_scale=128, rewrite=bf16 (no GPU")
    with pytest.raises(UsageError, match="scales the loss already"):
        enable(optimizer)


def test_optimizers_with_another_loss_scale_are_refused() -> None:
    for scaled in (
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
        tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.Adam()),
        v1.mixed_precision.MixedPrecisionLossScaleOptimizer(adam(), 128),
    ):
        with pytest.raises(
            UsageError, match=r"LossScaleOptimizer(V3)? scales the loss already\. Give the opt"
        ):
            enable(scaled)


BAD = [
    (lambda: enable(3), UsageError, "optimizer is 3; give an optimizer of tf.compat.v1.train"),
    (lambda: enable("adam"), UsageError, "optimizer is 'adam'"),
    (lambda: enable(keras.optimizers.Adam), UsageError, "is the class Adam;.* Call it: Adam"),
    (lambda: enable(adam(), None), UsageError, 'for no loss scale give loss_scale="none"'),
    (
        lambda: enable(adam(), "dynamik"),
        UsageError,
        r"'dynamik' is no loss scale\. Use none, dynamic, dynamic\([^)]*\), or a number such as 1024 or 2\*\*10\.$",
    ),
    (
        lambda: enable(adam(), []),
        UsageError,
        'StaticLossScale or NoLossScale, a number, or "dynamic" or "none"$',
    ),
    (lambda: enable(adam(), 0), UsageError, "a loss scale is a number between"),
    (lambda: enable(adam(), "statistical"), UsageError, "removed.*'dynamic'"),
    (lambda: enable(adam(), precision="fp15"), UnknownNameError, "Did you mean 'fp16'"),
    (lambda: enable(adam(), precision="fp32"), UsageError, "'fp32'.*disable_mixed_precision_graph_rewrite"),
    (
        lambda: enable(adam(), -3),
        UsageError,
        "enable_mixed_precision_graph_rewrite: loss_scale: scale is -3: a loss scale is a number between",
    ),
    (lambda: enable(adam(), op_lists={"deny": {"MatMul": False}}), UsageError, "give a list of names"),
    (
        lambda: enable(adam(), op_lists={"deni": []}),
        UnknownNameError,
        "unknown list 'deni'.*Did you mean 'deny'",
    ),
    (
        lambda: enable(adam(), op_lists={"deny": ["Tanhh"]}),
        UnknownNameError,
        "unknown op 'Tanhh'.*mean 'Tanh'",
    ),
    (lambda: enable(adam(), op_lists={"deny": [7]}), UnknownNameError, "unknown op 7"),
    (lambda: enable(adam(), op_lists={"deny": "Tanh"}), UsageError, "deny is 'Tanh'; give a list"),
    (lambda: enable(adam(), op_lists=["Tanh"]), UsageError, "give a mapping such as"),
    (lambda: enable(adam(), op_lists={"deny": ["Tanh"], "clear": ["Tanh"]}), UsageError, "under both"),
    (lambda: enable(adam(), op_lists="none.toml"), UsageError, "'none.toml': No such file"),
]


@pytest.mark.parametrize(("call", "kind", "said"), BAD, ids=[row[2] for row in BAD])
def test_bad_input_changes_nothing(call: Any, kind: Any, said: str) -> None:
    environment = dict(os.environ)
    with pytest.raises(kind, match=said):
        call()
    assert not v1.mixed_precision.experimental or not global_state.is_mixed_precision_graph_rewrite_enabled()
    assert dict(os.environ) == environment


def test_a_toml_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "lists.toml"
    path.write_text("deny = [")
    with pytest.raises(UsageError, match="is no TOML"):
        enable(adam(), op_lists=path)
    path.write_text("[deny]\nMatMul = false")
    with pytest.raises(UsageError, match=r'give a list of names of ops, as in deny = \["Tanh"\]'):
        enable(adam(), op_lists=path)
    path.write_text('deny = ["Tanhh"]')
    with pytest.raises(UnknownNameError, match=r"lists\.toml: unknown op 'Tanhh'"):
        enable(adam(), op_lists=path)


def test_not_with_a_mixed_policy_as_well() -> None:
    for module, setter in (
        (keras, keras.config.set_dtype_policy),
        (tf_keras, tf_keras.mixed_precision.set_global_policy),
    ):
        setter("mixed_bfloat16")
        try:
            with pytest.raises(
                UsageError, match="dtype policy is 'mixed_bfloat16', which is mixed precision already"
            ):
                enable(module.optimizers.Adam())
        finally:
            setter("float32")
    enable(adam())
    with pytest.raises(ValueError, match="graph rewrite has already been enabled"):
        tf_keras.mixed_precision.set_global_policy("mixed_bfloat16")


def test_xla_is_refused_while_the_rewrite_is_on() -> None:
    weight = tf.Variable([1.0])
    optimizer = enable(adam(), 128)

    @tf.function(jit_compile=True)
    def step() -> None:
        optimizer.minimize(lambda: weight * 1.0, var_list=[weight])

    with pytest.raises(UsageError, match=r"XLA compiles this training step.*Use jit_compile=False"):
        step()


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
def test_keras_3_fits_in_rewritten_graphs() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input([8]),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(16),
            keras.layers.Dense(1),
        ]
    )
    optimizer = enable(keras.optimizers.SGD(0.01), "dynamic(init=16,growth_interval=3)")
    model.compile(optimizer, "mse")
    x, y = np.ones((16, 8), "float32"), np.ones((16, 1), "float32")
    found = types(lambda: model.fit(x, y, batch_size=4, epochs=2, verbose=0))
    assert found["MatMul"] == {"bfloat16"}
    assert optimizer.machine() == DynamicLossScale(init=16.0, growth_interval=3, scale=64.0, good_steps=2)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert repr(again) == "GraphRewriteOptimizer(SGD, loss_scale=dynamic(init=16,growth_interval=3))"


def test_keras_3_leaves_xla_out_while_the_rewrite_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = [types_module.SimpleNamespace(device_type="GPU")]  # without one Keras leaves XLA out by itself
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *kind: gpu)
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(1)])
    model.compile(enable(keras.optimizers.SGD()), "mse")
    assert model.jit_compile is False
    model.compile(enable(keras.optimizers.SGD()), "mse", jit_compile=True)
    with pytest.raises(
        UsageError, match=r"XLA compiles this training step.*jit_compile=False in model\.compile"
    ):
        model.fit(np.ones((4, 8), "float32"), np.ones((4, 1), "float32"), verbose=0)
    mt.disable_mixed_precision_graph_rewrite()
    model.compile("sgd", "mse")
    assert model.jit_compile is True


def test_a_run_in_bf16_follows_fp32() -> None:
    """The same training loop, rewritten and not: different numbers, and the same loss to BF16's precision."""

    def train(rewritten: bool) -> list[float]:
        weights = [tf.Variable(tf.random.stateless_normal([16, 16], [1, n]) / 4) for n in range(2)]
        x = tf.random.stateless_normal([64, 16], [2, 2])
        optimizer = v1.train.GradientDescentOptimizer(0.5)
        optimizer = enable(optimizer, "dynamic(init=256)") if rewritten else optimizer

        def loss() -> Any:
            return tf.reduce_mean((tf.matmul(tf.tanh(tf.matmul(x, weights[0])), weights[1]) - x) ** 2)

        @tf.function
        def step() -> Any:
            optimizer.minimize(loss, var_list=weights)
            return loss()

        return [float(step()) for _ in range(30)]

    full = train(False)
    mixed = train(True)
    assert mixed != full
    np.testing.assert_allclose(mixed, full, rtol=2.0**-7)
    assert full[-1] < 0.6 * full[0]


def test_two_replicas_skip_together() -> None:
    script = Path(__file__).parent / "children" / "two_replicas.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert sorted(told) == ["legacy", "tf_keras", "v1"]
    weights = [[0.625, 1.625], [0.625, 1.625], [0.625, 1.625], [0.1875, 1.1875]]
    for steps in told.values():
        assert [step["weights"] for step in steps] == [[each, each] for each in weights]
        assert [(step["scale"], step["skipped"]) for step in steps] == [
            (4.0, 0),
            (2.0, 1),
            (1.0, 2),
            (1.0, 2),
        ]
