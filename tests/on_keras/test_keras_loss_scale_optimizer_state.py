"""LossScaleOptimizer's state and configuration: where it begins, what a reset goes back to, what a message knows."""

from __future__ import annotations

import math
import sys
from typing import Any

import keras
import pytest
from keras_steps import GRADIENTS, no_gradients, step, tensor, values, variables

from conftest import BACKEND
from mezzo.core.errors import LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import DynamicLossScale, LossScale, Observation, StaticLossScale
from mezzo.keras import LossScaleOptimizer

INF = math.inf


def sgd(**settings: Any) -> Any:
    return keras.optimizers.SGD(0.5, **settings)


@pytest.mark.parametrize(
    "machine",
    [
        DynamicLossScale(scale=8.0, good_steps=3),
        DynamicLossScale(scale=8.0, hysteresis=3, overflows=2),
        DynamicLossScale(scale=2.0**-14, overflows=4, stuck=3),
        StaticLossScale(2.0, skips=3),
    ],
    ids=str,
)
def test_a_reset_goes_back_to_the_state_that_was_given(machine: LossScale) -> None:
    optimizer = LossScaleOptimizer(sgd(), loss_scale=machine)
    assert optimizer.machine() == machine
    for event in (".", "x"):
        step(optimizer, variables() if not optimizer.built else optimizer._trainable_variables)
        moved = machine.next(Observation(False))
        if event == "x":
            step(optimizer, optimizer._trainable_variables, bad=INF)
            moved = moved.next(Observation(True))
        assert optimizer.machine() == moved
        optimizer.reset_loss_scale()
        assert optimizer.machine() == machine


@pytest.mark.parametrize("built", [False, True])
def test_a_state_that_is_lost_from_the_start_names_no_variable(built: bool) -> None:
    optimizer = LossScaleOptimizer(sgd(), loss_scale=StaticLossScale(2.0, patience=2, skips=2))
    if built:
        optimizer.build(variables())
    with pytest.raises(LossScaleCollapseError, match="those of no variable, as it was loaded: "):
        optimizer.check()


def test_keras_name_for_the_growth_interval() -> None:
    assert LossScaleOptimizer(sgd(), loss_scale="dynamic(growth_interval=7)").dynamic_growth_steps == 7
    assert LossScaleOptimizer(sgd(), loss_scale=8.0).dynamic_growth_steps is None


def test_a_configuration_is_read_and_not_used_up() -> None:
    class Mine(keras.optimizers.SGD):  # type: ignore[misc]
        """Known to nobody but by `custom_objects`."""

    optimizer = LossScaleOptimizer(Mine(0.5), name="scaled")
    config = optimizer.get_config()
    kept = dict(config)
    again = LossScaleOptimizer.from_config(config, custom_objects={"Mine": Mine})
    assert config == kept
    assert type(again.inner_optimizer) is Mine
    assert again.name == "scaled"


def test_a_saved_loss_scale_of_a_removed_kind_is_refused() -> None:
    with pytest.raises(UsageError, match=r"removed.*'dynamic'"):
        LossScaleOptimizer(sgd(), loss_scale={"kind": "statistical"})


def test_a_bad_setting_is_told_by_keras_name() -> None:
    with pytest.raises(UsageError, match=r"LossScaleOptimizer\(initial_scale=0\.0\): init is 0\.0"):
        LossScaleOptimizer(sgd(), initial_scale=0.0)


def test_no_gradients_are_no_step() -> None:
    optimizer = LossScaleOptimizer(sgd())
    optimizer.apply([], [])
    assert not optimizer.built


def test_a_variable_that_it_was_not_built_for_is_refused_as_keras_does() -> None:
    optimizer = LossScaleOptimizer(sgd())
    optimizer.build(variables())
    with pytest.raises(ValueError, match="Unknown variable"):
        step(optimizer, variables())


def test_built_again_it_keeps_its_variables() -> None:
    weights, optimizer = variables(), LossScaleOptimizer(sgd())
    optimizer.build(weights)
    step(optimizer, weights, bad=INF)
    held = optimizer.bad_gradients
    optimizer.build(weights)
    assert optimizer.bad_gradients is held
    assert values(held) == [[0, 1]]


@pytest.mark.every_backend
def test_gradients_of_every_narrow_format_are_unscaled_in_fp32() -> None:
    from mezzo.keras.gradients import unscale

    formats = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32"]
    held = variables([[1.0]] * len(formats))
    given = [keras.ops.cast(tensor([6.0]), name) for name in formats]
    with no_gradients():
        unscaled, bad = unscale(given, held, tensor(4.0), in_variables_format=False)
    assert [keras.backend.standardize_dtype(g.dtype) for g in unscaled] == ["float32"] * len(formats)
    assert [keras.ops.convert_to_numpy(g).tolist() for g in unscaled] == [[1.5]] * len(formats)
    assert not any(map(bool, bad))


@pytest.mark.every_backend
def test_no_other_framework_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, optimizer = variables(), LossScaleOptimizer(sgd(use_ema=True))
    optimizer.build(weights)
    for other in {"tensorflow", "jax", "torch"} - {BACKEND}:
        monkeypatch.setitem(sys.modules, other, None)
    step(optimizer, weights)
    step(optimizer, weights, bad=INF)
    with no_gradients():
        optimizer.finalize_variable_values(weights)
    assert int(optimizer.iterations) == int(optimizer.skipped_steps) == 1


@pytest.mark.every_backend
def test_the_assertion_in_a_graph_shows_a_hundred_variables() -> None:
    if BACKEND != "tensorflow":
        pytest.skip("an assertion in a graph is TensorFlow's")
    import tensorflow as tf

    weights = variables([[1.0]] * 101)
    optimizer = LossScaleOptimizer(sgd(), loss_scale=DynamicLossScale(init=1.0, floor=1.0, patience=1))
    optimizer.build(weights)
    optimizer.scale_loss(tensor(1.0))
    bad = [tensor([INF])] * len(weights)
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        tf.function(lambda: optimizer.apply(bad, weights))()
    told = str(error.value)
    assert "with the loss scale as small as it gets" in told
    assert "weight_99, ...:" in told
    assert "weight_100" not in told
    assert " ".join("1" * 100) in told


@pytest.mark.every_backend
def test_the_warning_is_of_the_line_that_applies() -> None:
    optimizer = LossScaleOptimizer(sgd(), on_unscaled="warn")
    with pytest.warns(UserWarning, match="The loss was not scaled") as told, no_gradients():
        exec(compile("optimizer.apply(gradients, weights)", "a training loop", "exec"), _loop(optimizer))
    files = [each.filename for each in told if "The loss was not scaled" in str(each.message)]
    assert files == ["a training loop"]


def _loop(optimizer: Any) -> dict[str, Any]:
    return {"optimizer": optimizer, "gradients": list(map(tensor, GRADIENTS)), "weights": variables()}
