"""LossScaleOptimizer, step by step with given gradients, in each form that a step has on this backend.

A run's variables and the inner optimizer's must be what the inner optimizer makes of the good steps alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
from keras_steps import GRADIENTS, START, no_gradients, step, tensor, values, variables

from conftest import BACKEND
from mezzo.core.errors import CallOrderError, LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import DynamicLossScale, NoLossScale, Observation, StaticLossScale
from mezzo.core.policy_text import as_loss_scale, loss_scale_of
from mezzo.keras import LossScaleOptimizer
from scale_cases import TABLE, Remembering

pytestmark = pytest.mark.every_backend

INF, NAN = math.inf, math.nan
KerasScaled = keras.optimizers.LossScaleOptimizer

Vector = tuple[float, ...]
Gradients = tuple[Vector | None, ...]
FIRST: Vector = (1.0, 2.0, 3.0, 4.0)
TWO_FIRST = (FIRST, (10.0, 20.0))
GOOD, OTHER = ((1.0, 6.0, 7.0, 2.0),), ((-3.0, 0.5, 0.0, 8.0),)
ALL_INF, BAD_ONE, BAD_NAN = ((INF,) * 4,), ((1.0, -INF, 7.0, 2.0),), ((1.0, 6.0, 7.0, NAN),)
MIXED = (GOOD, ALL_INF, OTHER, GOOD, BAD_NAN, BAD_ONE, OTHER)


def sgd(**settings: Any) -> Any:
    return keras.optimizers.SGD(0.5, **settings)


@dataclass(frozen=True)
class Row:
    """One run: the unscaled gradients of each step, one for each variable (None: it has none)."""

    steps: tuple[Gradients, ...]
    scale: str = "dynamic(init=2**15)"  # as in a policy
    after: tuple[Vector, ...] | None = None  # the variables after the last step, where they are plain numbers
    inner: Callable[[], Any] = sgd
    first: tuple[Vector, ...] = (FIRST,)
    sparse: bool = False  # gradients by rows, `tf.IndexedSlices`


ROWS: dict[str, Row] = {
    "grows, and unscales by the scale that it had": Row(
        (GOOD,) * 5 + (ALL_INF,) + (GOOD,) * 2, "dynamic(init=2,growth_interval=2)"
    ),
    "by rows": Row((GOOD, BAD_ONE, OTHER), after=((2.0, -1.25, -0.5, -1.0),), sparse=True),
    "a variable without a gradient": Row(
        (((1.0, 6.0, 7.0, 2.0), None), (None, (INF, 1.0)), (None, (1.0, 1.0))), first=TWO_FIRST
    ),
    # A skip leaves no trace in what the inner optimizer keeps.
    "momentum and decay": Row(MIXED, inner=lambda: sgd(momentum=0.75, nesterov=True, weight_decay=0.25)),
    "Adam": Row(MIXED, inner=lambda: keras.optimizers.Adam(0.125)),
    "an average that overwrites": Row(
        MIXED, inner=lambda: sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
    ),
    "accumulation": Row(MIXED, inner=lambda: sgd(gradient_accumulation_steps=2)),
    # Clipping sees unscaled gradients.
    "clipnorm": Row(
        (((0.0, 3.0, 4.0, 0.0),), ALL_INF), after=((1.0, 1.25, 2.0, 4.0),), inner=lambda: sgd(clipnorm=2.5)
    ),
    "global_clipnorm": Row(
        (((0.0, 3.0, 0.0, 0.0), (4.0, 0.0)),),
        after=((1.0, 1.25, 3.0, 4.0), (9.0, 20.0)),
        inner=lambda: sgd(global_clipnorm=2.5),
        first=TWO_FIRST,
    ),
    "a scale below 1: what overflows is the unscaled gradient": Row(
        (((2.0**127, 0.0, 0.0, 0.0),), ((8.0, 0.0, 0.0, 0.0),)), "dynamic(init=0.5)"
    ),
    "a constant": Row((GOOD, ALL_INF, GOOD), "3", ((0.0, -4.0, -4.0, 2.0),)),
    "none": Row((GOOD, ALL_INF, GOOD), "none"),
}

FORMS = ("eager", {"tensorflow": "tf.function", "jax": "jit", "torch": "stateless"}[BACKEND])
RUNS = [(name, form) for form in FORMS for name in ROWS if BACKEND == "tensorflow" or not ROWS[name].sparse]


def is_good(gradients: Gradients) -> bool:
    return all(abs(number) < INF for gradient in gradients if gradient is not None for number in gradient)


def given_to(row: Row, gradients: Gradients, scale: Any = 1.0) -> list[Any]:
    as_tensor = keras.ops.convert_to_tensor
    made = [None if one is None else as_tensor(one, "float32") * scale for one in gradients]
    if row.sparse:
        import tensorflow as tf

        made = [tf.IndexedSlices(one, tf.range(len(FIRST)), tf.constant([len(FIRST)])) for one in made]
    return made


def stepper(form: str, optimizer: Any, row: Row, weights: list[Any]) -> Callable[[Gradients], None]:
    """A function that takes one step, given the unscaled gradients."""
    optimizer.build(weights)

    def apply(gradients: Gradients) -> None:
        optimizer.apply(given_to(row, gradients, optimizer.scale_loss(tensor(1.0))), weights)

    def over(held: list[Any], state: list[Any], gradients: Gradients) -> Any:
        one = optimizer.stateless_scale_loss(state, tensor(1.0))
        return optimizer.stateless_apply(state, given_to(row, gradients, one), held)

    if form == "tf.function":
        import tensorflow as tf

        apply = tf.function(apply)
    if form == "jit":
        import jax

        over = jax.jit(over)

    def take(gradients: Gradients) -> None:
        given: Any = [None if one is None else tensor(one) for one in gradients]
        with no_gradients():
            if form in ("eager", "tf.function"):
                apply(given)
                return
            new = over([v.value for v in weights], [v.value for v in optimizer.variables], given)
        for variable, value in zip([*weights, *optimizer.variables], [*new[0], *new[1]]):
            variable.assign(value)

    return take


@pytest.mark.parametrize(("name", "form"), RUNS)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_good_steps_are_the_inner_optimizers_and_bad_ones_leave_no_trace(name: str, form: str) -> None:
    row = ROWS[name]
    weights, optimizer = variables(row.first), LossScaleOptimizer(row.inner(), loss_scale=row.scale)
    take, pure = stepper(form, optimizer, row, weights), as_loss_scale(row.scale, "the row")
    inner, alone = row.inner(), variables(row.first)
    inner.build(alone)
    # To the bit, but for compilers, which fuse a product and a sum.
    room = 0.0 if form in ("eager", "stateless") else 2.0**-22
    for gradients in row.steps:
        take(gradients)
        if good := is_good(gradients):
            with no_gradients():
                inner.apply(given_to(row, gradients), alone)
        pure = pure.next(Observation(not good))
        assert optimizer.machine() == pure
        assert int(optimizer.last_step_skipped) == (not good)
        ours, theirs = values(*weights, optimizer.inner_optimizer), values(*alone, inner)
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=room, atol=room / 4)
    if row.after is not None:  # exact in FP32
        assert values(*weights) == [list(after) for after in row.after]
    assert float(optimizer.learning_rate) == float(inner.learning_rate)
    bad = [gradients for gradients in row.steps if not is_good(gradients)]
    assert int(optimizer.skipped_steps) == len(bad)
    if bad:
        flags = [gradient is not None and not is_good((gradient,)) for gradient in bad[-1]]
        assert [bool(flag) for flag in values(optimizer.bad_gradients)[0]] == flags


def test_the_loss_scale_event_by_event() -> None:
    """The table that every framework is held to."""
    rows: list[tuple[Any, str]] = [(DynamicLossScale(**settings), events) for settings, events, *_ in TABLE]
    for machine, events in [*rows, (StaticLossScale(3.5), "..xx.x"), (Remembering(), ".x.")]:
        weights, optimizer = variables(), LossScaleOptimizer(sgd(), loss_scale=machine)
        optimizer.build(weights)
        for event in events:
            step(optimizer, weights, bad=INF if event == "x" else None)
            machine = machine.next(Observation(event == "x"))
            assert optimizer.machine() == machine


def test_some_of_the_variables_in_another_order() -> None:
    weights = variables()
    optimizer = LossScaleOptimizer(sgd())
    optimizer.build(weights)
    step(optimizer, weights[1:], GRADIENTS[1:])
    assert values(*weights) == [[1.0, -2.0, 3.0], [0.0, 2.25]]
    step(optimizer, weights[::-1], GRADIENTS[::-1])
    assert values(*weights) == [[0.75, -1.875, 2.0], [-0.5, 4.25]]
    with pytest.raises(ValueError, match="Unknown variable"):
        step(optimizer, variables())
    with pytest.raises(UsageError, match="1 gradients were given for 2"):
        optimizer.apply([tensor([1.0])], weights)


@pytest.mark.parametrize(
    ("dtype", "scale", "given", "inner", "after"),
    [
        # 300 squared is beyond FP16: a norm taken in it is infinite, and what is clipped by that is zero.
        ("float16", 16.0, 4800.0, {"clipnorm": 1.0}, 0.5),
        ("float16", 16.0, 16.0, {"gradient_accumulation_steps": 2}, 0.5),
        # Under a scale below 1 the scaled gradient is finite and the unscaled one is not: None, a skip.
        ("float16", 2.0**-10, 1000.0, {}, None),
        ("float32", 2.0**-10, 1000.0, {}, 1.0 - 0.5 * 1000 * 2**10),
    ],
)
def test_16_bit_variables(dtype: str, scale: float, given: float, inner: Any, after: float | None) -> None:
    """Clipped in FP32 and accumulated in their format; a gradient beyond it is skipped."""
    weights = variables([[1.0, 1.0]], dtype)
    optimizer = LossScaleOptimizer(sgd(**inner), loss_scale=scale)
    with no_gradients():
        optimizer.scale_loss(tensor(1.0))
        for _ in range(inner.get("gradient_accumulation_steps", 1)):
            optimizer.apply([tensor([given, 0.0], dtype)], weights)
    assert (int(optimizer.skipped_steps) > 0) == (after is None)
    assert values(*weights) == [[1.0 if after is None else after, 1.0]]
    assert np.isfinite(np.concatenate(values(optimizer))).all()


def forgetful_step(optimizer: Any) -> list[list[float]]:
    weights = variables()
    optimizer.build(weights)
    optimizer.get_config()  # which does not read the scale for the user
    with no_gradients():
        optimizer.apply([tensor(gradient) for gradient in GRADIENTS], weights)
    return values(*weights)


def test_applying_gradients_of_a_loss_that_was_not_scaled() -> None:
    """Keras's own divides them by the scale and says nothing."""
    with pytest.raises(CallOrderError, match=r"2\^16.*scale_loss\(loss\)"):
        forgetful_step(LossScaleOptimizer(sgd()))
    optimizer = LossScaleOptimizer(sgd(), on_unscaled="warn")
    with pytest.warns(UserWarning, match="The loss was not scaled"):
        forgetful_step(optimizer)
    with no_gradients():  # no second warning, which would be an error
        optimizer.apply([tensor(gradient) for gradient in GRADIENTS])
    forgetful_step(LossScaleOptimizer(sgd(), on_unscaled="ignore"))
    assert forgetful_step(LossScaleOptimizer(sgd(), loss_scale="none")) == [[0.75, -1.875, 2.0], [0.0, 2.25]]
    for name in ("scale", "dynamic_scale", "initial_scale"):  # whoever reads the scale has it
        optimizer = LossScaleOptimizer(sgd())
        assert float(getattr(optimizer, name)) == 2.0**16
        forgetful_step(optimizer)
    with pytest.raises(UsageError, match=r"optimizer\.build"):
        LossScaleOptimizer(sgd()).stateless_scale_loss([tensor(1.0)], tensor(3.0))
    scaled = LossScaleOptimizer(sgd()).scale_loss(tensor(2.0, "float16"))  # infinite in FP16
    assert (keras.backend.standardize_dtype(scaled.dtype), float(scaled)) == ("float32", 2.0**17)


