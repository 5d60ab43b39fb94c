"""PrecisionMonitor tells of moving statistics that a skipped step has made NaN for good."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest

import mezzo.keras
from conftest import BACKEND
from mezzo.core import records
from mezzo.keras import PrecisionMonitor
from mezzo.keras.callback import not_finite

Array = npt.NDArray[Any]
BATCH, BATCHES = 16, 6


@pytest.fixture(autouse=True)
def _one_policy() -> Any:
    yield
    mezzo.keras.set_policy("fp32")


def data(row: float = 1e5) -> tuple[Array, Array]:
    """One row is beyond FP16 in the fourth batch."""
    x = np.random.default_rng(0).normal(size=(BATCH * BATCHES, 8)).astype("float32")
    y = x[:, :1].copy()
    x[3 * BATCH + 2] = row
    return x, y


def model(policy: str = "fp16", middle: Any = None) -> Any:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    mezzo.keras.set_policy(f"{policy},module.net/head=fp32")
    layers = keras.layers
    middle = middle or layers.BatchNormalization(name="norm")
    parts = [layers.Dense(8, activation="relu", name="first"), middle, layers.Dense(1, name="head")]
    net = keras.Sequential([layers.Input((8,)), *parts], name="net")
    net.compile(keras.optimizers.Adam(1e-2), "mse")
    return net


def notes(monitor: PrecisionMonitor) -> list[str]:
    assert monitor.path is not None
    return [
        note
        for record in records.read(monitor.path)
        if record.kind == "end"
        for note in record.notes
        if "NaN or infinite" in note
    ]


def watched(net: Any, folder: Path, given: tuple[Array, Array], **options: Any) -> PrecisionMonitor:
    monitor = PrecisionMonitor(folder)
    settings = {"batch_size": BATCH, "epochs": 3, "verbose": 0, "shuffle": False, **options}
    net.fit(*given, callbacks=[monitor], **settings)
    return monitor


def finite(net: Any) -> bool:
    return all(np.isfinite(keras.ops.convert_to_numpy(one)).all() for one in net.non_trainable_variables)


@pytest.mark.parametrize("validates", [True, False])
def test_moving_statistics_that_are_lost_are_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], validates: bool
) -> None:
    x, y = data()
    net = model()
    more = {"validation_data": (x[:BATCH], y[:BATCH])} if validates else {}
    monitor = watched(net, tmp_path, (x, y), **more)
    assert int(keras.ops.convert_to_numpy(net.optimizer.skipped_steps)) > 0
    weights = (keras.ops.convert_to_numpy(one) for one in net.trainable_variables)
    assert all(np.isfinite(one).all() for one in weights)
    assert not finite(net)
    (note,) = notes(monitor)
    for words in ("net/norm/moving_mean (as 1 more variable)", "the end of epoch 1,", "module.net/norm=fp32"):
        assert words in note
    said = [line for line in capsys.readouterr().out.splitlines() if "moving_mean" in line]
    assert said == [f"mezzo: {note}."]
    # Of a fit that begins with them as of the one that made them.
    assert len(notes(watched(net, tmp_path, data(1.0), epochs=2))) == 1


def test_the_epoch_is_the_one_in_which_it_happened(tmp_path: Path) -> None:
    net, given = model(), data(1.0)
    layer = net.layers[1]

    class Break(keras.callbacks.Callback):  # type: ignore[misc]
        """What a batch would do, which can't be done to a variable in the middle of a JAX epoch."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                layer.moving_variance.assign(np.full((8,), math.inf, "float32"))

    monitor = PrecisionMonitor(tmp_path, verbose=False)
    settings = {"batch_size": BATCH, "epochs": 3, "verbose": 0, "shuffle": False}
    net.fit(*given, callbacks=[monitor, Break()], **settings)
    (note,) = notes(monitor)
    assert note.startswith("net/norm/moving_variance is NaN or infinite at the end of epoch 2,")


def test_the_remedy_that_is_told_holds_and_the_layer_alone_does_not(tmp_path: Path) -> None:
    both = model("fp16,module.net/first=fp32,module.net/norm=fp32")
    assert not notes(watched(both, tmp_path, data()))
    assert finite(both)
    narrow = model("bf16")
    assert not notes(watched(narrow, tmp_path, data()))
    assert finite(narrow)
    alone = model("fp16,module.net/norm=fp32")
    assert notes(watched(alone, tmp_path, data()))
    assert not finite(alone)


def test_a_training_that_loses_nothing_has_no_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = model()
    assert not notes(watched(net, tmp_path, data(1.0)))
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert not_finite(net) == []


class Masked(keras.layers.Layer):  # type: ignore[misc]
    """Adds a constant that is infinite in places, and holds whole numbers as well."""

    def build(self, shape: Any) -> None:
        self.mask = self.add_weight(shape=(2,), trainable=False, name="mask", initializer="zeros")
        self.seen = self.add_weight(
            shape=(), trainable=False, name="seen", dtype="int32", initializer="zeros"
        )

    def call(self, x: Any) -> Any:
        return x


def test_a_mask_of_infinities_is_not_told_and_a_nan_in_it_is(tmp_path: Path) -> None:
    net = model(middle=Masked(name="masked"))
    net.layers[1].mask.assign([0.0, -math.inf])
    assert not notes(watched(net, tmp_path, data(1.0)))
    assert [(one.path, is_nan) for one, is_nan in not_finite(net)] == [("net/masked/mask", False)]
    net.layers[1].mask.assign([math.nan, -math.inf])
    assert [is_nan for _, is_nan in not_finite(net)] == [True]
    (note,) = notes(watched(net, tmp_path, data(1.0)))
    assert note.startswith("net/masked/mask is NaN")


REPLICAS = """
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras, math
from mezzo.keras.callback import not_finite

with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    net = keras.Sequential([keras.layers.Input((2,)), keras.layers.BatchNormalization(name="norm")], name="net")
assert not_finite(net) == []
mean, variance = net.non_trainable_variables
mean.value.values[1].assign([math.nan, 0.0])
variance.value.values[0].assign([math.inf, 0.0])
print([(one.path, is_nan) for one, is_nan in not_finite(net)])
"""


@pytest.mark.skipif(BACKEND != "tensorflow", reason="the replicas of a TensorFlow strategy")
def test_every_replica_is_looked_at() -> None:
    done = subprocess.run([sys.executable, "-c", REPLICAS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.splitlines()[-1]
        == "[('net/norm/moving_mean', True), ('net/norm/moving_variance', False)]"
    )
