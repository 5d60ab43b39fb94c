"""Keras 3 under the graph rewrite: fit, loops, files, XLA and mixed policies (refused)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tf_switched import made_of, types

import mezzo.tensorflow as mt
from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import DynamicLossScale
from mezzo.keras import set_policy

enable = mt.enable_mixed_precision_graph_rewrite
X = np.random.default_rng(0).standard_normal((64, 8)).astype("float32")


def model() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([8]), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])


def fit(trained: Any) -> list[float]:
    return list(trained.fit(X, X[:, :1], batch_size=16, epochs=2, verbose=0, shuffle=False).history["loss"])


def test_it_fits_in_rewritten_graphs() -> None:
    trained, optimizer = model(), enable(keras.optimizers.SGD(0.01), "dynamic(init=16,growth_interval=3)")
    trained.compile(optimizer, "mse")
    assert types(made_of(lambda: fit(trained)))["MatMul"] == {"bfloat16"}
    assert optimizer.machine() == DynamicLossScale(init=16.0, growth_interval=3, scale=64.0, good_steps=2)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert repr(again) == "GraphRewriteOptimizer(SGD, loss_scale=dynamic(init=16,growth_interval=3))"


@pytest.mark.parametrize("scale", ["none", 64])
def test_an_optimizer_that_the_first_step_in_a_function_builds(scale: Any) -> None:
    trained = model()
    optimizer = enable(keras.optimizers.SGD(0.1), scale)

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
