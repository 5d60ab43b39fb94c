"""A mixed policy of Keras's that comes after the rewrite is refused, where it would train without a loss scale."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import mezzo.tensorflow as mt
from mezzo.core.errors import UsageError

enable = mt.enable_mixed_precision_graph_rewrite
X, Y = np.ones((4, 8), "float32"), np.ones((4, 1), "float32")


def model(dtype: str | None = None, library: Any = keras) -> Any:
    return library.Sequential([library.layers.Input([8]), library.layers.Dense(1, dtype=dtype)])


def fit(optimizer: Any, dtype: str | None = None) -> Any:
    made = model(dtype)
    made.compile(optimizer, "mse")
    made.fit(X, Y, verbose=0)
    return made


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_policy_after_the_rewrite(policy: str) -> None:
    optimizer, built = enable(keras.optimizers.SGD()), enable(keras.optimizers.SGD())
    weight = keras.Variable([1.0])
    built.build([weight])
    keras.config.set_dtype_policy(policy)
    with pytest.raises(UsageError, match=f"was set to '{policy}'.*call keras.config.set_dtype_policy"):
        fit(optimizer)
    with pytest.raises(UsageError, match="disable_mixed_precision_graph_rewrite"):
        optimizer.build([keras.Variable([1.0])])
    with pytest.raises(UsageError, match="disable_mixed_precision_graph_rewrite"):
        optimizer.scale_loss(1.0)
    with pytest.raises(UsageError, match="disable_mixed_precision_graph_rewrite"):
        built.apply([tf.ones([1])], [weight])


def test_a_layer_with_a_mixed_policy() -> None:
    with pytest.raises(UsageError, match=r"layer 'dense.*' has the dtype policy 'mixed_float16'"):
        fit(enable(keras.optimizers.SGD()), "mixed_float16")
    other = model("mixed_float16")  # that is not trained
    fit(enable(keras.optimizers.SGD()))
    assert other.built


def test_a_layer_with_a_mixed_policy_once_the_rewrite_is_off_or_the_optimizer_is_loaded() -> None:
    optimizer = enable(keras.optimizers.SGD())
    loaded = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert loaded.rewrite is None
    with pytest.raises(UsageError, match="has the dtype policy 'mixed_bfloat16'"):
        fit(loaded, "mixed_bfloat16")
    mt.disable_mixed_precision_graph_rewrite()
    with pytest.raises(UsageError, match="has the dtype policy 'mixed_float16'"):
        fit(optimizer, "mixed_float16")
    keras.config.set_dtype_policy("mixed_float16")
    loaded.scale_loss(1.0)  # no rewrite was decided for this one, and none is on


def test_a_policy_without_a_rewrite_still_needs_a_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "")  # auto is then FP32, and no rewrite is on
    bare, scaled = enable(keras.optimizers.SGD()), enable(keras.optimizers.SGD(), "dynamic(init=4)")
    old = enable(tf_keras.optimizers.SGD())
    keras.config.set_dtype_policy("mixed_float16")
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    with pytest.raises(UsageError, match="was set to 'mixed_float16'"):
        fit(bare)
    keras2 = model(library=tf_keras)
    keras2.compile(old, "mse")
    with pytest.raises(UsageError, match=r"call tf_keras\.mixed_precision\.set_global_policy"):
        old.get_scaled_loss(tf.constant(1.0))
    fit(scaled)
    assert scaled.machine().scale == 4.0
    keras.config.set_dtype_policy("mixed_bfloat16")  # which has FP32's range
    tf_keras.mixed_precision.set_global_policy("float32")
    fit(enable_under_float32())


def enable_under_float32() -> Any:
    keras.config.set_dtype_policy("float32")
    optimizer = enable(keras.optimizers.SGD())
    keras.config.set_dtype_policy("mixed_bfloat16")
    return optimizer


def test_keras_2s_names_are_told_of() -> None:
    optimizer = enable(keras.optimizers.SGD(), 8)
    for name in ("get_scaled_loss", "get_unscaled_gradients"):
        with pytest.raises(AttributeError, match=r"is Keras 2's.*optimizer\.scale_loss\(loss\)"):
            getattr(optimizer, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        optimizer.nothing
