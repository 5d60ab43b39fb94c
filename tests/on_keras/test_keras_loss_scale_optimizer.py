"""LossScaleOptimizer, step by step with given gradients: the machine, what is unscaled, what a skipped step leaves."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest
from keras_steps import GRADIENTS, START, no_gradients, plain_step, step, tensor, values, variables

from conftest import BACKEND
from mezzo.core.errors import LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import DynamicLossScale, NoLossScale, Observation, StaticLossScale
from mezzo.keras import LossScaleOptimizer
from scale_cases import TABLE

pytestmark = pytest.mark.every_backend

INF, NAN = math.inf, math.nan

MACHINES = [(DynamicLossScale(**settings), events) for settings, events, *_ in TABLE]
MACHINES += [(StaticLossScale(3.5), "..xx.x"), (NoLossScale(), ".x.")]


def sgd(**settings: Any) -> Any:
    return keras.optimizers.SGD(0.5, **settings)


@pytest.mark.parametrize(("machine", "events"), MACHINES, ids=str)
def test_the_machine_event_by_event(machine: Any, events: str) -> None:
    weights = variables()
    optimizer = LossScaleOptimizer(sgd(), loss_scale=machine)
    optimizer.build(weights)
    for event in events:
        step(optimizer, weights, bad=INF if event == "x" else None)
        machine = machine.next(Observation(event == "x"))
        assert optimizer.machine() == machine
        assert int(optimizer.last_step_skipped) == (event == "x")
    assert float(optimizer.scale) == machine.scale
    assert int(optimizer.skipped_steps) == events.count("x")
    assert int(optimizer.iterations) == events.count(".")


def test_gradients_are_divided_by_the_scale_that_was_used() -> None:
    """mpx 0.1.8 divides by the next one on a growth step: its update is half as large."""
    weights = variables()
    optimizer = LossScaleOptimizer(sgd(), loss_scale=DynamicLossScale(init=4.0, growth_interval=1))
    for times in (1, 2, 3):
        step(optimizer, weights)
        assert float(optimizer.scale) == 4.0 * 2**times
        expected = [[w - 0.5 * times * g for w, g in zip(ws, gs)] for ws, gs in zip(START, GRADIENTS)]
        assert values(*weights) == expected


INNER: dict[str, Any] = {
    "momentum": lambda: sgd(momentum=0.9, weight_decay=0.01),
    "adam": lambda: keras.optimizers.Adam(0.1, weight_decay=0.01, amsgrad=True),
    "ema": lambda: sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulation": lambda: sgd(momentum=0.9, gradient_accumulation_steps=2),
    "accumulation and ema": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2, use_ema=True),
    "clipnorm": lambda: sgd(clipnorm=0.5),
    "global_clipnorm": lambda: sgd(global_clipnorm=0.5),
    "clipvalue": lambda: sgd(clipvalue=0.25),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)),
}


@pytest.mark.parametrize("make", INNER.values(), ids=INNER)
def test_good_steps_are_the_inner_optimizers_and_bad_ones_leave_no_trace(make: Any) -> None:
    """With S a power of two: bit for bit the inner optimizer alone on unscaled gradients, on the good steps only."""
    alone, plain = variables(), make()
    weights, optimizer = variables(), LossScaleOptimizer(make(), loss_scale=DynamicLossScale(init=2.0**10))
    plain.build(alone)
    optimizer.build(weights)
    for event in "..x.xx..":
        if event == ".":
            plain_step(plain, alone)
            step(optimizer, weights)
        else:
            before = values(*weights, optimizer.inner_optimizer)
            step(optimizer, weights, bad=INF)
            assert values(*weights, optimizer.inner_optimizer) == before
        assert values(*weights, optimizer.inner_optimizer) == values(*alone, plain)
    assert int(optimizer.skipped_steps) == 3


def test_each_gradient_that_is_not_finite_is_marked() -> None:
    weights = variables()
    optimizer = LossScaleOptimizer(sgd())
    step(optimizer, weights, [[1.0, NAN, 1.0], [1.0, 1.0]])
    assert values(optimizer.bad_gradients) == [[1, 0]]
    step(optimizer, weights)
    assert values(optimizer.bad_gradients) == [[1, 0]]  # of the last skipped step
    step(optimizer, weights, bad=-INF)
    assert values(optimizer.bad_gradients) == [[0, 1]]


def test_some_of_the_variables_in_another_order() -> None:
    weights = variables()
    optimizer = LossScaleOptimizer(sgd())
    optimizer.build(weights)
    step(optimizer, weights[1:], GRADIENTS[1:])
    assert values(*weights) == [[1.0, -2.0, 3.0], [0.0, 2.25]]
    step(optimizer, weights[1:], GRADIENTS[1:], bad=INF)
    assert values(optimizer.bad_gradients) == [[0, 1]]
    step(optimizer, weights[::-1], GRADIENTS[::-1])
    assert values(*weights) == [[0.75, -1.875, 2.0], [-0.5, 4.25]]


def test_variables_overwritten_with_their_gradient_are_not_unscaled() -> None:
    weights = variables()
    weights[1].overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(sgd(), loss_scale=4.0)
    with no_gradients():
        optimizer.scale_loss(tensor(1.0))
        optimizer.apply([tensor([4.0, 4.0, 4.0]), tensor([7.0, 8.0])], weights)
    assert values(*weights) == [[0.5, -2.5, 2.5], [7.0, 8.0]]


def test_a_variable_without_gradient_stays_and_is_told() -> None:
    weights = variables()
    optimizer = LossScaleOptimizer(sgd())
    with pytest.warns(UserWarning, match="weight_1"):
        step(optimizer, weights, [GRADIENTS[0], None])
    assert values(*weights) == [[0.75, -1.875, 2.0], [0.5, 0.25]]
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        step(optimizer, weights, [None, None])


def test_sparse_gradients_of_tensorflow() -> None:
    if BACKEND != "tensorflow":
        pytest.skip("tf.IndexedSlices are TensorFlow's")
    import tensorflow as tf

    table = keras.Variable(np.ones((4, 2), "float32"), name="table")
    optimizer = LossScaleOptimizer(sgd(), loss_scale=8.0)
    optimizer.build([table])

    @tf.function
    def train(rows: Any, factor: Any) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(tf.gather(table.value, rows)) * factor)
        (gradient,) = tape.gradient(loss, [table.value])
        assert isinstance(gradient, tf.IndexedSlices)
        optimizer.apply([gradient], [table])

    train(tf.constant([1, 3, 3]), tf.constant(1.0))
    assert values(table) == [[1, 1, 0.5, 0.5, 1, 1, 0, 0]]
    train(tf.constant([0]), tf.constant(INF))
    assert values(table) == [[1, 1, 0.5, 0.5, 1, 1, 0, 0]]
    assert int(optimizer.skipped_steps) == 1


def test_fp16_variables_are_clipped_in_fp32() -> None:
    """300 squared is beyond fp16: a norm taken in it is infinite, and what is clipped by that is zero."""
    weights = variables([[1.0, 1.0]], "float16")
    optimizer = LossScaleOptimizer(sgd(clipnorm=1.0), loss_scale=16.0)
    with no_gradients():
        optimizer.scale_loss(tensor(1.0))
        optimizer.apply([tensor([4800.0, 0.0], "float16")], weights)
    assert values(*weights) == [[0.5, 1.0]]


@pytest.mark.parametrize("accumulation", [None, 2])
def test_a_gradient_beyond_its_variables_format_is_skipped(accumulation: int | None) -> None:
    """Under a scale below 1 the scaled gradient is finite and the unscaled one is not."""
    for dtype, skipped in (("float16", 1), ("float32", 0)):
        weights = variables([[1.0, 1.0]], dtype)
        optimizer = LossScaleOptimizer(sgd(gradient_accumulation_steps=accumulation), loss_scale=2.0**-10)
        with no_gradients():
            optimizer.scale_loss(tensor(1.0))
            optimizer.apply([tensor([1000.0, 0.0], dtype)], weights)
        assert int(optimizer.skipped_steps) == skipped
        assert np.isfinite(np.concatenate(values(*weights, optimizer))).all()


def test_fp16_variables_are_accumulated_in_their_format() -> None:
    """Keras adds a gradient to an accumulator of the variable's format, and takes no other on TensorFlow and JAX."""
    weights = variables([[1.0, 1.0]], "float16")
    optimizer = LossScaleOptimizer(sgd(gradient_accumulation_steps=2), loss_scale=4.0)
    with no_gradients():
        optimizer.scale_loss(tensor(1.0))
        for _ in range(2):
            optimizer.apply([tensor([8.0, 0.0], "float16")], weights)
    assert values(*weights) == [[0.0, 1.0]]


