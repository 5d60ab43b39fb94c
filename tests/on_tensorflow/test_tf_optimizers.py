"""Every family of optimizers goes through the pure loss scale's states, eagerly, in a function and in a Session."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_steppers import FAMILIES, PLAIN, UNSCALING, WAYS, Eager, InSession

import mezzo.tensorflow as mt
from mezzo.core.errors import CallOrderError, LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import DynamicLossScale, NoLossScale, Observation, StaticLossScale
from mezzo.tensorflow.keras2 import LegacyLossScaleOptimizer
from mezzo.tensorflow.keras2 import LossScaleOptimizer as Keras2Optimizer
from scale_cases import TABLE, Remembering

v1 = tf.compat.v1

# Compiling costs a second each, so functions and Sessions take one row that has every kind of event.
ALL = {"growth_interval": 2, "init": 3.0, "floor": 1.5, "ceiling": 5.0, "hysteresis": 2}
SOME = [(DynamicLossScale(**ALL), "..x.xxxx...."), (StaticLossScale(3.5), "..xx.x")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("pure", "events"), SOME, ids=["dynamic", "static"])
def test_states_and_skips(way: str, pure: Any, events: str) -> None:
    stepper, plain = WAYS[way](pure), WAYS[way](NoLossScale())
    for one in (stepper, plain):
        one(False)
    pure = pure.next(Observation(False))
    for event in events:
        before = stepper.everything()
        stepper(event == "x")
        pure = pure.next(Observation(event == "x"))
        assert stepper.machine() == pure
        same = all(np.array_equal(a, b) for a, b in zip(before, stepper.everything()))
        assert same == (event == "x")
        if event == ".":
            plain(False)
    for ours, theirs in zip(stepper.everything(), plain.everything(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table(family: str) -> None:
    for settings, events, *state in [*TABLE, ({"failed": 1.0}, ".x.", 2.0**15, 1, 0, 0)]:
        pure = Remembering(**settings) if "failed" in settings else DynamicLossScale(**settings)
        stepper = Eager(family, pure)
        for event in events:
            stepper(event == "x")
            pure = pure.next(Observation(event == "x"))
            assert stepper.machine() == pure, (settings, events)
        assert [pure.scale, pure.good_steps, pure.overflows, pure.stuck] == state


@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith(("v1", "tf_keras"))])
def test_patience(way: str) -> None:
    stepper = WAYS[way](DynamicLossScale(init=2.0, floor=1.0, patience=3))
    for _ in range(3):
        stepper(True)
    kind = LossScaleCollapseError if way.endswith("eagerly") else tf.errors.InvalidArgumentError
    with pytest.raises(kind) as raised:
        stepper(True)
    said, _, names = str(raised.value).partition("Gradients that are not finite:")
    assert "the loss scale is at its floor 2^0 and the last 3 steps were skipped" in said
    assert "weight" in names
    if not way.endswith("Session"):
        with pytest.raises(LossScaleCollapseError, match="floor 2\\^0"):
            stepper.optimizer.check()


@pytest.mark.parametrize("family", UNSCALING)
def test_forgetting_to_scale_or_to_unscale_and_no_gradient_at_all(family: str) -> None:
    variable = tf.Variable([1.0])
    for done, said in (
        (None, "never scaled"),
        ("get_scaled_loss", r"never unscaled[\s\S]*get_unscaled_gradients"),
        ("get_unscaled_gradients", "too small by the loss scale"),
    ):
        optimizer = FAMILIES[family](DynamicLossScale())
        if done:
            getattr(optimizer, done)([tf.constant([1.0])])
        with pytest.raises(CallOrderError, match=said):
            optimizer.apply_gradients([(tf.constant([1.0]), variable)])
    optimizer.get_scaled_loss(tf.constant(1.0))
    with pytest.raises(UsageError, match="no variable has a gradient"):
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients([None]), [variable]))
    np.testing.assert_array_equal(variable.numpy(), [1.0])
    FAMILIES[family](NoLossScale()).apply_gradients([(tf.constant([1.0]), variable)])  # nothing to forget
    np.testing.assert_array_equal(variable.numpy(), [0.875])


@pytest.mark.parametrize("method", ["get_scaled_loss", "get_unscaled_gradients"])
def test_a_keras_3_optimizer_names_its_own_methods(method: str) -> None:
    with pytest.raises(AttributeError, match=rf"{method}.*scale_loss\(loss\).*apply\(gradients, variables\)"):
        getattr(FAMILIES["keras3"](DynamicLossScale()), method)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        FAMILIES["keras3"](DynamicLossScale()).nothing


@pytest.mark.parametrize("family", UNSCALING)  # of Keras 3 tests/on_keras has it
def test_sparse_gradients(family: str) -> None:
    table = tf.Variable(tf.ones([4, 2]))
    optimizer = FAMILIES[family](DynamicLossScale())
    for factor in (1.0, np.nan):
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(tf.gather(table, [1])) * factor)
        gradients = tape.gradient(loss, [table])
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(gradients), [table]))
        np.testing.assert_array_equal(table.numpy(), [[1, 1], [0.875, 0.875], [1, 1], [1, 1]])


def test_a_narrow_loss_and_narrow_gradients_keep_their_types() -> None:
    optimizer = FAMILIES["v1"](DynamicLossScale())
    scaled = optimizer.get_scaled_loss(tf.constant(2.0, tf.float16))
    assert (scaled.dtype, float(scaled)) == (tf.float32, 2.0**17)  # infinite in FP16
    tiny = optimizer.get_unscaled_gradients([tf.constant(2.0**-8, tf.float16), None])
    assert (tiny[0].dtype, float(tiny[0]), tiny[1]) == (tf.float16, 2.0**-24, None)
    wide = optimizer.get_unscaled_gradients([tf.constant(1.0, tf.float64)])[0]
    assert (wide.dtype, float(wide)) == (tf.float64, 2.0**-16)


EVENTS = (False, True, True, False)


def test_a_session_saves_and_restores_by_name(tmp_path: Any) -> None:
    stepper = InSession("v1", DynamicLossScale(growth_interval=3))
    for bad in EVENTS:
        stepper(bad)
    with stepper.graph.as_default():
        saver = v1.train.Saver()
        path = saver.save(stepper.session, str(tmp_path / "saved"))
        kept, weights = stepper.machine(), stepper.everything()
        stepper(True)
        assert stepper.machine() != kept
        saver.restore(stepper.session, path)
    assert stepper.machine() == kept
    assert all(np.array_equal(a, b) for a, b in zip(weights, stepper.everything()))


@pytest.mark.parametrize("family", UNSCALING)
def test_a_checkpoint_brings_the_state_back(family: str, tmp_path: Any) -> None:
    stepper = Eager(family, DynamicLossScale(growth_interval=3))
    for bad in EVENTS:
        stepper(bad)
    tracked = {"optimizer": stepper.optimizer, "weight": stepper.variable}
    path = tf.train.Checkpoint(**tracked).save(str(tmp_path / "saved"))
    other = Eager(family, DynamicLossScale(growth_interval=3))
    other(False)
    tf.train.Checkpoint(optimizer=other.optimizer, weight=other.variable).restore(path).assert_consumed()
    assert other.machine() == stepper.machine()
    for bad in (False, False, True):
        stepper(bad)
        other(bad)
    assert all(np.array_equal(a, b) for a, b in zip(stepper.everything(), other.everything()))


def of_tf_keras(family: str, weight: Any) -> Any:
    """tf_keras's own optimizer with a loss scale, which a step that overflowed has halved."""
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(PLAIN[family](), initial_scale=2.0**9)
    for factor in (1.0, 1.0, np.inf):
        optimizer.minimize(lambda factor=factor: weight * factor, var_list=[weight])
    return optimizer


