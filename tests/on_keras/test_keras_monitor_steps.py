"""PrecisionMonitor where a model has a training step of its own, and where a skipped step leaves NaN for good."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
from keras_steps import OwnStep
from keras_steps import records_of as of

import mezzo.keras
from conftest import BACKEND
from mezzo.keras import LossScaleOptimizer, PrecisionMonitor

BATCH, BATCHES = 8, 5
Array = npt.NDArray[Any]


def data() -> tuple[Array, Array]:
    x = np.random.default_rng(0).normal(size=(BATCHES * BATCH, 4)).astype("float32")
    return x, x.sum(1, keepdims=True)


def number(variable: Any) -> int:
    return int(keras.ops.convert_to_numpy(variable.value))


def scaled(initial: float = 2.0**20) -> Any:
    """Its first steps overflow FP16, and later ones do not."""
    return LossScaleOptimizer(keras.optimizers.SGD(1e-3), initial)


@pytest.fixture(autouse=True)
def _float16() -> None:
    keras.config.set_dtype_policy("mixed_float16")


needs_own_step = pytest.mark.skipif(
    BACKEND == "jax", reason="a training step of one's own is stateless on JAX"
)


@needs_own_step
def test_a_step_that_leaves_the_loss_tracker_out_is_counted(tmp_path: Path) -> None:
    net = OwnStep()
    net.compile(scaled(), "mse")
    x, y = data()
    net(x[:1])
    net.optimizer.build(net.trainable_variables)
    monitor = PrecisionMonitor(tmp_path, every=2, verbose=False)
    told: list[float] = []
    teller = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: told.append(logs["loss"]))
    settings = {"batch_size": BATCH, "epochs": 2, "verbose": 0, "validation_data": (x[:8], y[:8])}
    history = net.fit(x, y, callbacks=[monitor, teller], **settings).history
    skipped = number(net.optimizer.skipped_steps)
    assert 0 < skipped < 2 * BATCHES
    updates = of("update", monitor.path)
    assert [one.index for one in updates] == list(range(2 * BATCHES))
    assert sum(one.skipped for one in updates) == skipped == history["skipped_steps"][-1]
    assert history["loss_scale"][-1] == 2.0 ** (20 - skipped)
    assert [one.loss for one in of("loss", monitor.path)] == told
    assert len(told) == 2 * BATCHES
    assert any("training step reports" in note for note in of("end", monitor.path)[0].notes)


class Two(OwnStep):
    def compile(self, first: Any, second: Any) -> None:
        super().compile()
        self.first, self.second = first, second
        for one in (first, second):
            one.build(self.trainable_variables)

    def train_step(self, batch: Any) -> Any:
        self.step_with(self.first, *batch, factor=math.inf)
        return {"loss": self.step_with(self.second, *batch)}


@needs_own_step
def test_optimizers_beside_the_one_of_compile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = Two()
    x, y = data()
    net(x[:1])
    net.compile(scaled(2.0**16), scaled(2.0**4))
    monitor = PrecisionMonitor(tmp_path)
    told: list[set[str]] = []
    teller = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: told.append(set(logs)))
    history = net.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[monitor, teller]).history
    assert told[0] == {"loss"}  # before the first reading it is not known which of them step
    assert number(net.first.skipped_steps) == BATCHES
    assert number(net.second.skipped_steps) == 0
    del history["loss"]
    assert history == {
        "loss_scale_first": [2.0 ** (16 - BATCHES)],
        "skipped_steps_first": [BATCHES],
        "loss_scale_second": [2.0**4],
        "skipped_steps_second": [0],
    }
    updates = of("update", monitor.path)
    assert [(one.optimizer, one.skipped, one.loss_scale) for one in updates] == [
        pair for at in range(BATCHES) for pair in ((0, True, 2.0 ** (16 - at)), (1, False, 2.0**4))
    ]
    # The second one's kept steps say nothing of why the first one's were skipped.
    findings = of("overflow", monitor.path)
    assert {(one.optimizer, one.finding.note) for one in findings} == {(0, "no update after it was kept")}
    assert "loss_scale_first 2048, loss_scale_second 16" in capsys.readouterr().out


def plain() -> Any:
    return keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")])


def test_what_is_done_between_two_epochs_is_not_recorded_as_a_step(tmp_path: Path) -> None:
    net = plain()
    net.compile(scaled(16.0), "mse")
    x, y = data()
    net(x[:1])
    net.optimizer.build(net.trainable_variables)
    (scale,) = (one for one in net.optimizer.variables if one.name == "dynamic_scale")
    monitor = PrecisionMonitor(tmp_path, verbose=False)
    anew = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: scale.assign(4.0))
    net.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[monitor, anew])
    scales = [one.loss_scale for one in of("update", monitor.path)]
    assert scales == [16.0] * BATCHES + [4.0] * BATCHES


@pytest.mark.parametrize(
    ("policy", "scales"), [("mixed_float16", True), ("mixed_float16", False), ("mixed_bfloat16", False)]
)
def test_float16_without_a_loss_scale_is_noted(tmp_path: Path, policy: str, scales: bool) -> None:
    x, y = data()
    keras.config.set_dtype_policy(policy)
    net = plain()
    net.compile(keras.optimizers.SGD(1e-3), "mse", auto_scale_loss=scales)
    monitor = PrecisionMonitor(tmp_path, verbose=False, watch=True)
    history = net.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[monitor]).history
    assert len(of("update", monitor.path)) == len(of("loss", monitor.path)) == BATCHES
    assert ("loss_scale" in history) == scales
    noted = any("without a loss scale" in one for one in of("end", monitor.path)[0].notes)
    assert noted == (policy == "mixed_float16" and not scales)


# Moving statistics that a skipped step has made NaN for good

ROWS = 16


def spoilt() -> tuple[Array, Array]:
    """One row is beyond FP16 in the fourth batch."""
    x = np.random.default_rng(0).normal(size=(ROWS * 6, 8)).astype("float32")
    y = x[:, :1].copy()
    x[3 * ROWS + 2] = 1e5
    return x, y


def normed(policy: str, folder: Path, **options: Any) -> tuple[Any, list[str]]:
    """A model trained on `spoilt()`, and what is noted of its statistics."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    mezzo.keras.set_policy(f"{policy},module.net/head=fp32")
    layers = keras.layers
    first = layers.Dense(8, activation="relu", name="first")
    parts = [first, layers.BatchNormalization(name="norm"), layers.Dense(1, name="head")]
    net = keras.Sequential([layers.Input((8,)), *parts], name="net")
    net.compile(keras.optimizers.Adam(1e-2), "mse")
    monitor = PrecisionMonitor(folder)
    settings = {"batch_size": ROWS, "epochs": 3, "verbose": 0, "shuffle": False, **options}
    net.fit(*spoilt(), callbacks=[monitor], **settings)
    return net, [note for end in of("end", monitor.path) for note in end.notes if "is NaN" in note]


def finite(weights: list[Any]) -> bool:
    return all(np.isfinite(keras.ops.convert_to_numpy(one)).all() for one in weights)


def test_moving_statistics_that_are_lost_are_reported_once_with_what_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = spoilt()
    net, (note,) = normed("fp16", tmp_path, validation_data=(x[:ROWS], y[:ROWS]))
    assert number(net.optimizer.skipped_steps) > 0
    assert finite(net.trainable_variables)
    assert not finite(net.non_trainable_variables)
    for words in ("net/norm/moving_mean", "the end of epoch 1,", "module.net/norm=fp32"):
        assert words in note
    assert capsys.readouterr().out.count(note) == 1
    for policy, helps in (
        ("fp16,module.net/first=fp32,module.net/norm=fp32", True),
        ("bf16", True),
        ("fp16,module.net/norm=fp32", False),  # the layer alone
    ):
        net, notes = normed(policy, tmp_path)
        assert bool(notes) is not helps
        assert finite(net.non_trainable_variables) is helps
