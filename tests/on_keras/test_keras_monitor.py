"""PrecisionMonitor writes what the training did, and the training does what it does without."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
from keras_steps import no_gradients

import mezzo.keras
from conftest import BACKEND
from mezzo.core import records
from mezzo.core.errors import LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import StaticLossScale
from mezzo.keras import LossScaleOptimizer, PrecisionMonitor

BATCH, BATCHES = 8, 10
# On PyTorch Keras's dropout draws from PyTorch's own generator, from which fit's iterator draws too, and
# train_on_batch does not: no loop by hand would have the same numbers.
DROP = 0.0 if BACKEND == "torch" else 0.25
Array = npt.NDArray[Any]
layers = keras.layers


def of(kind: str, path: Path | None) -> list[Any]:
    assert path is not None
    return [record for record in records.read(path) if record.kind == kind]


def data(batches: int = BATCHES) -> tuple[Array, Array]:
    x = np.random.default_rng(0).normal(size=(batches * BATCH, 6)).astype("float32")
    return x, x.sum(1, keepdims=True)


def scaled(initial: float = 2.0**20) -> Any:
    """Its first steps overflow FP16, and later ones do not."""
    return LossScaleOptimizer(keras.optimizers.Adam(0.01), initial)


def model(optimizer: Any, *between: Callable[[], Any], policy: str = "", **compiled: Any) -> Any:
    """Under Keras's mixed_float16, or a policy of Mezzo's."""
    keras.utils.clear_session(free_memory=False)  # forgets the policy
    keras.utils.set_random_seed(0)
    (mezzo.keras.set_policy if policy else keras.config.set_dtype_policy)(policy or "mixed_float16")
    first = layers.Dense(8, activation="relu", name="first")
    head = layers.Dense(1, dtype="float32", name="head")
    found = keras.Sequential([layers.Input((6,)), first, *(make() for make in between), head], name="net")
    found.compile(optimizer, "mse", metrics=["mae"], **compiled)
    return found


def norm() -> Any:
    return layers.BatchNormalization(name="norm")


def disturbed(**compiled: Any) -> Any:
    """All that a look could disturb: moving statistics, seeds, a loss scale that overflows."""
    return model(scaled(), norm, lambda: layers.Dropout(DROP, name="drop"), **compiled)


def fit(net: Any, callbacks: Sequence[Any], given: tuple[Array, Array] | None = None, **options: Any) -> Any:
    x, y = given or data()
    settings = {"batch_size": BATCH, "verbose": 0, "shuffle": False, **options}
    return net.fit(x, y, callbacks=list(callbacks), **settings).history


def values(net: Any) -> list[Array]:
    return [keras.ops.convert_to_numpy(one).copy() for one in net.variables + net.optimizer.variables]


def same(left: Sequence[Array], right: Sequence[Array]) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(left, right, strict=True))


class Seen(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two epochs of ten batches with a validation, in three ways: alone, watched, and batch by batch."""
    x, y = data()
    options = {"epochs": 2, "validation_data": (x[:16], y[:16])}
    alone = disturbed()
    history = fit(alone, [], **options)
    assert not hasattr(alone.optimizer.inner_optimizer, "inner_optimizer")  # compile wraps no second time
    net, seen = disturbed(), Seen()
    monitor = PrecisionMonitor(tmp_path_factory.mktemp("mezzo") / "run", every=3)
    watched_history = fit(net, [monitor, seen], **options)
    by_hand, losses, kernels = disturbed(), [], []
    for _ in range(2):
        for start in range(0, len(x), BATCH):
            kernels.append(keras.ops.convert_to_numpy(by_hand.layers[0].kernel).copy())
            given = x[start : start + BATCH], y[start : start + BATCH]
            losses.append(by_hand.train_on_batch(*given, return_dict=True)["loss"])
    weights, histories = (values(alone), values(net)), (history, watched_history)
    told = {"logs": seen.logs, "losses": losses, "kernels": kernels, "path": monitor.path}
    return {"weights": weights, "histories": histories, **told}


@pytest.mark.every_backend
def test_a_watched_training_is_the_same_to_the_bit(watched: dict[str, Any]) -> None:
    assert same(*watched["weights"])
    alone, history = watched["histories"]
    assert alone.items() <= history.items()


def test_logs_have_the_loss_scale_and_the_skipped_steps(watched: dict[str, Any]) -> None:
    updates = of("update", watched["path"])
    by_epoch = [sum(one.skipped for one in updates[:count]) for count in (BATCHES, 2 * BATCHES)]
    _, history = watched["histories"]
    assert history["skipped_steps"] == by_epoch
    assert 0 < by_epoch[0] < BATCHES
    assert history["loss_scale"][-1] == 2.0**20 / 2 ** by_epoch[1]
    assert watched["logs"][6]["loss_scale"] <= updates[3].loss_scale  # not older than `every` batches