def test_an_fp32_gradient_that_overflows_in_the_division_is_skipped() -> None:
    weights = variables()
    optimizer = LossScaleOptimizer(sgd(), loss_scale=2.0**-14)
    with no_gradients():
        optimizer.scale_loss(tensor(1.0))
        optimizer.apply([tensor([1e36, 0.0, 0.0]), tensor([0.0, 0.0])], weights)
    assert values(*weights) == [list(row) for row in START]
    assert int(optimizer.skipped_steps) == 1


def test_a_narrow_loss_is_scaled_in_fp32() -> None:
    """flax: an fp16 loss times 65536 is infinite at once."""
    scaled = LossScaleOptimizer(sgd()).scale_loss(tensor(2.0, "float16"))
    assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
    assert float(scaled) == 2.0**17


# Patience


@pytest.mark.parametrize(
    "machine", [DynamicLossScale(init=2.0, floor=1.0, patience=3), StaticLossScale(2.0, patience=4)], ids=str
)
def test_the_patience_ends_at_once_in_an_eager_step(machine: Any) -> None:
    weights = variables()
    optimizer = LossScaleOptimizer(sgd(), loss_scale=machine)
    for _ in range(3):
        step(optimizer, weights, bad=NAN)
    optimizer.check()
    with pytest.raises(LossScaleCollapseError, match=r"those of weight_1: .*reset_loss_scale") as error:
        step(optimizer, weights, bad=NAN)
    with pytest.raises(LossScaleCollapseError) as again:
        optimizer.check()
    assert str(again.value) == str(error.value)
    assert "weight_0" not in str(error.value)
    optimizer.reset_loss_scale()
    optimizer.check()
    assert optimizer.machine() == machine
    step(optimizer, weights)


