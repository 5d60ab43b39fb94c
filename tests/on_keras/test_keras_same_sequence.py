"""The cases that every framework is held to, on this backend of Keras: the table of events, the one training task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import mezzo.keras
import one_task
from conftest import BACKEND
from mezzo.core.loss_scale import DynamicLossScale, Observation
from scale_cases import TABLE

FORMS = {"tensorflow": ("eager", "tf.function", "XLA"), "jax": ("eager", "jit"), "torch": ("eager",)}[BACKEND]
POLICIES = {"fp16": "mixed_float16", "bf16": "mixed_bfloat16", "fp32": "float32"}


class Problem:
    """A loss of some variables, trained by a custom loop, a step at a time.

    Args:
        form: how the step is computed.
        variables: the trainable ones.
        loss_of: the loss, given the batch; reads the variables.
        optimizer: ours.
    """

    def __init__(self, form: str, variables: list[Any], loss_of: Callable[..., Any], optimizer: Any) -> None:
        self.form, self.variables, self.loss_of, self.optimizer = form, variables, loss_of, optimizer
        optimizer.build(variables)
        self.step = {"tensorflow": self._tensorflow, "jax": self._jax, "torch": self._torch}[BACKEND]()

    def _tensorflow(self) -> Callable[..., Any]:
        import tensorflow as tf

        def step(*batch: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.loss_of(*batch)
                scaled = self.optimizer.scale_loss(loss)
            self.optimizer.apply(tape.gradient(scaled, [v.value for v in self.variables]), self.variables)
            return loss

        compiled = step if self.form == "eager" else tf.function(step, jit_compile=self.form == "XLA")
        return lambda *batch: compiled(*map(tf.constant, batch))

    def _jax(self) -> Callable[..., Any]:
        import jax

        def of_values(weights: list[Any], state: list[Any], batch: Any) -> Any:
            with keras.StatelessScope(list(zip(self.variables, weights))):
                loss = self.loss_of(*batch)
            return self.optimizer.stateless_scale_loss(state, loss), loss

        def new(weights: list[Any], state: list[Any], batch: Any) -> Any:
            (_, loss), gradients = jax.value_and_grad(of_values, has_aux=True)(weights, state, batch)
            return loss, *self.optimizer.stateless_apply(state, gradients, weights)

        compiled = jax.jit(new) if self.form == "jit" else new

        def step(*batch: Any) -> Any:
            held = [v.value for v in self.variables], [v.value for v in self.optimizer.variables]
            loss, weights, state = compiled(*held, batch)
            for variable, value in zip([*self.variables, *self.optimizer.variables], [*weights, *state]):
                variable.assign(value)
            return loss

        return step

    def _torch(self) -> Callable[..., Any]:
        def step(*batch: Any) -> Any:
            loss = self.loss_of(*map(keras.ops.convert_to_tensor, batch))
            for variable in self.variables:
                variable.value.grad = None
            self.optimizer.scale_loss(loss).backward()
            self.optimizer.apply([variable.value.grad for variable in self.variables], self.variables)
            return loss.detach()

        return step


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("settings", "events"), [row[:2] for row in TABLE if row[1]], ids=str)
def test_the_table(settings: dict[str, Any], events: str, form: str) -> None:
    pure = DynamicLossScale(**settings)
    optimizer = mezzo.keras.LossScaleOptimizer(keras.optimizers.SGD(0.125), loss_scale=pure)
    weight = keras.Variable([1.0, -2.0])
    problem = Problem(form, [weight], lambda factors: keras.ops.sum(weight * factors), optimizer)
    for event in events:
        problem.step(np.array([1.0, np.inf if event == "x" else -3.0], "float32"))
        pure = pure.next(Observation(event == "x"))
        assert float(optimizer.scale) == pure.scale
    good = events.count(".")
    assert keras.ops.convert_to_numpy(weight).tolist() == [1.0 - 0.125 * good, -2.0 + 0.375 * good]


def trained(form: str, precision: str) -> tuple[list[float], list[float]]:
    keras.config.set_dtype_policy(POLICIES[precision])
    layers = {
        "1": keras.layers.Dense(one_task.HIDDEN, activation="tanh"),
        "2": keras.layers.Dense(one_task.OUT),
        "v": keras.layers.Dense(1, use_bias=False),
    }
    first = one_task.task().weights
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
    problem = Problem(form, variables, loss_of, optimizer)
    losses, scales = [], []
    given = one_task.task()
    for batch in zip(given.x, given.target, given.z.copy()):
        losses.append(float(problem.step(*batch)))
        scales.append(float(optimizer.scale))
    return losses, scales


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", POLICIES)
def test_the_task(precision: str, form: str) -> None:
    one_task.check(precision, *trained(form, precision))
