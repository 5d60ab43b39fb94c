"""The training task that every framework is held to, on this backend of Keras, by a custom loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras_steps import gradient_step

import mezzo.keras
import one_task
from conftest import BACKEND

POLICIES = {"fp16": "mixed_float16", "bf16": "mixed_bfloat16", "fp32": "float32"}


def stepper(variables: list[Any], loss_of: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    """A function of a batch that takes one step, compiled on TensorFlow and JAX, and returns `loss_of` the batch."""
    if BACKEND != "jax":

        def step(*batch: Any) -> Any:
            return gradient_step(optimizer, variables, lambda: loss_of(*batch))

        if BACKEND == "tensorflow":
            import tensorflow as tf

            step = tf.function(step)
        return lambda *batch: step(*map(keras.ops.convert_to_tensor, batch))
    import jax

    def of_values(weights: list[Any], state: list[Any], batch: Any) -> Any:
        with keras.StatelessScope(list(zip(variables, weights))):
            loss = loss_of(*batch)
        return optimizer.stateless_scale_loss(state, loss), loss

    @jax.jit
    def new(weights: list[Any], state: list[Any], batch: Any) -> Any:
        (_, loss), gradients = jax.value_and_grad(of_values, has_aux=True)(weights, state, batch)
        return loss, *optimizer.stateless_apply(state, gradients, weights)

    def jitted(*batch: Any) -> Any:
        held = [v.value for v in variables], [v.value for v in optimizer.variables]
        loss, weights, state = new(*held, batch)
        for variable, value in zip([*variables, *optimizer.variables], [*weights, *state]):
            variable.assign(value)
        return loss

    return jitted


@pytest.mark.every_backend
@pytest.mark.parametrize("precision", POLICIES if BACKEND == "torch" else ["fp16"])
def test_the_task(precision: str) -> None:
    keras.config.set_dtype_policy(POLICIES[precision])
    layers = {
        "1": keras.layers.Dense(one_task.HIDDEN, activation="tanh"),
        "2": keras.layers.Dense(one_task.OUT),
        "v": keras.layers.Dense(1, use_bias=False),
    }
    given = one_task.task()
    first = given.weights
    for name, features in (("1", one_task.FEATURES), ("2", one_task.HIDDEN), ("v", 1)):
        layers[name].build((None, features))
        layers[name].set_weights([first["v"]] if name == "v" else [first[f"w{name}"], first[f"b{name}"]])

    def loss_of(x: Any, target: Any, z: Any) -> Any:
        out, fuse = layers["2"](layers["1"](x)), layers["v"](z)
        error = keras.ops.cast(out, "float32") - target
        whole = one_task.PART_OF_ERROR * keras.ops.mean(keras.ops.square(error))
        return whole + keras.ops.mean(keras.ops.cast(fuse, "float32"))

    optimizer = mezzo.keras.LossScaleOptimizer(
        keras.optimizers.SGD(one_task.LEARNING_RATE, momentum=one_task.MOMENTUM),
        loss_scale=one_task.loss_scale(precision),
    )
    variables = [variable for layer in layers.values() for variable in layer.trainable_variables]
    optimizer.build(variables)
    step = stepper(variables, loss_of, optimizer)
    losses, scales = [], []
    for batch in zip(given.x, given.target, given.z.copy()):
        losses.append(float(step(*batch)))
        scales.append(float(optimizer.scale))
    one_task.check(precision, losses, scales)
