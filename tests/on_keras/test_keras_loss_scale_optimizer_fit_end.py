"""How `fit` ends under LossScaleOptimizer: with the user's own error, with averages, and then another `fit`."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest

from conftest import BACKEND
from mezzo.core.errors import LossScaleCollapseError
from mezzo.core.loss_scale import StaticLossScale
from mezzo.keras import LossScaleOptimizer

pytestmark = pytest.mark.every_backend

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def model(inner: Any, loss: Any = "mse", **settings: Any) -> Any:
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="only")])
    made.compile(LossScaleOptimizer(inner, **settings), loss, jit_compile=BACKEND == "jax")
    return made


def fit(trained: Any, x: Any = X, **settings: Any) -> Any:
    return trained.fit(x, Y, batch_size=10, shuffle=False, verbose=0, **settings)


class SecondTime(keras.losses.Loss):  # type: ignore[misc]
    """Fails when it is called again; on JAX while the first step is compiled, and the variables hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def call(self, y: Any, predicted: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise OSError("mine")
        return keras.ops.mean((y - predicted) ** 2)


def broken_data() -> Any:
    for first in (0, 8):
        yield X[first : first + 8], Y[first : first + 8]
    raise OSError("mine")


@pytest.mark.parametrize("use_ema", [False, True])
@pytest.mark.parametrize("where", ["loss", "data"])
def test_the_error_that_ends_fit_is_the_users_own(where: str, use_ema: bool) -> None:
    if BACKEND == "tensorflow":
        pytest.skip("Keras tells it in TensorFlow's words, and does not finalize")
    inner = keras.optimizers.Adam(use_ema=use_ema)
    if where == "loss":
        with pytest.raises(OSError, match="mine"):
            fit(model(inner, SecondTime()))
        return
    with pytest.raises(OSError, match="mine"):
        model(inner).fit(broken_data(), steps_per_epoch=9, shuffle=False, verbose=0)


@pytest.mark.skipif(BACKEND != "jax", reason="JAX's trainer alone takes the values out")
def test_jax_in_the_middle_of_fit_nothing_is_looked_at() -> None:
    trained = model(keras.optimizers.Adam())
    readable = []

    def at_batch(batch: int, logs: Any) -> None:
        readable.append(trained.optimizer._stuck._value is not None)
        trained.optimizer.finalize_variable_values(trained.trainable_variables)

    fit(trained, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_begin=at_batch)])
    assert readable == [True, False, False, False]


@pytest.mark.skipif(BACKEND != "jax", reason="JAX alone donates buffers")
def test_jax_an_error_of_the_step_that_was_given_the_variables() -> None:
    import jax

    def looked(value: Any) -> Any:
        if np.isnan(value):
            raise FloatingPointError("the label is NaN")
        return np.float32(0)

    def loss(y: Any, predicted: Any) -> Any:
        first = jax.lax.stop_gradient(y[0, 0])
        none = jax.pure_callback(looked, jax.ShapeDtypeStruct((), np.float32), first)
        return keras.ops.mean((y - predicted) ** 2, axis=-1) + none

    trained = model(keras.optimizers.Adam(), loss)
    y = Y.copy()
    y[16] = math.nan
    with pytest.raises(Exception, match="the label is NaN"):
        trained.fit(X, y, batch_size=8, shuffle=False, verbose=0)


class Sub(LossScaleOptimizer):
    def finalize_variable_values(self, var_list: Any) -> None:
        super().finalize_variable_values(var_list)


@pytest.mark.parametrize("cls", [LossScaleOptimizer, Sub])
def test_a_collapse_is_not_told_in_the_place_of_an_error(cls: Any) -> None:
    lost = cls(keras.optimizers.SGD(), loss_scale=StaticLossScale(4.0, patience=1, skips=1))
    with pytest.raises(LossScaleCollapseError):
        lost.finalize_variable_values([])

    def fails() -> None:
        try:
            raise OSError("mine")
        finally:
            lost.finalize_variable_values([])

    with pytest.raises(OSError, match="mine"):
        fails()


def test_an_error_of_the_inner_optimizer_is_told() -> None:
    class Failing(keras.optimizers.SGD):  # type: ignore[misc]
        def finalize_variable_values(self, var_list: Any) -> None:
            raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        LossScaleOptimizer(Failing()).finalize_variable_values([])


@pytest.mark.skipif(BACKEND != "jax", reason="JAX alone donates buffers")
def test_jax_what_was_given_away_is_not_looked_at() -> None:
    optimizer = LossScaleOptimizer(keras.optimizers.SGD())
    optimizer._stuck.value.delete()
    optimizer.finalize_variable_values([])


def test_a_fit_where_an_error_is_handled_is_a_fit_like_any_other() -> None:
    """The averages are in the weights, and a collapse is told, although there is an exception around."""
    trained = model(keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.9))
    try:
        raise OSError("a retry")
    except OSError:
        fit(trained)
    averages = trained.optimizer.inner_optimizer._model_variables_moving_average
    for weight, average in zip(trained.trainable_variables, averages, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(weight), keras.ops.convert_to_numpy(average))
    if BACKEND != "jax":  # elsewhere the step itself tells
        return
    lost = model(keras.optimizers.Adam(), loss_scale=StaticLossScale(4.0, patience=3))
    try:
        raise OSError("a retry")
    except OSError:
        with pytest.raises(LossScaleCollapseError, match="only/kernel"):
            fit(lost, np.full_like(X, math.nan))


def test_averages_and_another_fit() -> None:
    """Keras's own fails there on JAX: the weight and its average were one buffer, which cannot be donated twice."""
    once = model(keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5))
    fit(once)
    first = once.get_weights()
    averages = once.optimizer.inner_optimizer._model_variables_moving_average
    for weight, average in zip(first, averages, strict=True):
        np.testing.assert_array_equal(weight, keras.ops.convert_to_numpy(average))
    fit(once)
    assert int(once.optimizer.iterations) == 8
    assert not any(np.array_equal(a, b) for a, b in zip(first, once.get_weights(), strict=True))
