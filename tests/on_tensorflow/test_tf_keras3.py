"""Keras 3 under the graph rewrite: a loop of one's own, a plain optimizer's checkpoint, and Mezzo's own policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mezzo.tensorflow as mt
from mezzo.core.errors import UsageError
from mezzo.keras import set_policy

enable = mt.enable_mixed_precision_graph_rewrite
X = np.random.default_rng(0).standard_normal((64, 8)).astype("float32")


def model() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([8]), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])


def fit(trained: Any) -> list[float]:
    return list(trained.fit(X, X[:, :1], batch_size=16, epochs=2, verbose=0, shuffle=False).history["loss"])


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


def test_a_mixed_layer_in_a_function() -> None:
    layer = keras.layers.Dense(1, dtype="mixed_float16")
    layer.build((None, 8))
    optimizer = enable(keras.optimizers.SGD(0.1))

    @tf.function
    def step() -> None:
        optimizer.apply([tf.ones([8, 1]), tf.ones([1])], layer.trainable_variables)

    with pytest.raises(UsageError, match=r"has the dtype policy 'mixed_float16'"):
        step()


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


@pytest.mark.parametrize("ours", [False, True])
def test_the_message_names_the_call_that_set_the_policy(ours: bool) -> None:
    optimizer = enable(keras.optimizers.SGD())
    if ours:
        set_policy("bf16")
        reset = r"call mezzo\.keras\.set_policy\('fp32'\)"
    else:
        keras.config.set_dtype_policy("mixed_bfloat16")
        reset = r"call keras\.config\.set_dtype_policy\('float32'\)"
    with pytest.raises(UsageError, match=reset):
        optimizer.scale_loss(1.0)
    with pytest.raises(UsageError, match=reset):
        enable(keras.optimizers.SGD())
    set_policy("fp32")
    keras.config.set_dtype_policy("float32")
    optimizer.scale_loss(1.0)
