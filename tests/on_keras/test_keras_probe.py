"""A probe beside models whose loss is more than that of `compile`, and beside training steps of the model's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest

from conftest import BACKEND
from mezzo.core import records
from mezzo.core.ranges import Histogram
from mezzo.keras import LossScaleOptimizer, PrecisionMonitor
from mezzo.keras.monitor import exponents
from mezzo.keras.monitor.probe import Probe

Array = npt.NDArray[Any]
WIDE = 8


class Penalty(keras.layers.Layer):  # type: ignore[misc]
    """Adds to the loss what it is given, and returns it as it is."""

    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.mean(keras.ops.square(keras.ops.cast(x, "float32"))))
        return x


def data() -> tuple[Array, Array]:
    x = np.random.default_rng(0).normal(size=(64, WIDE)).astype("float32")
    return x, x[:, :1]


def dense(**options: Any) -> Any:
    return keras.layers.Dense(4, name="dense", **options)


# what adds to the loss -> the layers that do it
ADDED: dict[str, Callable[[], list[Any]]] = {
    "kernel": lambda: [dense(kernel_regularizer="l2")],
    "bias": lambda: [dense(bias_regularizer=keras.regularizers.L1(0.1), bias_initializer="ones")],
    # In FP32: on TensorFlow Keras can't add a penalty in FP16 to a loss in FP32, with or without a probe.
    "activity": lambda: [dense(activity_regularizer="l2", dtype="float32")],
    "add_loss": lambda: [dense(), Penalty(name="penalty")],
    "all": lambda: [
        dense(kernel_regularizer="l1l2", bias_regularizer="l2", activity_regularizer="l1", dtype="float32"),
        Penalty(name="penalty"),
        keras.layers.BatchNormalization(name="norm", gamma_regularizer="l2"),
    ],
    "nothing": lambda: [dense()],
}


def model(added: str) -> Any:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    head = keras.layers.Dense(1, dtype="float32", name="head")
    net = keras.Sequential([keras.layers.Input((WIDE,)), *ADDED[added](), head], name="net")
    net.compile(LossScaleOptimizer(keras.optimizers.Adam(0.01), 2.0**10), "mse")
    return net


def values(net: Any) -> list[Array]:
    return [keras.ops.convert_to_numpy(one).copy() for one in net.variables + net.optimizer.variables]


@pytest.mark.parametrize("added", ADDED)
def test_the_training_is_the_same_beside_a_probe(added: str, tmp_path: Path) -> None:
    x, y = data()
    found = []
    for callbacks in ([], [PrecisionMonitor(tmp_path, watch=2, probe=(x[:8], y[:8]), verbose=False)]):
        net = model(added)
        history = net.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks).history
        found.append((history["loss"], values(net)))
    (alone, numbers), (beside, watched) = found
    assert alone == beside
    assert all(np.array_equal(a, b) for a, b in zip(numbers, watched, strict=True))
    (path,) = (tmp_path / "runs").iterdir()
    looks = [one for one in records.read(path) if one.kind == "ranges"]
    assert [one.update for one in looks] == list(range(0, 16, 2))
    assert all(any(row.what == "weight gradient" for row in one.rows) for one in looks)


def rows(net: Any) -> dict[tuple[str, str, str], Histogram]:
    x, y = data()
    seen = Probe((x[:8], y[:8])).look(net)
    found = exponents.read([one.words for one in seen], [0] * len(seen))
    return {(one.module, one.what, one.name): histogram for one, histogram in zip(seen, found, strict=True)}


@pytest.mark.parametrize("added", [one for one in ADDED if one != "nothing"])
def test_what_is_added_to_the_loss_is_in_the_gradients_and_nowhere_else(added: str) -> None:
    with_it, without = rows(model(added)), rows(model("nothing"))
    name = "bias" if added == "bias" else "kernel"
    key = ("net/dense", "weight gradient", name)
    assert with_it[key] != without[key]
    if added in ("kernel", "bias"):  # of no other number of the model
        others = {one for one in without if with_it[one] != without[one]}
        # The bias that begins as ones moves every output.
        assert others == {key} or added == "bias"


def test_the_gradient_of_a_penalty_is_that_of_its_formula() -> None:
    keras.config.set_dtype_policy("float32")
    layer = keras.layers.Dense(1, use_bias=False, name="dense", kernel_regularizer=keras.regularizers.L2(0.5))
    net = keras.Sequential([keras.layers.Input((2,)), layer], name="net")
    net.compile("sgd", "mse")
    layer.kernel.assign([[0.5], [-0.25]])
    nothing = np.zeros((4, 2), "float32")
    seen = Probe((nothing, nothing[:, :1])).look(net)
    words = next(one.words for one in seen if one.what == "weight gradient")
    (found,) = exponents.read([words], [0])
    # The loss of the batch is 0: the gradient is the penalty's alone, 2 * 0.5 * weight.
    assert (found.lowest, found.counts, found.largest) == (-2, [1, 1], 0.5)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="elsewhere a gradient is dense")
def test_a_penalty_on_another_layer_leaves_a_sparse_gradient_sparse() -> None:
    def net(**options: Any) -> Any:
        given = keras.layers.Input((3,), dtype="int32")
        layers = [keras.layers.Embedding(50, 2, name="words"), keras.layers.Dense(2, name="dense", **options)]
        found = keras.Sequential([given, *layers], name="net")
        found.compile("sgd", "mse")
        return found

    batch = (np.array([[1, 2, 2]]), np.ones((1, 3, 2), "float32"))
    for options in ({}, {"kernel_regularizer": "l2"}):
        seen = Probe(batch).look(net(**options))
        of_words = next(one for one in seen if (one.module, one.what) == ("net/words", "weight gradient"))
        (found,) = exponents.read([of_words.words], [0])
        assert found.elements == 6


@pytest.mark.skipif(BACKEND != "jax", reason="a function of JAX's trainer")
@pytest.mark.parametrize("takes", ["other arguments", "the same", "what comes"])
def test_a_model_with_a_function_of_its_loss_of_its_own(takes: str, tmp_path: Path) -> None:
    import jax

    class Guide(keras.Sequential):  # type: ignore[misc]
        """As in Keras's guide to a training step in JAX."""

        def compute_loss_and_updates(
            self, weights: Any, others: Any, x: Any, y: Any, training: bool = False
        ) -> Any:
            made, others = self.stateless_call(weights, others, x, training=training)
            return self.compute_loss(x, y, made), (made, others)

        def train_step(self, state: Any, batch: Any) -> Any:
            weights, others, held, metrics = state
            x, y = batch
            slope = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
            (loss, (_, others)), gradients = slope(weights, others, x, y, training=True)
            weights, held = self.optimizer.stateless_apply(held, gradients, weights)
            return {"loss": loss}, (weights, others, held, metrics)

    called = []

    class Same(keras.Sequential):  # type: ignore[misc]
        def compute_loss_and_updates(
            self,
            trainable_variables: Any,
            non_trainable_variables: Any,
            metrics_variables: Any,
            x: Any,
            y: Any,
            sample_weight: Any,
            training: bool = False,
            optimizer_variables: Any = None,
        ) -> Any:
            called.append(1)
            state = (trainable_variables, non_trainable_variables, metrics_variables)
            return super().compute_loss_and_updates(
                *state, x, y, sample_weight, training=training, optimizer_variables=optimizer_variables
            )

    class Passing(keras.Sequential):  # type: ignore[misc]
        def compute_loss_and_updates(self, *args: Any, **kwargs: Any) -> Any:
            called.append(1)
            return super().compute_loss_and_updates(*args, **kwargs)

    keras.config.set_dtype_policy("float32")
    kind = {"other arguments": Guide, "the same": Same, "what comes": Passing}[takes]
    layer = keras.layers.Dense(1, name="dense", kernel_initializer="ones")
    net = kind([keras.layers.Input((WIDE,)), layer], name="net")
    net.compile("sgd", "mse")
    x, y = data()
    plain = keras.Sequential(
        [keras.layers.Input((WIDE,)), keras.layers.Dense(1, name="dense", kernel_initializer="ones")],
        name="net",
    )
    plain.compile("sgd", "mse")
    assert rows(net) == rows(plain)
    assert bool(called) == (takes != "other arguments")
    monitor = PrecisionMonitor(tmp_path, probe=(x[:8], y[:8]), verbose=False)
    net.fit(x, y, verbose=0, callbacks=[monitor])
    assert monitor.path is not None
    assert any(one.kind == "ranges" for one in records.read(monitor.path))
