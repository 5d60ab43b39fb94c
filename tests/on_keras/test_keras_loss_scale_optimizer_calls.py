"""LossScaleOptimizer in loops that forget to scale the loss, and in custom loops of each backend that don't."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest
from keras_steps import GRADIENTS, no_gradients, tensor, values, variables

from conftest import BACKEND
from mezzo.core.errors import CallOrderError, UsageError
from mezzo.core.loss_scale import DynamicLossScale, StaticLossScale
from mezzo.keras import LossScaleOptimizer

pytestmark = pytest.mark.every_backend


def sgd(**settings: Any) -> Any:
    return keras.optimizers.SGD(0.5, **settings)


def forgetful_step(optimizer: Any, weights: Any = None) -> list[list[float]]:
    weights = weights or variables()
    if not optimizer.built:
        optimizer.build(weights)
    optimizer.get_config()
    optimizer.save_own_variables({})
    with no_gradients():
        optimizer.apply([tensor(gradient) for gradient in GRADIENTS], weights)
    return values(*weights)


def test_applying_gradients_of_a_loss_that_nobody_scaled() -> None:
    """Keras's own divides them by the scale and says nothing."""
    with pytest.raises(CallOrderError, match=r"not scaled.*loss scale 2\^16.*scale_loss\(loss\)"):
        forgetful_step(LossScaleOptimizer(sgd()))
    optimizer = LossScaleOptimizer(sgd(), on_unscaled="warn")
    with pytest.warns(UserWarning, match="The loss was not scaled"):
        forgetful_step(optimizer)
    once = values(optimizer.step_counter)
    with no_gradients():
        optimizer.apply([tensor(gradient) for gradient in GRADIENTS])
    assert values(optimizer.step_counter) == [
        [once[0][0] + 1]
    ]  # and no second warning, which would be an error here
    forgetful_step(LossScaleOptimizer(sgd(), on_unscaled="ignore"))
    assert forgetful_step(LossScaleOptimizer(sgd(), loss_scale="none")) == [[0.75, -1.875, 2.0], [0.0, 2.25]]


@pytest.mark.parametrize("name", ["scale", "dynamic_scale", "initial_scale"])
def test_who_reads_the_scale_has_it(name: str) -> None:
    optimizer = LossScaleOptimizer(sgd())
    assert float(getattr(optimizer, name)) == 2.0**16
    forgetful_step(optimizer)


def test_scaling_of_values_has_it_too() -> None:
    optimizer = LossScaleOptimizer(sgd(), loss_scale=8.0)
    with pytest.raises(UsageError, match=r"optimizer\.build"):
        optimizer.stateless_scale_loss([tensor(1.0)], tensor(3.0))
    weights = variables()
    optimizer.build(weights)
    held = [variable.value for variable in optimizer.variables]
    assert float(optimizer.stateless_scale_loss(held, tensor(3.0, "float16"))) == 24.0
    forgetful_step(optimizer, weights)


# Custom loops

X = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
Y = X @ np.array([[1.0], [-2.0], [3.0]], "float32")


def model() -> Any:
    keras.utils.set_random_seed(1)
    made = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    )
    return made