def test_the_patience_ends_in_a_compiled_step() -> None:
    """By an assertion in TensorFlow's graph; elsewhere whoever asks is told."""
    weights = variables()
    optimizer = LossScaleOptimizer(sgd(), loss_scale=StaticLossScale(2.0, patience=2))
    optimizer.build(weights)
    bad = [tensor([INF, 0.0, 0.0]), tensor([0.0, 0.0])]
    optimizer.scale_loss(tensor(1.0))
    if BACKEND == "tensorflow":
        import tensorflow as tf

        compiled = tf.function(lambda: optimizer.apply(bad, weights))
        compiled()
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=r"LossScaleCollapseError: 2 steps.* constant at 2\^1\.(.|\n)*\[1 0\]",
        ):
            compiled()
        optimizer.reset_loss_scale()
        compiled = tf.function(
            lambda: optimizer.apply(bad, weights), jit_compile=True
        )  # XLA drops assertions
        for _ in range(3):
            compiled()
    elif BACKEND == "jax":
        import jax

        state = [v.value for v in optimizer.variables], [v.value for v in weights]
        for _ in range(3):
            after = jax.jit(lambda state: optimizer.stateless_apply(state[0], bad, state[1]))(state)
            state = after[1], after[0]
        for variable, value in zip(optimizer.variables, state[0]):
            variable.assign(value)
    else:
        pytest.skip("compiled steps on PyTorch are in ..._torch.py")
    assert values(*weights) == [list(row) for row in START]
    with pytest.raises(LossScaleCollapseError, match="those of weight_0"):
        optimizer.check()


