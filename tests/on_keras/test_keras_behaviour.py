"""The behaviour table on this backend: our LossScaleOptimizer in each of its forms, and Keras's own where it agrees."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import mezzo.keras
from conftest import BACKEND
from keras_behaviour import (
    CONFIGS,
    KERAS_S,
    OLD_KEYS,
    REFUSED,
    REFUSED_BY_OURS,
    ROWS,
    Gradients,
    Row,
    Vector,
)
from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import DynamicLossScale, Observation
from mezzo.core.policy_text import as_loss_scale

FORMS = {
    "tensorflow": ("stateful", "tf.function", "XLA"),
    "jax": ("stateful", "stateless", "jit"),
    "torch": ("stateful", "stateless"),
}[BACKEND]
# Keras's own has no stateful form on JAX, and no stateless one on TensorFlow.
FORM_OF_KERAS = {"tensorflow": "stateful", "jax": "jit", "torch": "stateful"}[BACKEND]
NO_SPARSE = "Keras has no sparse gradients on PyTorch"


def inner_of(row: Row) -> Any:
    name, arguments = row.inner
    if arguments["learning_rate"] == "schedule":
        rates = keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [0.5, 0.25, 0.125])
        arguments = {**arguments, "learning_rate": rates}
    return getattr(keras.optimizers, name)(**arguments)


def made(make: Any, row: Row) -> Any:
    with warnings.catch_warnings():
        # Ours says that it takes the place of the inner optimizer's; Keras's does not.
        warnings.filterwarnings(
            "ignore", "loss_scale_factor=100 of the inner optimizer is switched off", UserWarning
        )
        return make(inner_of(row), **row.settings)


def variables_of(row: Row) -> list[Any]:
    variables = [keras.Variable(np.array(first, "float32")) for first in row.first]
    for variable, overwritten in zip(variables, row.overwritten):
        if overwritten:
            variable.overwrite_with_gradient = True
    if row.sparse:  # rows of one number
        variables = [keras.Variable(np.array(first, "float32")[:, None]) for first in row.first]
    return variables


def gradients_of(row: Row, gradients: Gradients, scale: Any = None) -> list[Any]:
    """Tensors, multiplied by the scale."""
    return multiplied(row, gradients, arrays(gradients), scale)


def arrays(gradients: Gradients) -> list[Any]:
    """FP32 arrays, without those that are None."""
    return [np.array(gradient, "float32") for gradient in gradients if gradient is not None]


def multiplied(row: Row, gradients: Gradients, values: list[Any], scale: Any = None) -> list[Any]:
    """Tensors of these values where `gradients` is not None, multiplied by the scale; by rows where the row says so."""
    left, made = list(values), []
    for gradient, overwritten in zip(gradients, row.overwritten):
        if gradient is None:
            made.append(None)
            continue
        factor = 1.0 if scale is None or overwritten else scale
        tensor = keras.ops.multiply(keras.ops.convert_to_tensor(left.pop(0), "float32"), factor)
        made.append(by_rows(gradient, tensor) if row.sparse else tensor)
    return made


def by_rows(gradient: Vector, values: Any) -> Any:
    rows = np.flatnonzero(np.array(gradient))
    values = keras.ops.take(values, rows)[:, None]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.IndexedSlices(values, tf.constant(rows), tf.constant((len(gradient), 1), tf.int64))
    from jax.experimental.sparse import BCOO

    return BCOO((values, rows[:, None]), shape=(len(gradient), 1))


def scaled_one(optimizer: Any, state: list[Any] | None = None) -> Any:
    """What a loss of 1 becomes: the factor that the gradients get."""
    one = keras.ops.ones(())
    if state is None:
        return optimizer.scale_loss(one)
    if hasattr(optimizer, "stateless_scale_loss"):
        return optimizer.stateless_scale_loss(state, one)
    with keras.StatelessScope(list(zip(optimizer.variables, state))):
        return optimizer.scale_loss(one)


def stepper(form: str, optimizer: Any, row: Row, variables: list[Any]) -> Callable[[Gradients], None]:
    """A function that takes one step, given the unscaled gradients."""
    optimizer.build(variables)

    def apply(gradients: Gradients, values: list[Any]) -> None:
        optimizer.apply(multiplied(row, gradients, values, scaled_one(optimizer)), variables)

    def over(weights: list[Any], state: list[Any], gradients: Gradients, values: list[Any]) -> Any:
        scaled = multiplied(row, gradients, values, scaled_one(optimizer, state))
        return optimizer.stateless_apply(state, scaled, weights)

    def step(gradients: Gradients) -> None:
        if form == "stateful":
            return apply(gradients, arrays(gradients))
        # What is a constant of a program: which gradients there are, and in which rows.
        shape = tuple(g and tuple(map(bool, g)) if row.sparse else g is None for g in gradients)
        if form in ("tf.function", "XLA"):
            import tensorflow as tf

            if shape not in programs:
                programs[shape] = tf.function(lambda v: apply(gradients, v), jit_compile=form == "XLA")
            return programs[shape]([tf.constant(value) for value in arrays(gradients)])
        if shape not in programs:
            program = lambda w, s, v: over(w, s, gradients, v)  # noqa: E731
            programs[shape] = program if form == "stateless" else jitted(program)
        held = ([v.value for v in variables], [v.value for v in optimizer.variables])
        new = programs[shape](*held, arrays(gradients))
        for variable, value in zip([*variables, *optimizer.variables], [*new[0], *new[1]]):
            variable.assign(value)
        return None

    programs: dict[Any, Any] = {}
    return step


def jitted(program: Any) -> Any:
    import jax

    return jax.jit(program)


def numbers(things: Any) -> list[Any]:
    return [np.asarray(keras.ops.convert_to_numpy(thing)) for thing in things]


def alone(row: Row) -> tuple[list[Any], Any]:
    """The variables and the optimizer after the inner one has taken the good steps, unscaled, by itself."""
    inner, variables = inner_of(row), variables_of(row)
    inner.loss_scale_factor = None
    inner.build(variables)
    for gradients in filter(row.is_good, row.steps):
        inner.apply(gradients_of(row, gradients), variables)
    return variables, inner


def hold(row: Row, make: Any, form: str) -> tuple[Any, Any]:
    """The optimizer after the row's steps, and the pure machine after the same, held to all that the row says."""
    if row.sparse and BACKEND == "torch":
        pytest.skip(NO_SPARSE)
    optimizer, variables = made(make, row), variables_of(row)
    step = stepper(form, optimizer, row, variables)
    pure: Any = as_loss_scale(row.settings.get("loss_scale"), "the row") or DynamicLossScale(
        init=row.settings["initial_scale"], growth_interval=row.settings["dynamic_growth_steps"]
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist", UserWarning)
        for number, gradients in enumerate(row.steps):
            step(gradients)
            pure = pure.next(Observation(not row.is_good(gradients)))
            assert float(scaled_one(optimizer)) == pure.scale, f"step {number}"
            good = sum(map(row.is_good, row.steps[: number + 1]))
            assert int(optimizer.iterations) == good // row.accumulates, f"step {number}"
        by_itself, inner = alone(row)
    assert float(scaled_one(optimizer)) == row.scale
    if row.after is not None:
        # Of small whole numbers and halves, which no order of operations rounds.
        assert [v.reshape(-1).tolist() for v in numbers(variables)] == [list(after) for after in row.after]
    # To the bit, but for compilers, which fuse a product and a sum.
    room = {} if form in ("stateful", "stateless") else {"rtol": 2.0**-22, "atol": 2.0**-24}
    close = np.testing.assert_allclose if room else np.testing.assert_array_equal
    for ours, theirs in zip(numbers(variables), numbers(by_itself)):
        close(ours, theirs, **room)
    assert len(optimizer.inner_optimizer.variables) == len(inner.variables)
    for ours, theirs in zip(optimizer.inner_optimizer.variables, inner.variables):
        close(*numbers((ours, theirs)), err_msg=ours.path, **room)
    assert float(optimizer.learning_rate) == float(inner.learning_rate)
    return optimizer, pure


# XLA takes a second a row, and JAX's two eager forms are one path: there, Keras's own cases and the machine's.
FEW = [row for row in ROWS if row in KERAS_S or not row.of_keras]
RUNS = [
    (row, form)
    for form in FORMS
    for row in (FEW if form == "XLA" or (BACKEND, form) == ("jax", "stateless") else ROWS)
]


@pytest.mark.every_backend
@pytest.mark.parametrize(("row", "form"), RUNS, ids=str)
def test_ours(row: Row, form: str) -> None:
    optimizer, pure = hold(row, mezzo.keras.LossScaleOptimizer, form)
    assert optimizer.machine() == pure
    assert int(optimizer.skipped_steps) == sum(not row.is_good(step) for step in row.steps)
    assert int(optimizer.last_step_skipped) == (not row.is_good(row.steps[-1]))
    bad = [step for step in row.steps if not row.is_good(step)][-1:]
    if bad:
        flags = [gradient is not None and not row.is_good((gradient,)) for gradient in bad[0]]
        assert keras.ops.convert_to_numpy(optimizer.bad_gradients).astype(bool).tolist() == flags


@pytest.mark.every_backend
@pytest.mark.parametrize("row", [row for row in ROWS if row.of_keras], ids=str)
def test_keras_s_own_where_it_agrees(row: Row) -> None:
    """The table is right: what Keras's own does as it should, it says too."""
    hold(row, keras.optimizers.LossScaleOptimizer, FORM_OF_KERAS)


@pytest.mark.parametrize("row", KERAS_S[:3], ids=str)
def test_variables_need_not_be_named(row: Row) -> None:
    optimizer, variables = made(mezzo.keras.LossScaleOptimizer, row), variables_of(row)
    optimizer.build(variables)
    optimizer.apply(gradients_of(row, row.steps[0], scaled_one(optimizer)))
    assert row.after is not None
    assert [v.tolist() for v in numbers(variables)] == [list(after) for after in row.after]


# Arguments and configurations.


def sgd() -> Any:
    return keras.optimizers.SGD(learning_rate=0.5)


@pytest.mark.parametrize(("arguments", "says"), REFUSED, ids=str)
@pytest.mark.parametrize("whose", ["ours", "Keras's own"])
def test_refused(whose: str, arguments: dict[str, Any], says: str) -> None:
    make = mezzo.keras.LossScaleOptimizer if whose == "ours" else keras.optimizers.LossScaleOptimizer
    with pytest.raises(ValueError, match=says):
        make(sgd(), **arguments)


@pytest.mark.parametrize(("arguments", "says"), REFUSED_BY_OURS, ids=str)
def test_refused_by_ours(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        mezzo.keras.LossScaleOptimizer(sgd(), **arguments)


@pytest.mark.parametrize("arguments", CONFIGS, ids=str)
@pytest.mark.parametrize("way", ["from_config", "serialize"])
def test_a_configuration_is_the_same_optimizer(way: str, arguments: dict[str, Any]) -> None:
    inner = keras.optimizers.SGD(learning_rate=0.5, momentum=0.06, nesterov=True, weight_decay=0.004)
    optimizer = mezzo.keras.LossScaleOptimizer(inner, name="test_opt", **arguments)
    if way == "from_config":
        again = mezzo.keras.LossScaleOptimizer.from_config(optimizer.get_config())
    else:
        text = json.dumps(keras.saving.serialize_keras_object(optimizer))
        again = keras.saving.deserialize_keras_object(json.loads(text))
    assert type(again) is mezzo.keras.LossScaleOptimizer
    assert again.get_config() == optimizer.get_config()
    assert again.name == "test_opt"
    assert again.inner_optimizer.get_config() == inner.get_config()
    assert again.machine() == optimizer.machine()


def test_a_configuration_that_keras_wrote_once_is_read() -> None:
    config = {
        "name": "loss_scale_optimizer",
        **OLD_KEYS,
        "inner_optimizer": {
            "module": "keras.optimizers",
            "class_name": "SGD",
            "config": {"name": "SGD", "learning_rate": 0.5, **OLD_KEYS, "momentum": 0.0, "nesterov": False},
            "registered_name": None,
        },
        "initial_scale": 2.0,
        "dynamic_growth_steps": 2,
    }
    optimizer = mezzo.keras.LossScaleOptimizer.from_config(config)
    assert optimizer.machine() == DynamicLossScale(init=2.0, growth_interval=2)
    assert float(optimizer.inner_optimizer.learning_rate) == 0.5


@pytest.mark.every_backend
def test_optimizers_by_variable_under_one_loss_scale() -> None:
    inner = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(sgd(), {".*first.*": keras.optimizers.SGD(learning_rate=0.25)})
    )
    variables = [keras.Variable([2.0, 2.0], name=name) for name in ("first", "second")]
    optimizer = mezzo.keras.LossScaleOptimizer(inner, initial_scale=8.0)
    optimizer.build(variables)
    for number in (1.0, float("inf")):
        gradients = [keras.ops.multiply(scaled_one(optimizer), [number, 1.0]) for _ in variables]
        if BACKEND == "jax":
            held = [v.value for v in optimizer.variables], gradients, [v.value for v in variables]
            weights, state = optimizer.stateless_apply(*held)
            for variable, value in zip([*variables, *optimizer.variables], [*weights, *state]):
                variable.assign(value)
        else:
            optimizer.apply(gradients, variables)
    assert [v.tolist() for v in numbers(variables)] == [[1.75, 1.75], [1.5, 1.5]]
    assert float(optimizer.scale) == 4.0
