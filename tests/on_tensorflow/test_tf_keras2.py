"""Keras 2: compile, fit, callbacks, custom loops and files, with the new optimizers and the legacy ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import mezzo.tensorflow as mt
from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import DynamicLossScale, StaticLossScale
from mezzo.tensorflow.keras2 import LegacyLossScaleOptimizer, LossScaleOptimizer

KINDS = {
    "new": (lambda: tf_keras.optimizers.SGD(0.01, 0.9), LossScaleOptimizer),
    "legacy": (lambda: tf_keras.optimizers.legacy.SGD(0.01, 0.9), LegacyLossScaleOptimizer),
}
X, Y = np.ones((16, 8), "float32"), np.ones((16, 1), "float32")
kinds = pytest.mark.parametrize(("make", "wrapper"), KINDS.values(), ids=KINDS)


def model() -> Any:
    tf_keras.utils.set_random_seed(0)
    return tf_keras.Sequential(
        [tf_keras.layers.Dense(16, "tanh", input_shape=(8,)), tf_keras.layers.Dense(1)]
    )


@kinds
def test_fit_scales_skips_and_does_not_count_what_it_skipped(make: Any, wrapper: Any) -> None:
    trained = model()
    pure = DynamicLossScale(init=16.0, growth_interval=3, floor=0.25)
    optimizer = mt.enable_mixed_precision_graph_rewrite(make(), pure)
    trained.compile(optimizer, "mse")
    assert trained.optimizer is optimizer
    trained.fit(X, Y, batch_size=4, verbose=0)
    assert optimizer.machine() == DynamicLossScale(
        init=16.0, growth_interval=3, floor=0.25, scale=32.0, good_steps=1
    )
    assert int(optimizer.iterations.numpy()) == 4
    inner = optimizer.inner_optimizer.variables
    held = [*trained.variables, *(inner() if callable(inner) else inner)]
    before = [variable.numpy() for variable in held]
    trained.fit(np.inf * X, Y, batch_size=2, verbose=0)  # eight steps, each of them skipped
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, held))
    assert float(optimizer.loss_scale) == 0.25  # tf_keras's own stays at 1
    assert int(optimizer.skipped_steps.numpy()) == 8
    assert bool(optimizer.last_step_skipped.numpy())
    assert int(optimizer.iterations.numpy()) == 4


@kinds
def test_the_losses_of_fit_are_those_without_a_loss_scale_and_callbacks_set_the_rate(
    make: Any, wrapper: Any
) -> None:
    losses = []
    for scale in (None, "dynamic", 1024):
        trained, optimizer = model(), make()
        optimizer = optimizer if scale is None else wrapper(optimizer, scale)
        trained.compile(optimizer, "mse")
        schedule = tf_keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        fitted = trained.fit(X, Y, batch_size=4, epochs=3, verbose=0, callbacks=[schedule])
        losses.append(fitted.history["loss"])
    assert losses[0] == losses[1] == losses[2]
    rate = tf_keras.backend.get_value(optimizer.inner_optimizer.learning_rate)
    assert float(rate) == pytest.approx(0.00125)
    assert (optimizer.dynamic, optimizer.initial_scale) == (False, 1024.0)


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file:UserWarning")
@pytest.mark.parametrize(("kind", "name"), [("new", "model.keras"), ("legacy", "model.h5")])
def test_a_saved_model_brings_its_optimizer(kind: str, name: str, tmp_path: Path) -> None:
    trained = model()
    optimizer = mt.enable_mixed_precision_graph_rewrite(
        KINDS[kind][0](), "dynamic(init=1024,growth_interval=3)"
    )
    trained.compile(optimizer, "mse")
    trained.fit(X, Y, batch_size=4, verbose=0)
    trained.save(tmp_path / name)
    loaded = tf_keras.models.load_model(tmp_path / name).optimizer
    assert type(loaded) is type(optimizer)
    assert type(loaded.inner_optimizer) is type(optimizer.inner_optimizer)
    # Keras 2's files have no room for the state of a legacy loss-scale optimizer, of tf_keras's own neither.
    state = optimizer.machine() if kind == "new" else DynamicLossScale(init=1024.0, growth_interval=3)
    assert loaded.machine() == state


@kinds
def test_a_configuration_and_a_call_outside_the_replicas(make: Any, wrapper: Any) -> None:
    config = wrapper(make(), StaticLossScale(8.0)).get_config()
    assert config["loss_scale"] == "8"
    again = wrapper.from_config(config)
    assert (type(again), float(again.loss_scale)) == (wrapper, 8.0)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        weight = tf.Variable([1.0])
        optimizer = wrapper(make(), 8)
        optimizer.get_scaled_loss(tf.constant(1.0))
        gradients = optimizer.get_unscaled_gradients([tf.constant([8.0])])
        with pytest.raises(UsageError, match="cross-replica context"):
            optimizer.apply_gradients(zip(gradients, [weight]), experimental_aggregate_gradients=False)
