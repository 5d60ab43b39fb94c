"""Keras 3 under the graph rewrite: loops, a plain optimizer's checkpoint, and mixed policies, which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

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


def dense(dtype: str | None = None) -> Any:
    return keras.Sequential([keras.Input([8]), keras.layers.Dense(1, dtype=dtype)])


def fit_one(optimizer: Any, dtype: str | None = None) -> Any:
    made = dense(dtype)
    made.compile(optimizer, "mse")
    made.fit(X, X[:, :1], verbose=0)
    return made


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_policy_after_the_rewrite(policy: str) -> None:
    optimizer, built = enable(keras.optimizers.SGD()), enable(keras.optimizers.SGD())
    weight = keras.Variable([1.0])
    built.build([weight])
    keras.config.set_dtype_policy(policy)
    with pytest.raises(UsageError, match=f"was set to '{policy}'.*call keras.config.set_dtype_policy"):
        fit_one(optimizer)
    with pytest.raises(UsageError, match="disable_mixed_precision_graph_rewrite"):
        optimizer.build([keras.Variable([1.0])])
    with pytest.raises(UsageError, match="disable_mixed_precision_graph_rewrite"):
        optimizer.scale_loss(1.0)
    with pytest.raises(UsageError, match="disable_mixed_precision_graph_rewrite"):
        built.apply([tf.ones([1])], [weight])


def test_a_layer_with_a_mixed_policy() -> None:
    with pytest.raises(UsageError, match=r"layer 'dense.*' has the dtype policy 'mixed_float16'"):
        fit_one(enable(keras.optimizers.SGD()), "mixed_float16")
    other = dense("mixed_float16")  # that is not trained
    fit_one(enable(keras.optimizers.SGD()))
    assert other.built


def test_a_layer_with_a_mixed_policy_once_the_rewrite_is_off_or_the_optimizer_is_loaded() -> None:
    optimizer = enable(keras.optimizers.SGD())
    loaded = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert loaded.rewrite is None
    with pytest.raises(UsageError, match="has the dtype policy 'mixed_bfloat16'"):
        fit_one(loaded, "mixed_bfloat16")
    mt.disable_mixed_precision_graph_rewrite()
    with pytest.raises(UsageError, match="has the dtype policy 'mixed_float16'"):
        fit_one(optimizer, "mixed_float16")
    keras.config.set_dtype_policy("mixed_float16")
    loaded.scale_loss(1.0)  # no rewrite was decided for this one, and none is on


def test_a_policy_without_a_rewrite_still_needs_a_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "")  # auto is then FP32, and no rewrite is on
    bare, scaled = enable(keras.optimizers.SGD()), enable(keras.optimizers.SGD(), "dynamic(init=4)")
    old = enable(tf_keras.optimizers.SGD())
    keras.config.set_dtype_policy("mixed_float16")
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    with pytest.raises(UsageError, match="was set to 'mixed_float16'"):
        fit_one(bare)
    keras2 = tf_keras.Sequential([tf_keras.layers.Input([8]), tf_keras.layers.Dense(1)])
    keras2.compile(old, "mse")
    with pytest.raises(UsageError, match=r"call tf_keras\.mixed_precision\.set_global_policy"):
        old.get_scaled_loss(tf.constant(1.0))
    fit_one(scaled)
    assert scaled.machine().scale == 4.0
    keras.config.set_dtype_policy("mixed_bfloat16")  # which has FP32's range
    tf_keras.mixed_precision.set_global_policy("float32")
    keras.config.set_dtype_policy("float32")
    optimizer = enable(keras.optimizers.SGD())
    keras.config.set_dtype_policy("mixed_bfloat16")
    fit_one(optimizer)


def test_keras_2s_names_are_told_of() -> None:
    optimizer = enable(keras.optimizers.SGD(), 8)
    for name in ("get_scaled_loss", "get_unscaled_gradients"):
        with pytest.raises(AttributeError, match=r"is Keras 2's.*optimizer\.scale_loss\(loss\)"):
            getattr(optimizer, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        optimizer.nothing