@pytest.mark.every_backend
def test_records_are_those_of_a_loop_by_hand(watched: dict[str, Any]) -> None:
    path = watched["path"]
    assert [one.loss for one in of("loss", path)] == watched["losses"]
    updates, scale = of("update", path), 2.0**20
    assert [one.index for one in updates] == list(range(2 * BATCHES))
    for one, before, after in zip(updates, watched["kernels"], watched["kernels"][1:]):
        assert one.loss_scale == scale
        assert one.skipped is np.array_equal(before, after) is not one.moved
        assert ("not finite" in one.reason) == one.skipped
        scale = scale / 2 if one.skipped else scale
    found = of("overflow", path)
    assert [one.update for one in found] == [one.index for one in updates if one.skipped]
    for one in found:
        held = next(after.loss_scale for after in updates[one.update :] if not after.skipped)
        assert one.finding.cause == "loss scale"
        assert one.finding.module in ("net/first", "net/norm", "net/head")
        assert f"{held:.6g}" in one.finding.note
        assert one.finding.propagators[0].startswith(one.finding.module)
        assert any("dynamic_growth_steps" in remedy for remedy in one.finding.remedies)
    started, ended = of("run", path)[0], of("end", path)[0]
    assert started.policy == "fp16,loss_scale=dynamic(init=1048576),module.net/head=fp32"
    assert started.machine["backend"].startswith(BACKEND)
    assert (ended.status, ended.notes) == (0, [])


def test_a_loss_that_is_infinite_hides_no_other(tmp_path: Path) -> None:
    x, y = data()
    y[2 * BATCH] = 1e30  # its square is beyond FP32
    monitor = PrecisionMonitor(tmp_path, verbose=False)
    history = fit(model(keras.optimizers.SGD(0.01)), [monitor], (x, y))
    losses = [one.loss for one in of("loss", monitor.path)]
    assert not np.isfinite(history["loss"][-1])  # what Keras has to say of the epoch
    assert [bool(np.isfinite(one)) for one in losses] == [True, True, False] + [True] * 7
    finding = next(one.finding for one in of("overflow", monitor.path) if one.update == 2)
    assert (finding.cause, finding.module) == ("loss", "")
    assert "the loss was inf" in finding.note


class Break(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 5:
            raise KeyboardInterrupt


def test_files_are_never_overwritten_and_breaking_off_keeps_what_was(tmp_path: Path) -> None:
    net, monitor = model(scaled()), PrecisionMonitor(tmp_path, every=4, verbose=False)
    with pytest.raises(KeyboardInterrupt):
        fit(net, [monitor, Break()])
    first = monitor.path
    fit(net, [monitor])
    net.save(tmp_path / "net.keras")
    assert same(keras.saving.load_model(tmp_path / "net.keras").get_weights(), net.get_weights())
    assert monitor.path == tmp_path / "runs" / "fit002.jsonl"
    assert len(of("loss", first)) == len(of("update", first)) == 5
    assert len(of("update", monitor.path)) == BATCHES
    assert not of("end", first)


@pytest.mark.skipif(BACKEND == "torch", reason="Keras has no steps_per_execution on PyTorch")
def test_several_steps_in_one_execution(tmp_path: Path, watched: dict[str, Any]) -> None:
    monitor = PrecisionMonitor(tmp_path, every=3, verbose=False)
    history = fit(disturbed(steps_per_execution=4), [monitor])  # 4, 4 and 2
    losses = [one.loss for one in of("loss", monitor.path)]
    assert losses == pytest.approx(watched["losses"][:BATCHES], rel=1e-4)
    skipped = sum(one.skipped for one in of("update", watched["path"])[:BATCHES])
    assert [one.index for one in of("update", monitor.path)] == list(range(BATCHES))
    assert sum(one.skipped for one in of("update", monitor.path)) == skipped
    assert history["skipped_steps"] == [skipped]


@pytest.mark.every_backend
def test_keras_own_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inner = keras.optimizers.SGD(0.0)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, 2.0**13, dynamic_growth_steps=3)
    monitor = PrecisionMonitor(tmp_path)
    history = fit(model(optimizer), [monitor])
    updates = of("update", monitor.path)
    for before, after in itertools.pairwise(updates):
        change = after.loss_scale / before.loss_scale
        assert change == 0.5 if before.skipped else change in (1.0, 2.0)
    assert any(after.loss_scale > before.loss_scale for before, after in itertools.pairwise(updates))
    assert history["skipped_steps"] == [sum(one.skipped for one in updates)]
    (said,) = capsys.readouterr().out.splitlines()
    assert f"mezzo report {tmp_path}" in said


@pytest.mark.every_backend
def test_a_collapse_comes_out_of_fit(tmp_path: Path) -> None:
    scale = StaticLossScale(2.0**60, patience=3)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01), loss_scale=scale)
    monitor, seen = PrecisionMonitor(tmp_path, every=4, verbose=False), Seen()
    with pytest.raises(Exception, match=r"(?s)loss scale|patience|not finite") as caught:
        fit(model(optimizer), [monitor, seen])
    assert len(seen.logs) < BATCHES
    if BACKEND == "jax":  # where the optimizer can't look while it trains
        assert caught.type is LossScaleCollapseError
        assert of("end", monitor.path)[0].status == 1