def test_jax_a_scale_that_would_be_baked_in_is_an_error() -> None:
    if BACKEND != "jax":
        pytest.skip("constants of a compiled function are JAX's")
    import jax

    optimizer, weights = LossScaleOptimizer(sgd()), variables()
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


@pytest.mark.parametrize(
    "machine", [DynamicLossScale(init=2.0, floor=1.0, patience=3), StaticLossScale(2.0, patience=4)]
)
def test_the_patience_ends_at_once_in_an_eager_step(machine: Any) -> None:
    weights = variables()
    optimizer = LossScaleOptimizer(sgd(), loss_scale=machine)
    for _ in range(3):
        step(optimizer, weights, bad=NAN)
    optimizer.check()
    with pytest.raises(LossScaleCollapseError, match=r"of weight_1 are .*reset_loss_scale") as error:
        step(optimizer, weights, bad=NAN)
    assert "weight_0" not in str(error.value)
    with pytest.raises(LossScaleCollapseError):
        optimizer.check()
    optimizer.reset_loss_scale()
    optimizer.check()
    assert optimizer.machine() == machine
    step(optimizer, weights)


@pytest.mark.skipif(BACKEND == "torch", reason="compiled steps on PyTorch are in test_keras_torch.py")
def test_the_patience_ends_in_a_compiled_step() -> None:
    """By an assertion in TensorFlow's graph; elsewhere `check` tells."""
    weights = variables([[1.0]] * 101)
    optimizer = LossScaleOptimizer(sgd(), loss_scale=StaticLossScale(2.0, patience=2))
    row = Row((), "2", first=((1.0,),) * 101)
    bad: Gradients = ((INF,), *[(0.0,)] * 100)
    take = stepper(FORMS[1], optimizer, row, weights)
    for _ in range(2 if BACKEND == "jax" else 1):
        take(bad)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with pytest.raises(tf.errors.InvalidArgumentError, match=r"LossScaleCollapseError: 2 steps") as error:
            take(bad)
        assert "weight_99, ...:" in str(error.value)  # a hundred variables at most
        assert "[1 0 0" in str(error.value)
    assert values(*weights) == [[1.0]] * 101
    with pytest.raises(LossScaleCollapseError, match="gradients of weight_0 are"):
        optimizer.check()


