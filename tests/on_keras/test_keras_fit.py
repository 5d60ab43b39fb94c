"""LossScaleOptimizer under compile and fit: compiled, several steps at once, saved and loaded; and how fit ends."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras_steps import step, values, variables

import one_task
from conftest import BACKEND
from mezzo.core.errors import LossScaleCollapseError
from mezzo.core.loss_scale import DynamicLossScale, StaticLossScale
from mezzo.keras import LossScaleOptimizer

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def model(optimizer: Any, **compile_settings: Any) -> Any:
    keras.utils.set_random_seed(3)
    hidden = keras.layers.Dense(8, activation="relu")
    made = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])
    made.compile(optimizer, "mse", **compile_settings)
    return made


def adam(**settings: Any) -> Any:
    return keras.optimizers.Adam(0.05, **settings)


def fit(trained: Any, x: Any = X, **settings: Any) -> Any:
    return trained.fit(x, Y, batch_size=8, shuffle=False, verbose=0, **settings)


WAYS = [{"jit_compile": True}, {"steps_per_execution": 4, "jit_compile": False}, {"run_eagerly": True}]


@functools.cache
def one_by_one() -> Any:
    """The weights after Keras's own Adam has taken the good steps alone, twice over."""
    plain = model(adam(), jit_compile=False)
    for _ in range(2):
        for first in (0, 8, 24):
            plain.train_on_batch(X[first : first + 8], Y[first : first + 8])
    return plain.get_weights()


@pytest.mark.every_backend
@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_however_fit_runs_its_steps(settings: dict[str, Any]) -> None:
    """Skips, scale and weights are those of steps taken one by one: compiled ones may differ by rounding alone."""
    if BACKEND == "torch" and "run_eagerly" not in settings:
        pytest.skip("Keras on PyTorch has no steps_per_execution; compiled ones are in test_keras_torch.py")
    trained = model(LossScaleOptimizer(adam(), initial_scale=2.0**10), **settings)
    x = X.copy()
    x[16] = math.nan
    fit(trained, x, epochs=2)
    assert trained.optimizer.machine() == DynamicLossScale(init=2.0**10, scale=2.0**8, good_steps=1)
    assert int(trained.optimizer.skipped_steps) == 2
    assert int(trained.optimizer.iterations) == 6
    for ours, plain in zip(trained.get_weights(), one_by_one()):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.every_backend
def test_collapse_is_raised_at_the_end_of_fit() -> None:
    optimizer = LossScaleOptimizer(adam(), loss_scale=StaticLossScale(4.0, patience=3))
    trained = model(optimizer, jit_compile=BACKEND != "torch")
    before = trained.get_weights()
    with pytest.raises(LossScaleCollapseError, match="dense/kernel"):
        fit(trained, np.full_like(X, math.nan))
    for ours, kept in zip(trained.get_weights(), before):
        np.testing.assert_array_equal(ours, kept)


def test_callbacks_and_learning_rates() -> None:
    optimizer = LossScaleOptimizer(adam(use_ema=True, ema_momentum=0.5))
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    halved = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    fit(model(optimizer), epochs=2, callbacks=[swap, halved])
    assert float(optimizer.learning_rate) == pytest.approx(0.0125)
    optimizer.learning_rate = 0.5
    assert float(optimizer.inner_optimizer.learning_rate) == 0.5

    decay = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    scheduled, weights = LossScaleOptimizer(keras.optimizers.SGD(decay)), variables()
    step(scheduled, weights)
    step(scheduled, weights, bad=math.inf)  # a skipped step is none to the schedule
    assert float(scheduled.learning_rate) == 0.25


@pytest.mark.every_backend
def test_saved_with_the_model_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    x = X.copy()
    x[8] = math.inf

    def new() -> Any:
        scale = DynamicLossScale(init=2.0**12, growth_interval=2, hysteresis=2)
        return LossScaleOptimizer(adam(weight_decay=0.01), loss_scale=scale, on_unscaled="warn")

    straight = model(new())
    fit(straight, x, epochs=2)

    first = model(new())
    fit(first, x)
    first.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert loaded.optimizer.get_config() == first.optimizer.get_config()
    assert loaded.optimizer.machine() == first.optimizer.machine()
    assert values(loaded.optimizer) == values(first.optimizer)
    fit(loaded, x)
    assert values(loaded, loaded.optimizer) == values(straight, straight.optimizer)
    assert loaded.optimizer.machine() == straight.optimizer.machine()