def test_bad_arguments() -> None:
    for given, told in (
        ({"folder": ""}, "folder must be"),
        ({"every": 0}, "every=0"),
        ({"watch": True}, r"'watch'.* was removed.*mezzo\.MixedPrecision"),
        ({"probe": (1, 2)}, "'probe'.* was removed"),
    ):
        with pytest.raises(UsageError, match=told):
            PrecisionMonitor(**given)


@pytest.mark.parametrize("policy", ["fp16", "bf16"])
def test_float16_without_a_loss_scale_is_noted(tmp_path: Path, policy: str) -> None:
    monitor = PrecisionMonitor(tmp_path, verbose=False)
    history = fit(model(keras.optimizers.SGD(1e-3), policy=policy, auto_scale_loss=False), [monitor])
    assert len(of("update", monitor.path)) == len(of("loss", monitor.path)) == BATCHES
    assert "loss_scale" not in history
    notes = " ".join(of("end", monitor.path)[0].notes)
    assert ("has no loss scale" in notes and "LossScaleOptimizer(SGD" in notes) == (policy == "fp16")


STEPS = 5
needs_own_step = pytest.mark.skipif(BACKEND == "jax", reason="an own training step is stateless on JAX")


class Two(keras.Model):  # type: ignore[misc]
    """Takes the gradients and applies them itself, with two optimizers, one of which always overflows."""

    def __init__(self) -> None:
        super().__init__(name="net")
        self.body = layers.Dense(4, name="body")
        self.head = layers.Dense(1, name="head", dtype="float32")

    def compile(self, first: Any, second: Any) -> None:
        super().compile()
        self.first, self.second = first, second
        for one in (first, second):
            one.build(self.trainable_variables)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.body(x))

    def step_with(self, optimizer: Any, x: Any, y: Any, factor: float = 1.0) -> Any:
        weights = self.trainable_variables

        def scaled_loss() -> tuple[Any, Any]:
            loss = keras.ops.mean((keras.ops.cast(self(x, training=True), "float32") - y) ** 2)
            return loss, optimizer.scale_loss(loss) * factor

        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss, scaled = scaled_loss()
            optimizer.apply(tape.gradient(scaled, [weight.value for weight in weights]), weights)
            return loss
        self.zero_grad()
        loss, scaled = scaled_loss()
        scaled.backward()
        with no_gradients():
            optimizer.apply([weight.value.grad for weight in weights], weights)
        return loss.detach()

    def train_step(self, batch: Any) -> Any:
        self.step_with(self.first, *batch, factor=math.inf)
        return {"loss": self.step_with(self.second, *batch)}


@needs_own_step
def test_optimizers_beside_the_one_of_compile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keras.config.set_dtype_policy("mixed_float16")
    net, given = Two(), data(STEPS)
    net(given[0][:1])
    net.compile(scaled(2.0**16), scaled(2.0**4))
    monitor, seen = PrecisionMonitor(tmp_path), Seen()
    history = fit(net, [monitor, seen], given)
    assert set(seen.logs[0]) == {"loss"}  # before the first reading it is not known which of them step
    assert (int(net.first.skipped_steps), int(net.second.skipped_steps)) == (STEPS, 0)
    del history["loss"]
    assert history == {
        "loss_scale_first": [2.0 ** (16 - STEPS)],
        "skipped_steps_first": [STEPS],
        "loss_scale_second": [2.0**4],
        "skipped_steps_second": [0],
    }
    updates = of("update", monitor.path)
    assert [(one.optimizer, one.skipped, one.loss_scale) for one in updates] == [
        pair for at in range(STEPS) for pair in ((0, True, 2.0 ** (16 - at)), (1, False, 2.0**4))
    ]
    # The second one's kept steps say nothing of why the first one's were skipped.
    findings = of("overflow", monitor.path)
    assert {(one.optimizer, one.finding.note) for one in findings} == {(0, "no later update was taken")}
    assert "loss_scale_first 2048, loss_scale_second 16" in capsys.readouterr().out


# Moving statistics that a skipped step has made NaN for good


def normed(policy: str, folder: Path, **options: Any) -> tuple[Any, list[str]]:
    """A model trained with one row beyond FP16 in the fourth batch, and what is noted of its statistics."""
    net = model(keras.optimizers.Adam(1e-2), norm, policy=policy)
    x, y = data()
    x[3 * BATCH + 2] = 1e5
    monitor = PrecisionMonitor(folder)
    fit(net, [monitor], (x, y), epochs=3, **options)
    return net, [note for end in of("end", monitor.path) for note in end.notes if "is NaN" in note]


def finite(weights: list[Any]) -> bool:
    return all(np.isfinite(keras.ops.convert_to_numpy(one)).all() for one in weights)


def test_lost_moving_statistics_are_reported_once_with_what_helps(tmp_path: Path, capsys: Any) -> None:
    net, (note,) = normed("fp16", tmp_path, validation_data=data(2))
    assert int(net.optimizer.skipped_steps) > 0
    assert finite(net.trainable_variables)
    assert not finite(net.non_trainable_variables)
    for words in ("net/norm/moving_", "the end of epoch 1 ", "module.net/norm=fp32"):
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