LOSS_SCALES: list[tuple[dict[str, Any], Any]] = [
    ({}, DynamicLossScale()),
    ({"initial_scale": 8.0, "dynamic_growth_steps": 5}, DynamicLossScale(init=8.0, growth_interval=5)),
    ({"loss_scale": "dynamic(init=2**4,hysteresis=2)"}, DynamicLossScale(init=16.0, hysteresis=2)),
    ({"loss_scale": 128, "on_unscaled": "ignore"}, StaticLossScale(128.0)),
    ({"loss_scale": NoLossScale()}, NoLossScale()),
]


@pytest.mark.parametrize(("arguments", "machine"), LOSS_SCALES, ids=str)
def test_loss_scales_it_takes(arguments: dict[str, Any], machine: Any) -> None:
    class Mine(keras.optimizers.SGD):  # type: ignore[misc]
        """Known by `custom_objects` alone."""

    optimizer = LossScaleOptimizer(Mine(0.5), name="scaled", **arguments)
    assert optimizer.machine() == machine
    assert optimizer.initial_scale == float(optimizer.dynamic_scale) == machine.scale
    config = optimizer.get_config()
    again = LossScaleOptimizer.from_config(config, custom_objects={"Mine": Mine})
    assert repr(optimizer) == repr(again)
    written = re.fullmatch(r"LossScaleOptimizer\(Mine, loss_scale='(.*)'\)", repr(optimizer))
    assert written is not None
    assert loss_scale_of(written[1]) == machine
    assert (again.machine(), again.name, type(again.inner_optimizer)) == (machine, "scaled", Mine)
    assert again.get_config() == config
    if "initial_scale" in config:  # Keras's own can read it, and ours what Keras's wrote
        theirs = KerasScaled.from_config(LossScaleOptimizer(sgd(), **arguments).get_config())
        once = {"weight_decay": None, "clipnorm": None, "use_ema": False}  # what Keras wrote once, too
        assert LossScaleOptimizer.from_config({**theirs.get_config(), **once}).machine() == machine


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"loss_scale": "statistical"}, UsageError, "removed.*'dynamic'"),
        ({"loss_scale": None}, UsageError, "'none'"),
        ({"loss_scale": 64, "initial_scale": 2.0}, UsageError, "initial_scale"),
        ({"initial_scale": INF}, UsageError, "init is inf"),
        ({"dynamic_growth_steps": 0}, UsageError, "growth_interval is 0"),
        ({"on_unscaled": "rise"}, UsageError, "'raise', 'warn', 'ignore'"),
        ({"inner_optimizer": "sgd"}, UsageError, r"keras.optimizers.Adam\("),
        ({"inner_optimizer": KerasScaled(sgd())}, UsageError, "Give one without a loss scale"),
        ({"clipnorm": 1.0}, ValueError, "LossScaleOptimizer"),  # it belongs to the inner optimizer
    ],
)
def test_arguments_it_refuses(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        LossScaleOptimizer(**{"inner_optimizer": sgd(), **arguments})
    with pytest.warns(UserWarning, match=r"loss_scale_factor=64\.0 .* loss_scale=64\.0\)"):
        assert LossScaleOptimizer(sgd(loss_scale_factor=64.0)).inner_optimizer.loss_scale_factor is None


def test_built_again_it_keeps_its_variables_and_an_unbuilt_one_needs_them() -> None:
    optimizer = LossScaleOptimizer(sgd())
    optimizer.apply([], [])
    assert not optimizer.built
    with pytest.raises(UsageError, match=r"apply\(grads, variables\)"):
        optimizer.apply([tensor([1.0])])
    weights = variables()
    step(optimizer, weights, bad=INF)
    held = optimizer.bad_gradients
    optimizer.build(weights)
    assert optimizer.bad_gradients is held
    assert values(held) == [[0, 1]]
    assert values(*weights) == [list(row) for row in START]
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        step(optimizer, weights, [None, None])
