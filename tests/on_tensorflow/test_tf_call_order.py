"""A loss scaled twice and gradients unscaled twice are told of: both train on in silence, too far or hardly at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_steppers import FAMILIES, UNSCALING, WAYS

from mezzo.core.errors import CallOrderError, UsageError
from mezzo.core.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale

v1 = tf.compat.v1
TWICE = "{0} twice: {1} was given what it had returned.*Leave out the second"
SCALED = TWICE.format("scaled", "(get_scaled_loss|scale_loss)")
UNSCALED = TWICE.format("unscaled", "get_unscaled_gradients")


def gradient_of(loss: Callable[[], Any], variable: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        value = loss()
    return list(tape.gradient(value, [variable]))


def run(compiled: bool, step: Callable[[], Any]) -> Any:
    return tf.function(step)() if compiled else step()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loss_scaled_twice(family: str, compiled: bool) -> None:
    optimizer = FAMILIES[family](StaticLossScale(8.0))
    variable = tf.Variable(2.0)

    def step() -> Any:
        return gradient_of(lambda: optimizer.scale_loss(optimizer.scale_loss(variable**2)), variable)

    with pytest.raises(CallOrderError, match=SCALED):
        run(compiled, step)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", UNSCALING)
def test_gradients_unscaled_twice(family: str, compiled: bool) -> None:
    optimizer = FAMILIES[family](StaticLossScale(8.0))
    table = tf.Variable([[1.0], [2.0]])

    def step(loss: Callable[[], Any]) -> None:
        gradients = gradient_of(lambda: optimizer.get_scaled_loss(loss()), table)
        once = optimizer.get_unscaled_gradients([None, *gradients])
        with pytest.raises(CallOrderError, match=UNSCALED):
            optimizer.get_unscaled_gradients(once[1:])
        if isinstance(once[1], tf.IndexedSlices):
            again = tf.IndexedSlices(once[1].values, once[1].indices, once[1].dense_shape)
            with pytest.raises(CallOrderError, match=UNSCALED):
                optimizer.get_unscaled_gradients([again])

    run(compiled, lambda: step(lambda: tf.reduce_sum(table)))
    run(compiled, lambda: step(lambda: tf.reduce_sum(tf.gather(table, [1]))))  # IndexedSlices


def test_what_the_optimizer_scales_and_unscales_itself() -> None:
    optimizer = FAMILIES["v1"](StaticLossScale(8.0))
    with tf.Graph().as_default():
        loss = v1.get_variable("weight", initializer=2.0) ** 2
        with pytest.raises(CallOrderError, match=rf"{SCALED}.*optimizer\.compute_gradients"):
            optimizer.minimize(optimizer.get_scaled_loss(loss))
        gradients = [gradient for gradient, _ in optimizer.compute_gradients(loss)]
        with pytest.raises(CallOrderError, match=rf"{UNSCALED}.*optimizer\.compute_gradients"):
            optimizer.get_unscaled_gradients(gradients)
    variable = tf.Variable(2.0)
    with pytest.raises(CallOrderError, match=SCALED):  # a function is scaled when it is called
        optimizer.minimize(optimizer.get_scaled_loss(lambda: variable**2), var_list=[variable])


@pytest.mark.parametrize("family", UNSCALING)
def test_several_losses_and_gradients_of_a_step(family: str) -> None:
    optimizer = FAMILIES[family](DynamicLossScale(init=8.0))
    one, two = tf.Variable(2.0), tf.Variable(3.0)

    @tf.function
    def step() -> None:
        with tf.GradientTape(persistent=True) as tape:
            losses = one**2, two**2
            scaled = [optimizer.get_scaled_loss(loss) for loss in losses]
            again = optimizer.get_scaled_loss(losses[0])  # the loss itself was not changed
        tape.gradient(again, [one])
        raw = [tape.gradient(loss, [variable]) for loss, variable in zip(scaled, (one, two))]
        optimizer.get_unscaled_gradients(raw[0])  # to look at
        unscaled = [optimizer.get_unscaled_gradients(gradients)[0] for gradients in raw]
        optimizer.apply_gradients(list(zip(unscaled, (one, two))))

    for _ in range(2):
        step()
    np.testing.assert_allclose([one.numpy() < 2.0, two.numpy() < 3.0, optimizer.machine().scale], [1, 1, 8])


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_loss_scale_nothing_is_told(family: str) -> None:
    optimizer = FAMILIES[family](NoLossScale())
    loss = tf.constant(2.0)
    assert float(optimizer.scale_loss(optimizer.scale_loss(loss))) == 2.0
    if family in UNSCALING:
        once = optimizer.get_unscaled_gradients([loss])
        assert optimizer.get_unscaled_gradients(once) == once


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_forgets_what_was_before_it(family: str) -> None:
    stepper = WAYS[f"{family} eagerly"](StaticLossScale(8.0))
    optimizer = stepper.optimizer
    loss = optimizer.scale_loss(tf.constant(1.0))
    gradients = optimizer.get_unscaled_gradients([tf.constant(8.0)]) if family in UNSCALING else []
    stepper(False)
    assert float(optimizer.scale_loss(loss)) == 64.0
    assert not gradients or float(optimizer.get_unscaled_gradients(gradients)[0]) == 0.125


@pytest.mark.parametrize("family", UNSCALING)
@pytest.mark.parametrize(
    ("given", "said"), [(None, "grads is None"), (tf.constant([1.0]), "grads is one tensor")]
)
def test_gradients_that_are_no_list(family: str, given: Any, said: str) -> None:
    optimizer = FAMILIES[family](StaticLossScale(8.0))
    with pytest.raises(UsageError, match=rf"{said}; give a list of gradients"):
        optimizer.get_unscaled_gradients(given)
