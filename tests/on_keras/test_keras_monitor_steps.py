"""PrecisionMonitor counts the steps that were taken, whoever takes them: training steps of the model's own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest

from conftest import BACKEND
from mezzo.core import records
from mezzo.keras import LossScaleOptimizer, PrecisionMonitor

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


class Own(keras.Model):  # type: ignore[misc]
    """A training step that takes the gradients and applies them itself, and never tells Keras's loss tracker."""

    def __init__(self) -> None:
        super().__init__(name="own")
        self.body = keras.layers.Dense(4, name="body")
        self.head = keras.layers.Dense(1, name="head", dtype="float32")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.body(x))

    def _loss(self, x: Any, y: Any) -> Any:
        return keras.ops.mean((self(x, training=True) - y) ** 2)

    def step_with(self, optimizer: Any, x: Any, y: Any, factor: float = 1.0) -> Any:
        weights = self.trainable_variables
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = self._loss(x, y)
                scaled = _scaled(optimizer, loss) * factor
            optimizer.apply(tape.gradient(scaled, weights), weights)
            return loss
        import torch

        self.zero_grad()
        loss = self._loss(x, y)
        (_scaled(optimizer, loss) * factor).backward()
        with torch.no_grad():
            optimizer.apply([one.value.grad for one in weights], weights)
        return loss

    def jax_step(self, state: Any, batch: Any) -> Any:
        import jax

        weights, others, held, metrics = state
        x, y = batch

        def loss_of(weights: Any, others: Any) -> Any:
            made, others = self.stateless_call(weights, others, x, training=True)
            loss = keras.ops.mean((made - y) ** 2)
            return self.optimizer.stateless_scale_loss(held, loss), (loss, others)

        (_, (loss, others)), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, others)
        weights, held = self.optimizer.stateless_apply(held, gradients, weights)
        return {"loss": loss}, (weights, others, held, metrics)

    def train_step(self, *args: Any) -> Any:
        if BACKEND == "jax":
            return self.jax_step(*args)
        return {"loss": self.step_with(self.optimizer, *args[0])}


def _scaled(optimizer: Any, loss: Any) -> Any:
    return optimizer.scale_loss(loss)


def scaled(initial: float = 2.0**20) -> Any:
    """Its first steps overflow FP16, and later ones do not."""
    return LossScaleOptimizer(keras.optimizers.SGD(1e-3), initial)


@pytest.fixture(autouse=True)
def _float16() -> None:
    keras.config.set_dtype_policy("mixed_float16")


@pytest.mark.every_backend
def test_a_step_that_leaves_the_loss_tracker_out_is_counted(tmp_path: Path) -> None:
    net = Own()
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


@pytest.mark.every_backend
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("own", [True, False])
def test_data_of_unknown_length(tmp_path: Path, own: bool) -> None:
    def batches() -> Iterator[tuple[Array, Array]]:
        x, y = data()
        for start in range(0, len(x), BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]

    net = Own() if own else keras.Sequential([keras.layers.Dense(1, dtype="float32")])
    net.compile(scaled(), "mse")
    net(data()[0][:1])
    net.optimizer.build(net.trainable_variables)
    monitor = PrecisionMonitor(tmp_path, verbose=False)
    net.fit(batches(), verbose=0, shuffle=False, callbacks=[monitor])
    assert [one.index for one in of("update", monitor.path)] == list(range(BATCHES))
    assert len(of("loss", monitor.path)) == BATCHES


class Two(Own):
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
    net = Two()
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
    (note,) = (one for one in of("end", monitor.path)[0].notes if "never stepped" in one)
    assert "first, second" in note
    assert "first: 5 skipped, loss scale 2048; second: 0 skipped, loss scale 16" in capsys.readouterr().out


@pytest.mark.skipif(
    BACKEND == "jax", reason="a compiled step on JAX has the variables of compile's optimizer only"
)
def test_of_two_that_step_the_one_with_a_loss_scale_has_its_name(tmp_path: Path) -> None:
    net = Two()
    x, y = data()
    net(x[:1])
    net.compile(scaled(2.0**16), keras.optimizers.SGD(1e-3))
    monitor = PrecisionMonitor(tmp_path, verbose=False)
    history = net.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[monitor]).history
    assert set(history) == {"loss", "loss_scale_first", "skipped_steps_first"}


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


def test_an_optimizer_that_never_steps_shows_no_loss_scale(tmp_path: Path) -> None:
    class Still(Own):
        def train_step(self, *args: Any) -> Any:
            if BACKEND == "jax":
                return {"loss": keras.ops.mean(args[1][1])}, args[0]
            return {"loss": keras.ops.mean(args[0][1])}

    net = Still()
    net.compile(scaled(), "mse")
    x, y = data()
    monitor = PrecisionMonitor(tmp_path, verbose=False)
    history = net.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[monitor]).history
    assert set(history) == {"loss"}
    assert not of("update", monitor.path)
    assert any("never stepped" in one and "No other" in one for one in of("end", monitor.path)[0].notes)


def test_float16_without_a_loss_scale_is_told(tmp_path: Path) -> None:
    x, y = data()
    for scale_it in (True, False):
        net = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")])
        net.compile(keras.optimizers.SGD(1e-3), "mse", auto_scale_loss=scale_it)
        monitor = PrecisionMonitor(tmp_path, verbose=False)
        net.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[monitor])
        assert len(of("update", monitor.path)) == BATCHES
        told = any("without a loss scale" in one for one in of("end", monitor.path)[0].notes)
        assert told != scale_it


def test_micro_steps_of_gradient_accumulation_count(tmp_path: Path) -> None:
    net = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")])
    inner = keras.optimizers.SGD(1e-3, gradient_accumulation_steps=5)
    net.compile(LossScaleOptimizer(inner, 16.0), "mse")
    x, y = data()
    monitor = PrecisionMonitor(tmp_path, verbose=False)
    net.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[monitor])
    assert [one.moved for one in of("update", monitor.path)] == [True] * BATCHES