# What the constructor takes


@pytest.mark.parametrize(
    ("arguments", "machine"),
    [
        ({}, DynamicLossScale()),
        ({"initial_scale": 8.0, "dynamic_growth_steps": 5}, DynamicLossScale(init=8.0, growth_interval=5)),
        ({"loss_scale": "dynamic(init=2**4,hysteresis=2)"}, DynamicLossScale(init=16.0, hysteresis=2)),
        ({"loss_scale": 128}, StaticLossScale(128.0)),
        ({"loss_scale": "2**7"}, StaticLossScale(128.0)),
        ({"loss_scale": "none"}, NoLossScale()),
        (
            {"loss_scale": DynamicLossScale(scale=4.0, good_steps=3)},
            DynamicLossScale(scale=4.0, good_steps=3),
        ),
    ],
    ids=str,
)
def test_loss_scales_it_takes(arguments: dict[str, Any], machine: Any) -> None:
    optimizer = LossScaleOptimizer(sgd(), **arguments)
    assert optimizer.machine() == machine
    assert optimizer.initial_scale == float(optimizer.dynamic_scale) == machine.scale
    again = LossScaleOptimizer.from_config(optimizer.get_config())
    assert again.machine() == machine
    assert again.get_config() == optimizer.get_config()
    if isinstance(machine, DynamicLossScale) and arguments.keys() != {"loss_scale"}:
        assert keras.optimizers.LossScaleOptimizer.from_config(optimizer.get_config()).built is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_scale": "statistical"}, "removed.*'dynamic'"),
        ({"loss_scale": "dynamo"}, "is no loss scale"),
        ({"loss_scale": None}, "loss_scale='none'"),
        ({"loss_scale": True}, "loss_scale is True"),
        ({"loss_scale": -1}, "between"),
        ({"loss_scale": 64, "initial_scale": 2.0}, "initial_scale set the dynamic loss scale"),
        ({"initial_scale": 0.0}, "init is 0.0"),
        ({"dynamic_growth_steps": 0}, "growth_interval is 0"),
        ({"on_unscaled": "rise"}, "'raise', 'warn', 'ignore'"),
        ({"inner_optimizer": "sgd"}, "keras.optimizers.get"),
        ({"inner_optimizer": keras.optimizers.SGD}, "keras.optimizers.Adam"),
    ],
    ids=str,
)
def test_arguments_it_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LossScaleOptimizer(**{"inner_optimizer": sgd(), **arguments})


def test_two_loss_scales_are_refused() -> None:
    for inner in (LossScaleOptimizer(sgd()), keras.optimizers.LossScaleOptimizer(sgd())):
        with pytest.raises(UsageError, match="inner_optimizer"):
            LossScaleOptimizer(inner)
    with pytest.warns(UserWarning, match=r"give loss_scale=64\.0 here"):
        optimizer = LossScaleOptimizer(sgd(loss_scale_factor=64.0))
    assert optimizer.inner_optimizer.loss_scale_factor is None


def test_arguments_of_the_inner_optimizer_are_refused_as_keras_does() -> None:
    for arguments in ({"clipnorm": 1.0}, {"use_ema": True}, {"dynamic": False}, {"momentum": 0.9}):
        messages = []
        for cls in (LossScaleOptimizer, keras.optimizers.LossScaleOptimizer):
            with pytest.raises(ValueError, match="LossScaleOptimizer") as error:
                cls(sgd(), **arguments)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


def test_the_first_scale_is_settled() -> None:
    optimizer = LossScaleOptimizer(sgd())
    with pytest.raises(UsageError, match=r"LossScaleOptimizer\(initial_scale=\.\.\.\)"):
        optimizer.initial_scale = 4.0
    with pytest.raises(UsageError, match=r"apply\(grads, variables\)"):
        optimizer.apply([tensor([1.0])])
    with pytest.raises(UsageError, match="1 gradients were given for 2"):
        optimizer.apply([tensor([1.0])], variables())
