"""PrecisionMonitor writes what the training did, and the training does what it does without."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
from keras_steps import records_of as of

from conftest import BACKEND
from mezzo.core.errors import LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import StaticLossScale
from mezzo.core.ranges import BINS, NAN, ZERO, Histogram
from mezzo.keras import LossScaleOptimizer, PrecisionMonitor
from mezzo.keras.callback import histogram, ratios

BATCH, BATCHES = 8, 10
# On PyTorch Keras's dropout draws from PyTorch's own generator, from which fit's iterator draws too, and
# train_on_batch does not: no loop by hand would have the same numbers.
DROP = 0.0 if BACKEND == "torch" else 0.25
Array = npt.NDArray[Any]


def data(batches: int = BATCHES) -> tuple[Array, Array]:
    x = np.random.default_rng(0).normal(size=(batches * BATCH, 6)).astype("float32")
    return x, x.sum(1, keepdims=True)


def model(optimizer: Any = None, plain: bool = False, **compiled: Any) -> Any:
    """Unless `plain`, everything that a look could disturb: moving statistics, seeds, a loss scale that overflows."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    layers = keras.layers
    between = [] if plain else [layers.BatchNormalization(name="norm"), layers.Dropout(DROP, name="drop")]
    first = layers.Dense(8, activation="relu", name="first")
    head = layers.Dense(1, dtype="float32", name="head")
    found = keras.Sequential([layers.Input((6,)), first, *between, head], name="net")
    if optimizer is None:
        optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.01), 2.0**20)
    found.compile(optimizer, "mse", metrics=["mae"], **compiled)
    return found


def fit(net: Any, callbacks: Sequence[Any], given: tuple[Array, Array] | None = None, **options: Any) -> Any:
    x, y = given or data()
    settings = {"batch_size": BATCH, "verbose": 0, "shuffle": False, **options}
    return net.fit(x, y, callbacks=list(callbacks), **settings).history


def values(net: Any) -> list[Array]:
    return [keras.ops.convert_to_numpy(one).copy() for one in net.variables + net.optimizer.variables]


def same(left: Sequence[Array], right: Sequence[Array]) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(left, right, strict=True))


class Seen(keras.callbacks.Callback):  # type: ignore[misc]
    """The first layer's kernel before each batch, and what each batch's logs say."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Array] = []
        self.logs: list[dict[str, float]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        kernel, state = self.model.layers[0].kernel, getattr(self.model, "_jax_state", None)
        value = state["trainable_variables"][0] if state and batch else kernel.value  # JAX's trainer holds it
        self.kernels.append(keras.ops.convert_to_numpy(value).copy())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two epochs of ten batches with a validation, in three ways: alone, watched, and batch by batch."""
    x, y = data()
    options = {"epochs": 2, "validation_data": (x[:16], y[:16])}
    alone = model()
    history = fit(alone, [], **options)
    net, seen = model(), Seen()
    monitor = PrecisionMonitor(tmp_path_factory.mktemp("mezzo") / "run", watch=4, every=3)
    watched_history = fit(net, [monitor, seen], **options)
    by_hand, losses, kernels = model(), [], []
    for _ in range(2):
        for start in range(0, len(x), BATCH):
            kernels.append(keras.ops.convert_to_numpy(by_hand.layers[0].kernel).copy())
            given = x[start : start + BATCH], y[start : start + BATCH]
            losses.append(by_hand.train_on_batch(*given, return_dict=True)["loss"])
    found = {"alone": values(alone), "history": history, "losses": losses, "kernels": kernels}
    return {
        **found,
        "watched": values(net),
        "watched history": watched_history,
        "monitor": monitor,
        "seen": seen,
    }


@pytest.mark.every_backend
def test_a_watched_training_is_the_same_to_the_bit(watched: dict[str, Any]) -> None:
    assert same(watched["alone"], watched["watched"])
    for name, values_of in watched["history"].items():
        assert watched["watched history"][name] == values_of


def test_logs_have_the_loss_scale_and_the_skipped_steps(watched: dict[str, Any]) -> None:
    updates = of("update", watched["monitor"].path)
    by_epoch = [sum(one.skipped for one in updates[:count]) for count in (BATCHES, 2 * BATCHES)]
    assert watched["watched history"]["skipped_steps"] == by_epoch
    assert 0 < by_epoch[0] < BATCHES
    assert watched["watched history"]["loss_scale"][-1] == 2.0**20 / 2 ** by_epoch[1]
    assert watched["seen"].logs[6]["loss_scale"] <= updates[3].loss_scale  # not older than `every` batches


@pytest.mark.every_backend
def test_records_are_those_of_a_loop_by_hand(watched: dict[str, Any]) -> None:
    path = watched["monitor"].path
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