def loop(optimizer: Any, trained: Any, batches: list[Any], *, compiled: bool) -> None:
    """What docs/keras.md shows of each backend."""
    optimizer.build(trained.trainable_variables)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        def train(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(keras.ops.mean((trained(x, training=True) - y) ** 2))
            gradients = tape.gradient(loss, trained.trainable_variables)
            optimizer.apply(gradients, trained.trainable_variables)

        step = tf.function(train, jit_compile=True) if compiled else train
        for x, y in batches:
            step(tf.constant(x), tf.constant(y))
    elif BACKEND == "jax" and compiled:
        import jax

        def loss_of(weights: Any, others: Any, optimizer_variables: Any, x: Any, y: Any) -> Any:
            predicted, others = trained.stateless_call(weights, others, x, training=True)
            loss = keras.ops.mean((predicted - y) ** 2)
            return optimizer.stateless_scale_loss(optimizer_variables, loss), others

        @jax.jit
        def step(state: Any, x: Any, y: Any) -> Any:
            weights, others, optimizer_variables = state
            gradients, others = jax.grad(loss_of, has_aux=True)(weights, others, optimizer_variables, x, y)
            weights, optimizer_variables = optimizer.stateless_apply(optimizer_variables, gradients, weights)
            return weights, others, optimizer_variables

        parts = (trained.trainable_variables, trained.non_trainable_variables, optimizer.variables)
        state = tuple([variable.value for variable in part] for part in parts)
        for x, y in batches:
            state = step(state, x, y)
        for part, held in zip(parts, state):
            for variable, value in zip(part, held):
                variable.assign(value)
    elif BACKEND == "jax":
        import jax

        def loss_of_weights(weights: Any, x: Any, y: Any) -> Any:
            predicted, _ = trained.stateless_call(weights, [], x)
            return optimizer.scale_loss(keras.ops.mean((predicted - y) ** 2))

        for x, y in batches:
            weights = [variable.value for variable in trained.trainable_variables]
            optimizer.apply(jax.grad(loss_of_weights)(weights, x, y), trained.trainable_variables)
    else:
        import torch

        for x, y in batches:
            trained.zero_grad()
            loss = keras.ops.mean((trained(tensor(x), training=True) - tensor(y)) ** 2)
            optimizer.scale_loss(loss).backward()
            gradients = [variable.value.grad for variable in trained.trainable_variables]
            with torch.no_grad():
                optimizer.apply(gradients, trained.trainable_variables)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_custom_loops(compiled: bool) -> None:
    """Three good steps are plain SGD's on the unscaled loss; one bad batch between them is as if it were not there."""
    if compiled and BACKEND == "torch":
        pytest.skip("compiled steps on PyTorch are in ..._torch.py")
    bad = np.full_like(X, math.nan)
    plain, trained = model(), model()
    first = trained.get_weights()
    loop(LossScaleOptimizer(sgd(momentum=0.5), loss_scale="none"), plain, [(X, Y)] * 3, compiled=compiled)
    optimizer = LossScaleOptimizer(sgd(momentum=0.5), initial_scale=2.0**10)
    loop(optimizer, trained, [(X, Y), (X, Y), (bad, Y), (X, Y)], compiled=compiled)
    for ours, theirs, before in zip(trained.get_weights(), plain.get_weights(), first):
        np.testing.assert_array_equal(ours, theirs)
        assert not np.array_equal(ours, before)
    assert int(optimizer.iterations) == 3
    assert optimizer.machine() == DynamicLossScale(init=2.0**10, scale=2.0**9, good_steps=1)
    assert values(optimizer.bad_gradients) == [[1, 1, 1, 1]]


def test_tensorflow_traces_the_scale_as_a_variable_before_the_optimizer_is_built() -> None:
    """There is no number yet at the first trace that could stay in the graph for good."""
    if BACKEND != "tensorflow":
        pytest.skip("a tf.function is TensorFlow's")
    import tensorflow as tf

    weights, optimizer = variables(), LossScaleOptimizer(sgd(), 4.0, 1)

    @tf.function
    def train() -> Any:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weights[0].value * 0.0) + 1.0)
        (gradient,) = tape.gradient(loss, [weights[0].value])
        optimizer.apply([gradient], weights[:1])
        return loss

    assert [float(train()), float(train())] == [4.0, 8.0]


def test_jax_a_scale_that_would_be_baked_in_is_an_error() -> None:
    if BACKEND != "jax":
        pytest.skip("constants of a compiled function are JAX's")
    import jax

    optimizer = LossScaleOptimizer(sgd())
    weights = variables()
    optimizer.build(weights)

    def loss(weight: Any) -> Any:
        return optimizer.scale_loss(keras.ops.sum(weight))

    value = weights[0].value
    assert jax.grad(loss)(value).tolist() == [2.0**16] * 3  # computed at once, with the scale of now
    for compiled in (jax.jit(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        with pytest.raises(CallOrderError, match=r"stateless_scale_loss\(optimizer_variables, loss\)"):
            compiled(value)
    with pytest.raises(CallOrderError, match="stateless_apply"):
        jax.jit(lambda g: optimizer.apply([g], weights[:1]))(value)

    constant = LossScaleOptimizer(sgd(), loss_scale=StaticLossScale(8.0))  # a constant may be one
    assert jax.jit(jax.grad(lambda w: constant.scale_loss(keras.ops.sum(w))))(value).tolist() == [8.0] * 3