CHECKPOINTS = [
    *(("plain", family) for family in UNSCALING),
    *(("tf_keras's own", family) for family in ("tf_keras", "legacy")),
]


@pytest.mark.parametrize("has_slots", [False, True])
@pytest.mark.parametrize(("whose", "family"), CHECKPOINTS)
def test_a_checkpoint_of_others_goes_on_here(whose: str, family: str, has_slots: bool, tmp_path: Any) -> None:
    weight = tf.Variable([1.0])
    theirs = PLAIN[family]() if whose == "plain" else of_tf_keras(family, weight)
    theirs.minimize(lambda: weight * 2.0, var_list=[weight])
    path = tf.train.Checkpoint(optimizer=theirs, weight=weight).save(str(tmp_path / "saved"))
    theirs.minimize(lambda: weight * 2.0, var_list=[weight])
    on = weight.numpy()
    ours = FAMILIES[family](DynamicLossScale())
    if has_slots:
        ours.minimize(lambda: weight * 4.0, var_list=[weight])
    tf.train.Checkpoint(optimizer=ours, weight=weight).restore(path).expect_partial()
    ours.minimize(lambda: weight * 2.0, var_list=[weight])
    np.testing.assert_array_equal(weight.numpy(), on)
    if whose != "plain":
        assert ours.machine() == DynamicLossScale(scale=2.0**8, good_steps=2)


def test_reference_variables_are_refused_with_the_way_out() -> None:
    with tf.Graph().as_default():
        variable = v1.get_variable("old", initializer=[1.0], use_resource=False)
        optimizer = FAMILIES["v1"](DynamicLossScale())
        with pytest.raises(UsageError, match=r"'old:0'.*use_resource=False.*disable_control_flow_v2"):
            optimizer.minimize(tf.reduce_sum(variable))


