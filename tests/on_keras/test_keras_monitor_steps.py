"""PrecisionMonitor where a model has a training step of its own, and where a skipped step leaves NaN for good."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
from keras_steps import OwnStep

import mezzo.keras
from conftest import BACKEND
from mezzo.core import records
from mezzo.keras import LossScaleOptimizer, PrecisionMonitor
from mezzo.keras.callback import lost_statistics

BATCH, BATCHES = 8, 5
Array = npt.NDArray[Any]


def data() -> tuple[Array, Array]:
    x = np.random.default_rng(0).normal(size=(BATCHES * BATCH, 4)).astype("float32")
    return x, x.sum(1, keepdims=True)


def of(kind: str, path: Path | None) -> list[Any]:
    assert path is not None
    return [record for record in records.read(path) if record.kind == kind]


def number(variable: Any) -> int:
    return int(keras.ops.convert_to_numpy(variable.value))


def scaled(initial: float = 2.0**20) -> Any:
    """Its first steps overflow FP16, and later ones do not."""
    return LossScaleOptimizer(keras.optimizers.SGD(1e-3), initial)


@pytest.fixture(autouse=True)
def _float16() -> Iterator[None]:
    keras.config.set_dtype_policy("mixed_float16")
    yield
    mezzo.keras.set_policy("fp32")


@pytest.mark.every_backend
def test_a_step_that_leaves_the_loss_tracker_out_is_counted(tmp_path: Path) -> None:
    net = OwnStep(dtype="float32")
    net.compile(scaled(), "mse")
    x, y = data()
    net(x[:1])
    net.optimizer.build(net.trainable_variables)
    monitor = PrecisionMonitor(tmp_path, every=2, verbose=False)
    told: list[float] = []
    teller = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: told.append(logs["loss"]))
    history = net.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=2,
        verbose=0,
        callbacks=[monitor, teller],
        validation_data=(x[:8], y[:8]),
    ).history
    skipped = number(net.optimizer.skipped_steps)
    assert 0 < skipped < 2 * BATCHES
    updates = of("update", monitor.path)
    assert [one.index for one in updates] == list(range(2 * BATCHES))
    assert sum(one.skipped for one in updates) == skipped == history["skipped_steps"][-1]
    assert history["loss_scale"][-1] == 2.0 ** (20 - skipped)
    losses = of("loss", monitor.path)
    assert len(losses) == 2 * BATCHES
    assert [one.loss for one in losses] == told
    assert ["training step reports" in note for note in of("end", monitor.path)[0].notes] == [True]


class Two(OwnStep):
    def compile(self, first: Any, second: Any) -> None:
        super().compile()
        self.first, self.second = first, second
        for one in (first, second):
            one.build(self.trainable_variables)

    def train_step(self, batch: Any) -> Any:
        self.step_with(self.first, *batch, factor=math.inf)
        return {"loss": self.step_with(self.second, *batch)}


@pytest.mark.skipif(
    BACKEND == "jax", reason="a compiled step on JAX has the variables of compile's optimizer only"
)
def test_optimizers_beside_the_one_of_compile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = Two(dtype="float32")
    x, y = data()
    net(x[:1])
    net.compile(scaled(2.0**16), scaled(2.0**4))
    monitor = PrecisionMonitor(tmp_path)
    told: list[set[str]] = []
    teller = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: told.append(set(logs)))
    history = net.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[monitor, teller]).history
    assert told[0] == {"loss"}  # before the first reading nobody knows which of them step
    assert number(net.first.skipped_steps) == BATCHES
    assert number(net.second.skipped_steps) == 0
    assert {name for name in history if name != "loss"} == {
        *("loss_scale_first", "loss_scale_second", "skipped_steps_first", "skipped_steps_second")
    }
    assert history["skipped_steps_first"] == [BATCHES]
    assert history["loss_scale_first"] == [2.0 ** (16 - BATCHES)]
    assert history["skipped_steps_second"] == [0]
    updates = of("update", monitor.path)
    assert [(one.optimizer, one.skipped, one.loss_scale) for one in updates] == [
        pair for at in range(BATCHES) for pair in ((0, True, 2.0 ** (16 - at)), (1, False, 2.0**4))
    ]
    # The second one's kept steps say nothing of why the first one's were skipped.
    findings = of("overflow", monitor.path)
    assert {(one.optimizer, one.finding.note) for one in findings} == {(0, "no update after it was kept")}
    assert "loss_scale_first 2048, loss_scale_second 16" in capsys.readouterr().out


def test_what_is_done_between_two_epochs_is_no_steps_doing(tmp_path: Path) -> None:
    net = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")])
    net.compile(scaled(16.0), "mse")
    x, y = data()
    net(x[:1])
    net.optimizer.build(net.trainable_variables)

    class Anew(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            variable = next(one for one in net.optimizer.variables if one.name == "dynamic_scale")
            variable.assign(4.0)

    monitor = PrecisionMonitor(tmp_path, verbose=False)
    net.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[monitor, Anew()])
    scales = [one.loss_scale for one in of("update", monitor.path)]
    assert scales == [16.0] * BATCHES + [4.0] * BATCHES


@pytest.mark.parametrize(
    ("policy", "scales"), [("mixed_float16", True), ("mixed_float16", False), ("mixed_bfloat16", False)]
)
def test_float16_without_a_loss_scale_is_noted(tmp_path: Path, policy: str, scales: bool) -> None:
    x, y = data()
    keras.config.set_dtype_policy(policy)
    net = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")])
    net.compile(keras.optimizers.SGD(1e-3), "mse", auto_scale_loss=scales)
    monitor = PrecisionMonitor(tmp_path, verbose=False, watch=True)
    history = net.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[monitor]).history
    assert len(of("update", monitor.path)) == len(of("loss", monitor.path)) == BATCHES
    assert ("loss_scale" in history) == scales
    noted = any("without a loss scale" in one for one in of("end", monitor.path)[0].notes)
    assert noted == (policy == "mixed_float16" and not scales)


# Moving statistics that a skipped step has made NaN for good

ROWS = 16


def spoilt(row: float = 1e5) -> tuple[Array, Array]:
    """One row is beyond FP16 in the fourth batch."""
    x = np.random.default_rng(0).normal(size=(ROWS * 6, 8)).astype("float32")
    y = x[:, :1].copy()
    x[3 * ROWS + 2] = row
    return x, y


def normed(policy: str = "fp16", middle: Any = None) -> Any:
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
        if "is NaN" in note
    ]


def watched(net: Any, folder: Path, given: tuple[Array, Array], **options: Any) -> PrecisionMonitor:
    monitor = PrecisionMonitor(folder)
    settings = {"batch_size": ROWS, "epochs": 3, "verbose": 0, "shuffle": False, **options}
    net.fit(*given, callbacks=[monitor], **settings)
    return monitor


def finite(net: Any) -> bool:
    return all(np.isfinite(keras.ops.convert_to_numpy(one)).all() for one in net.non_trainable_variables)


def test_moving_statistics_that_are_lost_are_reported_once_with_what_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = spoilt()
    net = normed()
    monitor = watched(net, tmp_path, (x, y), validation_data=(x[:ROWS], y[:ROWS]))
    assert number(net.optimizer.skipped_steps) > 0
    weights = (keras.ops.convert_to_numpy(one) for one in net.trainable_variables)
    assert all(np.isfinite(one).all() for one in weights)
    assert not finite(net)
    (note,) = notes(monitor)
    for words in ("net/norm/moving_mean (and 1 more)", "the end of epoch 1,", "module.net/norm=fp32"):
        assert words in note
    assert [line for line in capsys.readouterr().out.splitlines() if "moving_mean" in line] == [
        f"mezzo: {note}."
    ]
    for policy, helps in (
        ("fp16,module.net/first=fp32,module.net/norm=fp32", True),
        ("bf16", True),
        ("fp16,module.net/norm=fp32", False),  # the layer alone
    ):
        net = normed(policy)
        assert bool(notes(watched(net, tmp_path, spoilt()))) is not helps
        assert finite(net) is helps


class Masked(keras.layers.Layer):  # type: ignore[misc]
    """Holds a constant that is infinite in places, and whole numbers."""

    def build(self, shape: Any) -> None:
        self.mask = self.add_weight(shape=(2,), trainable=False, name="mask", initializer="zeros")
        self.seen = self.add_weight(shape=(), trainable=False, dtype="int32", initializer="zeros")

    def call(self, x: Any) -> Any:
        return x


def test_a_mask_of_infinities_is_not_reported_and_a_nan_in_it_is() -> None:
    net = normed(middle=Masked(name="masked"))
    net.layers[1].mask.assign([0.0, -math.inf])
    assert lost_statistics(net) == []
    net.layers[1].mask.assign([math.nan, -math.inf])
    assert lost_statistics(net) == ["net/masked/mask"]
