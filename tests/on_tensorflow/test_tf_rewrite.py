"""The call: what is chosen where, that graphs are rewritten in functions and Sessions, and who is turned away."""

from __future__ import annotations

import os
import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.training.experimental import mixed_precision_global_state as global_state
from tf_switched import INPUT, adam, layers, made_of, types

import mezzo.tensorflow as mt
from mezzo.core.errors import UnknownNameError, UnsupportedPrecisionError, UsageError
from mezzo.core.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from mezzo.tensorflow.rewrite import SIMULATE_GPU, choose
from mezzo.tensorflow.switch import SWITCH

v1 = tf.compat.v1
enable = mt.enable_mixed_precision_graph_rewrite


def test_a_function_is_rewritten_and_back_again() -> None:
    function = layers()
    full = float(function(INPUT))  # traced before the rewrite
    enable(adam())
    assert types(made_of(function, INPUT))["MatMul"] == {"bfloat16"}
    assert float(function(INPUT)) != full
    assert types(made_of(layers(), INPUT))["MatMul"] == {"bfloat16"}
    mt.disable_mixed_precision_graph_rewrite()
    assert float(function(INPUT)) == full
    assert types(made_of(layers(), INPUT))["MatMul"] == {"float32"}
    layers()(INPUT)  # in FP32, and no part of what comes next
    enable(adam())
    assert types(made_of(layers(), INPUT))["MatMul"] == {"bfloat16"}


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
    return types(metadata.partition_graphs)


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
def test_choices(
    gpu: Any, native: str, onednn: str, asked: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tf.config, "get_visible_devices", lambda kind: ["GPU:0"] if gpu and kind == "GPU" else []
    )
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda device: gpu)
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", native)
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", onednn)
    if chosen in ("bf16", "fp16", "fp32"):
        assert choose(asked)[0] == chosen
    else:
        with pytest.raises(UnsupportedPrecisionError, match=re.escape(chosen)):
            choose(asked)


def test_fp16_on_a_pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIMULATE_GPU, "1")
    monkeypatch.setattr(tf.config.optimizer, "set_experimental_options", lambda options: told.update(options))
    told: dict[str, bool] = {}
    optimizer = enable(adam())
    assert told == {"auto_mixed_precision": True}
    assert (optimizer.rewrite.precision, optimizer.machine()) == ("fp16", DynamicLossScale())


LOSS_SCALES = [
    ("dynamic", NoLossScale()),  # BF16 has FP32's range
    (DynamicLossScale(init=8.0), DynamicLossScale(init=8.0)),
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
    chosen = optimizer.rewrite
    assert (chosen.precision, chosen.loss_scale) == ("bf16", "128")
    assert chosen.why in capsys.readouterr().err
    with pytest.raises(UsageError, match="scales the loss already"):
        enable(optimizer)


NEW_ADAM = tf_keras.optimizers.Adam
SCALED = "scales the loss already. Give the opt"
BAD = [
    (lambda: enable("adam"), UsageError, "optimizer is 'adam'"),
    (lambda: enable(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())), UsageError, SCALED),
    (lambda: enable(tf_keras.mixed_precision.LossScaleOptimizer(NEW_ADAM())), UsageError, SCALED),
    (lambda: enable(v1.mixed_precision.MixedPrecisionLossScaleOptimizer(adam(), 128)), UsageError, SCALED),
    (lambda: enable(adam(), None), UsageError, 'for no loss scale give loss_scale="none"'),
    (lambda: enable(adam(), "dynamik"), UsageError, "'dynamik' is not a loss scale"),
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


def test_not_with_a_mixed_policy_as_well() -> None:
    for module, setter in (
        (keras, keras.config.set_dtype_policy),
        (tf_keras, tf_keras.mixed_precision.set_global_policy),
    ):
        setter("mixed_bfloat16")
        with pytest.raises(
            UsageError, match=r"dtype policy of .* is 'mixed_bfloat16', which is mixed precision alr"
        ):
            enable(module.optimizers.Adam())
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