@pytest.mark.every_backend
def test_ranges_are_of_every_fourth_update(watched: dict[str, Any]) -> None:
    path = watched["monitor"].path
    found, updates = of("ranges", path), of("update", path)
    assert [one.update for one in found] == [0, 4, 8, 12, 16]
    for one in found:
        update = updates[one.update]
        assert one.loss_scale == update.loss_scale
        what = Counter(row.what for row in one.rows)
        assert dict(what) == {"weight": 6, **({} if update.skipped else {"update ratio": 6})}
        before, after = watched["kernels"][one.update : one.update + 2]
        expected = {"weight": histogram(before), "update ratio": histogram(ratios(before, after))}
        for row in one.rows:
            if (row.module, row.name) == ("net/first", "kernel"):
                assert (row.format, row.histogram) == ("fp32", expected[row.what])


def test_a_loss_that_is_infinite_hides_no_other(tmp_path: Path) -> None:
    x, y = data()
    y[2 * BATCH] = 1e30  # its square is beyond FP32
    monitor = PrecisionMonitor(tmp_path, verbose=False)
    history = fit(model(keras.optimizers.SGD(0.01), plain=True), [monitor], (x, y))
    losses = [one.loss for one in of("loss", monitor.path)]
    assert not np.isfinite(history["loss"][-1])  # what Keras has to say of the epoch
    assert [bool(np.isfinite(one)) for one in losses] == [True, True, False] + [True] * 7
    finding = next(one.finding for one in of("overflow", monitor.path) if one.update == 2)
    assert (finding.cause, finding.module) == ("loss", "")
    assert "the loss was inf" in finding.note


def test_files_are_never_overwritten_and_breaking_off_keeps_what_was(tmp_path: Path) -> None:
    class Break(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 5:
                raise KeyboardInterrupt

    net, monitor = model(plain=True), PrecisionMonitor(tmp_path, every=4, verbose=False)
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
    monitor = PrecisionMonitor(tmp_path, watch=8, every=3, verbose=False)
    history = fit(model(steps_per_execution=4), [monitor])  # 4, 4 and 2
    losses = [one.loss for one in of("loss", monitor.path)]
    assert losses == pytest.approx(watched["losses"][:BATCHES], rel=1e-4)
    skipped = sum(one.skipped for one in of("update", watched["monitor"].path)[:BATCHES])
    assert [one.index for one in of("update", monitor.path)] == list(range(BATCHES))
    assert sum(one.skipped for one in of("update", monitor.path)) == skipped
    assert history["skipped_steps"] == [skipped]
    assert [one.update for one in of("ranges", monitor.path)] == [0, 8]
    assert {row.what for one in of("ranges", monitor.path) for row in one.rows} == {"weight"}


@pytest.mark.every_backend
def test_keras_own_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.0), 2.0**13, dynamic_growth_steps=3
    )
    monitor = PrecisionMonitor(tmp_path)
    history = fit(model(optimizer, plain=True), [monitor])
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
    optimizer = LossScaleOptimizer(
        keras.optimizers.SGD(0.01), loss_scale=StaticLossScale(2.0**60, patience=3)
    )
    monitor = PrecisionMonitor(tmp_path, every=4, verbose=False)
    seen = Seen()
    with pytest.raises(Exception, match=r"(?s)loss scale|patience|not finite") as caught:
        fit(model(optimizer, plain=True), [monitor, seen])
    assert len(seen.kernels) < BATCHES
    if BACKEND == "jax":  # where the optimizer can't look while it trains
        assert caught.type is LossScaleCollapseError
        assert of("end", monitor.path)[0].status == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"folder": ""}, "give a folder"),
        ({"watch": 2.5}, r"watch=2\.5"),
        ({"every": 0}, "every=0"),
        ({"probe": (1, 2)}, r"probe=.* was removed.*watch="),
    ],
    ids=str,
)
def test_bad_arguments(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        PrecisionMonitor(**given)


def test_exponents_are_counted_by_the_definition() -> None:
    special = np.array([0, -0.0, 1, 1.5, -3.4e38, 1e-45, math.inf, -math.inf, math.nan, 2**-126], "float32")
    for numbers in (special, np.zeros((0, 4), "float32")):
        sizes = [abs(number) for number in numbers.ravel().tolist()]
        bins = [0] * BINS
        for size in sizes:
            exponent = max(0, math.frexp(size)[1] - 1 + 127) if 0 < size < math.inf else ZERO
            bins[255 if math.isinf(size) else NAN if math.isnan(size) else exponent] += 1
        largest = max([0.0, *(size for size in sizes if math.isfinite(size))])
        assert histogram(numbers) == Histogram.from_bins(bins, largest)

    before, after = (np.array(one, "float32") for one in ([1, -2, 0, 0, 4], [1, -3, 0, 1, 3]))
    assert ratios(before, after).tolist() == [0, 0.5, 0, math.inf, 0.25]