def test_two_replicas_skip_together(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    command = [sys.executable, str(folder / "children" / "two_replicas.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Weights on both replicas, then the scale and the number of skipped steps.
    good, skipped = [0.625, 1.625], ([4.0, 0], [2.0, 1], [1.0, 2])
    steps = [*([[good] * 2, *state] for state in skipped), [[[0.1875, 1.1875]] * 2, 1.0, 2]]
    assert json.loads(done.stdout.splitlines()[-1]) == {"tf_keras": steps, "v1": steps}


# Keras 2: fit, files, configurations

KINDS = {
    "new": (lambda: tf_keras.optimizers.SGD(0.01, 0.9), Keras2Optimizer),
    "legacy": (lambda: tf_keras.optimizers.legacy.SGD(0.01, 0.9), LegacyLossScaleOptimizer),
}
X, Y = np.ones((16, 8), "float32"), np.ones((16, 1), "float32")
kinds = pytest.mark.parametrize(("make", "wrapper"), KINDS.values(), ids=KINDS)


def model() -> Any:
    tf_keras.utils.set_random_seed(0)
    hidden = tf_keras.layers.Dense(16, "tanh", input_shape=(8,))
    return tf_keras.Sequential([hidden, tf_keras.layers.Dense(1)])


@kinds
def test_fit_scales_skips_and_does_not_count_what_it_skipped(make: Any, wrapper: Any) -> None:
    trained = model()
    pure = DynamicLossScale(init=16.0, growth_interval=3, floor=0.25)
    optimizer = mt.enable_mixed_precision_graph_rewrite(make(), pure)
    trained.compile(optimizer, "mse")
    assert trained.optimizer is optimizer
    halved = tf_keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    losses = trained.fit(X, Y, batch_size=4, verbose=0, callbacks=[halved]).history["loss"]
    assert float(tf_keras.backend.get_value(optimizer.inner_optimizer.learning_rate)) == pytest.approx(0.005)
    plain = model()
    plain.compile(make(), "mse")
    assert losses == plain.fit(X, Y, batch_size=4, verbose=0, callbacks=[halved]).history["loss"]
    assert optimizer.machine() == dataclasses.replace(pure, scale=32.0, good_steps=1)
    assert int(optimizer.iterations.numpy()) == 4
    inner = optimizer.inner_optimizer.variables
    held = [*trained.variables, *(inner() if callable(inner) else inner)]
    before = [variable.numpy() for variable in held]
    trained.fit(np.inf * X, Y, batch_size=2, verbose=0)  # eight steps, each of them skipped
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, held))
    assert float(optimizer.loss_scale) == 0.25  # tf_keras's own stays at 1
    assert (int(optimizer.skipped_steps), bool(optimizer.last_step_skipped)) == (8, True)
    assert int(optimizer.iterations.numpy()) == 4


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file:UserWarning")
@pytest.mark.parametrize(("kind", "name"), [("new", "model.keras"), ("legacy", "model.h5")])
def test_a_saved_model_brings_its_optimizer(kind: str, name: str, tmp_path: Path) -> None:
    trained = model()
    pure = DynamicLossScale(init=1024.0, growth_interval=3)
    optimizer = mt.enable_mixed_precision_graph_rewrite(KINDS[kind][0](), pure)
    trained.compile(optimizer, "mse")
    trained.fit(X, Y, batch_size=4, verbose=0)
    trained.save(tmp_path / name)
    loaded = tf_keras.models.load_model(tmp_path / name).optimizer
    assert type(loaded) is type(optimizer)
    assert type(loaded.inner_optimizer) is type(optimizer.inner_optimizer)
    # Keras 2's files have no room for the state of a legacy loss-scale optimizer, of tf_keras's own neither.
    assert loaded.machine() == (optimizer.machine() if kind == "new" else pure)


@kinds
def test_a_configuration_and_a_call_outside_the_replicas(make: Any, wrapper: Any) -> None:
    config = wrapper(make(), StaticLossScale(8.0)).get_config()
    assert config["loss_scale"] == "8"
    again = wrapper.from_config(config)
    assert (type(again), float(again.loss_scale)) == (wrapper, 8.0)
    assert (again.dynamic, again.initial_scale) == (False, 8.0)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        weight = tf.Variable([1.0])
        optimizer = wrapper(make(), 8)
        optimizer.get_scaled_loss(tf.constant(1.0))
        gradients = optimizer.get_unscaled_gradients([tf.constant([8.0])])
        with pytest.raises(UsageError, match="cross-replica context"):
            optimizer.apply_gradients(zip(gradients, [weight]), experimental_aggregate_gradients=False)