@pytest.mark.parametrize(
    ("theirs", "ours"), [(8.0, 8.0), (0.0, 2.0**-14), (math.inf, 2.0**24), (math.nan, 2.0**16)]
)
def test_state_of_kerass_own_is_taken_over(theirs: float, ours: float) -> None:
    """Its scale may be 0 or infinity, from which Keras's own never comes back."""
    weights = variables()
    old = keras.optimizers.LossScaleOptimizer(adam(), initial_scale=theirs)
    old.build(weights)
    old.inner_optimizer.iterations.assign(7)
    old.inner_optimizer.variables[-1].assign([1.0, 2.0])
    old.step_counter.assign(5)
    stored: dict[str, Any] = {}
    old.save_own_variables(stored)
    new = LossScaleOptimizer(adam())
    new.build(weights)
    for _ in range(2):
        step(new, weights, bad=math.inf)
    new.load_own_variables(stored)
    assert new.machine() == DynamicLossScale(scale=ours, good_steps=5)
    assert int(new.skipped_steps) == int(new.last_step_skipped) == 0
    assert values(new.inner_optimizer) == values(old.inner_optimizer)
    assert int(new.iterations) == 7


def test_the_state_that_was_saved_before_the_first_step_is_loaded() -> None:
    """`load_model` builds the optimizer first, which then has more variables than were saved."""
    old, new, stored = LossScaleOptimizer(adam()), LossScaleOptimizer(adam()), {}
    old._scale.assign(2.0**9)
    old.inner_optimizer.learning_rate = 0.125
    old.save_own_variables(stored)
    new.build(variables())
    new.load_own_variables(stored)
    assert (new.machine(), float(new.learning_rate)) == (DynamicLossScale(scale=2.0**9), 0.125)


@pytest.mark.every_backend
@pytest.mark.parametrize("use_ema", [False, True])
def test_the_error_that_ends_fit_is_the_users_own(use_ema: bool) -> None:
    """On JAX it comes while the first step is compiled, and the variables hold nothing."""
    if BACKEND == "tensorflow":
        pytest.skip("Keras raises it in TensorFlow's words, and does not finalize")
    calls: list[Any] = []

    def second_time(y: Any, predicted: Any) -> Any:
        calls.append(y)
        if len(calls) == 2:
            raise OSError("mine")
        return keras.ops.mean((y - predicted) ** 2)

    trained = model(adam(use_ema=use_ema))
    trained.compile(LossScaleOptimizer(adam(use_ema=use_ema)), second_time, jit_compile=BACKEND == "jax")
    with pytest.raises(OSError, match="mine"):
        trained.fit(X, Y, batch_size=10, shuffle=False, verbose=0)


@pytest.mark.every_backend
def test_averages_and_another_fit() -> None:
    """Keras's own fails there on JAX: the weight and its average were one buffer, which cannot be donated twice."""
    once = model(LossScaleOptimizer(adam(use_ema=True, ema_momentum=0.5)), jit_compile=BACKEND == "jax")
    try:
        raise OSError("a retry")
    except OSError:  # a fit where an error is handled is a fit like any other
        fit(once)
    first = once.get_weights()
    averages = once.optimizer.inner_optimizer._model_variables_moving_average
    for weight, average in zip(first, averages, strict=True):
        np.testing.assert_array_equal(weight, keras.ops.convert_to_numpy(average))
    fit(once)
    assert int(once.optimizer.iterations) == 8
    assert not any(np.array_equal(a, b) for a, b in zip(first, once.get_weights(), strict=True))


# The training task that every framework is held to

POLICIES = {"fp16": "mixed_float16", "bf16": "mixed_bfloat16", "fp32": "float32"}


class Task(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(one_task.HIDDEN, activation="tanh")
        self.second = keras.layers.Dense(one_task.OUT)
        self.fuse = keras.layers.Dense(1, use_bias=False)

    def call(self, given: Any) -> Any:
        x, z = given
        return self.second(self.first(x)), self.fuse(z)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *rest: Any, **others: Any) -> Any:
        out, fuse = (keras.ops.cast(one, "float32") for one in y_pred)
        whole = one_task.PART_OF_ERROR * keras.ops.mean(keras.ops.square(keras.ops.subtract(out, y)))
        return whole + keras.ops.mean(fuse)


@pytest.mark.every_backend
@pytest.mark.parametrize("precision", POLICIES if BACKEND == "torch" else ["fp16"])
def test_the_task_of_every_framework(precision: str) -> None:
    keras.config.set_dtype_policy(POLICIES[precision])
    given, model = one_task.task(), Task()
    model((given.x[0], given.z[0].copy()))
    w = given.weights
    model.set_weights([w["w1"], w["b1"], w["w2"], w["b2"], w["v"]])
    inner = keras.optimizers.SGD(one_task.LEARNING_RATE, momentum=one_task.MOMENTUM)
    optimizer = LossScaleOptimizer(inner, loss_scale=one_task.loss_scale(precision))
    model.compile(optimizer, jit_compile=BACKEND == "jax")
    losses, scales = [], []
    for x, target, z in zip(given.x, given.target, given.z.copy()):
        model.reset_metrics()
        losses.append(float(model.train_on_batch((x, z), target)))
        scales.append(float(optimizer.scale.numpy()))
    one_task.check(precision, losses, scales)
