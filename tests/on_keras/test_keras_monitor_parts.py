"""What PrecisionMonitor is made of: exponents counted, one batch looked at, losses kept, skipped steps explained."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import keras
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from keras_steps import no_gradients

from conftest import BACKEND
from mezzo.core.errors import CallOrderError, UsageError
from mezzo.core.ranges import BINS, NAN, ZERO, Histogram
from mezzo.keras import LossScaleOptimizer
from mezzo.keras.monitor import exponents
from mezzo.keras.monitor.overflow import NAMED, Skipped
from mezzo.keras.monitor.probe import Probe
from mezzo.keras.monitor.recent_losses import RecentLosses
from mezzo.keras.monitor.scale_gauge import Reading, ScaleGauge

Array = npt.NDArray[Any]


def reference(numbers: Array) -> Histogram:
    """By the definition, number by number."""
    bins, largest = [0] * BINS, 0.0
    for number in numbers.astype("float32").ravel().tolist():
        size = abs(number)
        if math.isfinite(size):
            largest = max(largest, size)
        index = 255 if math.isinf(size) else NAN if math.isnan(size) else ZERO if size == 0 else -1
        if index < 0:
            index = max(0, math.frexp(size)[1] - 1 + 127)
        bins[index] += 1
    return Histogram.from_bins(bins, largest)


PATTERNS = np.arange(1 << 16, dtype=np.uint16)
SPECIAL = np.array(
    [0, -0.0, 1, -1, 3.4e38, -3.4e38, 1e-38, 1e-45, math.inf, -math.inf, math.nan, 2**-126, 0.1]
)
TENSORS = {
    "every fp16": (PATTERNS.view(np.float16), "float16"),
    "every bf16": (PATTERNS.view(ml_dtypes.bfloat16), "bfloat16"),
    "fp32": (SPECIAL.astype("float32"), "float32"),
    "a matrix": (np.linspace(-3, 7, 48, dtype="float32").reshape(6, 8), "float32"),
    "nothing": (np.zeros((0, 4), "float32"), "float32"),
    "a scalar": (np.array(-6.5, "float32"), "float32"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_exponents_are_counted_by_the_definition(name: str) -> None:
    numbers, dtype = TENSORS[name]
    tensor = keras.ops.convert_to_tensor(numbers.astype("float32"), "float32")
    if dtype != "float32":
        tensor = keras.ops.cast(tensor, dtype)
    counted = exponents.count_all([tensor, tensor])
    assert exponents.read(counted, [0, 0]) == [reference(numbers)] * 2
    assert exponents.format_of(tensor) == {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[dtype]


def test_a_shift_moves_the_exponents_and_the_largest() -> None:
    numbers = np.array([0.0, 3.0, 5.0, math.inf], "float32")
    (found,) = exponents.read([exponents.count(keras.ops.convert_to_tensor(numbers))], [-15])
    assert found == Histogram(1 - 15, [1, 1], 1, 1, 0, 5.0 * 2.0**-15)
    assert exponents.read([], []) == []


def test_ratios() -> None:
    before, after = ([1.0, -2.0, 0.0, 0.0, 4.0], [1.0, -3.0, 0.0, 1.0, 3.0])
    pair = [keras.ops.convert_to_tensor(np.array(one, "float32")) for one in (before, after)]
    assert keras.ops.convert_to_numpy(exponents.ratios(*pair)).tolist() == [0, 0.5, 0, math.inf, 0.25]
    (found,) = exponents.read(exponents.count_ratios(pair[:1], pair[1:]), [0])
    assert found == Histogram(-2, [1, 1], 2, 1, 0, 0.5)


def linear(**compiled: Any) -> Any:
    layer = keras.layers.Dense(1, use_bias=False, name="dense")
    net = keras.Sequential(
        [keras.layers.Input((2,)), keras.layers.Rescaling(2.0, name="twice"), layer], name="net"
    )
    net.compile(keras.optimizers.SGD(0.1, loss_scale_factor=1024.0), "mse", **compiled)
    layer.kernel.assign([[0.5], [-0.25]])
    return net


def test_a_probe_sees_what_the_chain_rule_says() -> None:
    x = np.array([[1.0, 2.0], [3.0, -5.0]], "float32")
    y = np.array([[0.125], [7.0]], "float32")
    seen = Probe((x, y)).look(linear())
    out = 2 * x @ np.array([[0.5], [-0.25]], "float32")
    slope = 2 * (out - y) / 2 * 1024
    expected = {
        ("net/twice", "activation", ""): 2 * x,
        ("net/dense", "activation", ""): out,
        ("net/dense", "activation gradient", ""): slope,
        ("net/dense", "weight gradient", "kernel"): (2 * x).T @ slope,
    }
    found = exponents.read([one.words for one in seen], [0] * len(seen))
    got = {(one.module, one.what, one.name): histogram for one, histogram in zip(seen, found, strict=True)}
    assert got == {key: reference(value) for key, value in expected.items()}
    assert [one.scaled for one in seen] == ["gradient" in one.what for one in seen]


def test_a_probe_looks_at_the_model_that_it_is_given() -> None:
    x = np.ones((2, 2), "float32")
    probe = Probe((x, x[:, :1]))
    probe.look(linear())
    other = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, name="other")], name="second")
    other.compile("sgd", "mse")
    assert {one.module for one in probe.look(other)} == {"second/other"}


def test_a_variable_without_a_gradient_has_no_row() -> None:
    class Half(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.used = self.add_weight(shape=(2, 1), name="used")
            self.unused = self.add_weight(shape=(2, 1), name="unused")

        def call(self, x: Any) -> Any:
            return x @ self.used

    net = keras.Sequential([keras.layers.Input((2,)), Half()])
    net.compile("sgd", "mse")
    x = np.ones((2, 2), "float32")
    names = {one.name for one in Probe((x, x[:, :1])).look(net) if one.what == "weight gradient"}
    assert names == ({"used", "unused"} if BACKEND == "jax" else {"used"})  # there it is zeros


def test_an_error_that_says_what_to_do_comes_out_of_a_probe_as_it_is() -> None:
    class Refusing(keras.layers.Layer):  # type: ignore[misc]
        refuses = False

        def call(self, x: Any) -> Any:
            if self.refuses:
                raise UsageError("leave this layer in FP32")
            return x

    refusing = Refusing()
    net = keras.Sequential([keras.layers.Input((2,)), refusing, keras.layers.Dense(1)])
    net.compile("sgd", "mse")
    refusing.refuses = True
    x = np.ones((2, 2), "float32")
    with pytest.raises(UsageError, match="leave this layer in FP32") as error:
        Probe((x, x[:, :1])).look(net)
    assert "could not be computed" not in str(error.value)


def test_a_probe_weighs_its_samples() -> None:
    x, y = np.ones((2, 2), "float32"), np.array([[0.0], [1.0]], "float32")
    weight = np.array([0.0, 1.0], "float32")
    seen = Probe((x, y, weight)).look(linear())
    words = next(one.words for one in seen if one.what == "activation gradient")
    (found,) = exponents.read([words], [0])
    assert (found.zeros, found.elements) == (1, 2)


def test_a_probe_leaves_no_trace() -> None:
    layers = keras.layers
    net = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(4),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(1),
        ]
    )
    net.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    y = x[:, :1]
    net.optimizer.build(net.trainable_variables)

    def state() -> list[Array]:
        parts = [*net.variables, *net.optimizer.variables, *net.metrics_variables]
        return [keras.ops.convert_to_numpy(one).copy() for one in parts]

    before, generators = state(), (random.getstate(), np.random.get_state()[1].tolist())
    seen = Probe((x, y)).look(net)
    assert all(np.array_equal(old, new) for old, new in zip(before, state(), strict=True))
    assert generators == (random.getstate(), np.random.get_state()[1].tolist())
    assert not any("call" in vars(layer) for layer in net.layers)
    assert len({one.module for one in seen}) == 4


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's modules")
def test_a_probe_leaves_no_trace_in_buffers_of_pytorch_modules() -> None:
    import torch

    class Listed(keras.Model):  # type: ignore[misc]
        """PyTorch does not see what is in a list."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.parts = [keras.layers.TorchModuleWrapper(inner), keras.layers.Dense(1)]

        def call(self, x: Any) -> Any:
            for part in self.parts:
                x = part(x)
            return x

    class Counting(torch.nn.BatchNorm1d):
        """Its buffers are also replaced, counted up past autograd, spread out, NaN, and none."""

        def __init__(self) -> None:
            super().__init__(4)
            self.register_buffer("last", torch.zeros(4))
            self.register_buffer("seen", torch.full((2,), math.nan))
            self.register_buffer("spread", torch.zeros(1).expand(5))
            self.register_buffer("nothing", None)

        def forward(self, x: Any) -> Any:
            self.last = x.mean(0).detach()
            self.seen.data[0] = 7
            return super().forward(x)

    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), Counting())
    net = Listed(inner)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    net(x)
    net.compile("sgd", "mse", jit_compile=False)
    inner[1].seen.fill_(math.nan)
    before = [(one, one.clone()) for one in inner.buffers()]
    assert len(before) == 6
    batches = int(inner[1].num_batches_tracked)
    Probe((x, x[:, :1])).look(net)
    for (old, value), new in zip(before, inner.buffers(), strict=True):
        assert new is old
        torch.testing.assert_close(new, value, rtol=0, atol=0, equal_nan=True)
    net(x, training=True)
    assert int(inner[1].num_batches_tracked) == batches + 1


def test_a_loop_that_forgets_the_scale_is_found_out_beside_a_probe() -> None:
    x = np.ones((2, 2), "float32")
    net = linear()
    optimizer = LossScaleOptimizer(keras.optimizers.SGD())
    net.compile(optimizer, "mse", auto_scale_loss=False)
    optimizer.build(net.trainable_variables)
    probe = Probe((x, x[:, :1]))
    assert any(one.scaled for one in probe.look(net))
    gradients = [keras.ops.ones(one.shape) for one in net.trainable_variables]
    with pytest.raises(CallOrderError, match="nobody has multiplied the loss"):
        optimizer.apply(gradients)
    optimizer.scale_loss(1.0)
    probe.look(net)
    with no_gradients():
        optimizer.apply(gradients)  # who asked before still has


def test_layers_in_layers_and_one_that_is_called_twice() -> None:
    class Block(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.inner = keras.layers.Dense(3, name="inner")
            self.act = keras.layers.Activation("tanh", name="act")

        def call(self, x: Any) -> Any:
            return self.act(self.inner(self.act(x)))

    given = keras.Input((3,))
    net = keras.Model(given, Block(name="block")(given), name="whole")
    net.compile("sgd", "mse")
    seen = Probe((np.ones((2, 3), "float32"), np.ones((2, 3), "float32"))).look(net)
    outputs = [one.module.rpartition("/")[2] for one in seen if one.what == "activation"]
    assert sorted(outputs) == ["act", "act", "inner"]
    assert all("block/" in one.module for one in seen)


def test_an_embedding_has_a_gradient() -> None:
    net = keras.Sequential(
        [keras.layers.Input((3,), dtype="int32"), keras.layers.Embedding(50, 2, name="words")]
    )
    net.compile("sgd", "mse")
    seen = Probe((np.array([[1, 2, 2]]), np.ones((1, 3, 2), "float32"))).look(net)
    words = next(one.words for one in seen if one.what == "weight gradient")
    (found,) = exponents.read([words], [0])
    assert sum(found.counts) >= 4
    assert found.elements == (6 if BACKEND == "tensorflow" else 100)  # there it is sparse


def test_recent_losses_are_a_ring() -> None:
    tracker = RecentLosses(3)
    for number in (1.0, math.inf, 3.0, 4.0):
        tracker.update_state(keras.ops.convert_to_tensor(np.float32(number)), sample_weight=2)
    assert keras.ops.convert_to_numpy(tracker.recent).tolist() == [4.0, math.inf, 3.0]
    assert int(tracker.seen.numpy() if BACKEND != "torch" else tracker.seen.value) == 4
    tracker.reset_state()
    tracker.update_state(keras.ops.convert_to_tensor(np.float32(5.0)))
    assert float(tracker.result()) == 5.0
    store: dict[str, Any] = {}
    tracker.save_own_variables(store)
    assert sorted(store) == ["0", "1"]


def gauge(*, mezzos: bool, moves: bool = True) -> ScaleGauge:
    found = ScaleGauge.__new__(ScaleGauge)
    found._mezzos, found.moves = mezzos, moves
    return found


# before, after, steps -> skipped; Keras's counter begins anew at a skip and at a doubling.
KERAS = [
    (Reading(8, 1), Reading(8, 2), 1, 0),
    (Reading(8, 2), Reading(16, 0), 1, 0),
    (Reading(8, 2), Reading(4, 0), 1, 1),
    (Reading(0, 0), Reading(0, 0), 1, 1),
    (Reading(math.inf, 0), Reading(math.inf, 0), 1, 1),
    (Reading(64, 5), Reading(8, 1), 4, 3),
    (Reading(8, 1), Reading(8, 5), 4, 0),
    (Reading(8, 1), Reading(0, 0), 4, 1),
]


@pytest.mark.parametrize(("before", "after", "steps", "skipped"), KERAS)
def test_skips_of_keras_optimizer(before: Reading, after: Reading, steps: int, skipped: int) -> None:
    assert gauge(mezzos=False).skipped(before, after, steps) == skipped
    assert gauge(mezzos=False, moves=False).skipped(before, after, steps) == 0


def test_skips_of_mezzos_optimizer() -> None:
    assert gauge(mezzos=True).skipped(Reading(8, 3), Reading(4, 5), 4) == 2
    assert gauge(mezzos=True).skipped(Reading(8, 3), Reading(8, 0), 4) == 0  # its state was loaded anew
    counted = gauge(mezzos=True)
    counted._model = SimpleNamespace(
        trainable_variables=[SimpleNamespace(path="a/k"), SimpleNamespace(path="b/k")]
    )
    assert counted.bad(Reading(1, 1, (False, True))) == ["b/k"]
    assert counted.bad(Reading(1, 1)) == []


PATHS = tuple(f"net/dense_{number}/kernel" for number in range(NAMED + 3))


@pytest.mark.parametrize(
    ("loss", "kept_at", "cause", "module", "told", "remedy"),
    [
        (1.0, 512.0, "loss scale", "net/dense_14", "loss scale 512", "dynamic_growth_steps"),
        (math.nan, 512.0, "loss", "", "the loss was nan", "from_logits=True"),
        (math.inf, None, "loss", "", "the loss was inf", "look at the batch"),
        (1.0, None, "unknown", "net/dense_14", "no update after it", "fp16,module.net/dense_14=fp32"),
        (None, 512.0, "loss scale", "net/dense_14", "loss scale 512", "mixed_bfloat16"),
    ],
)
def test_what_is_said_of_a_skipped_step(
    loss: float | None, kept_at: float | None, cause: str, module: str, told: str, remedy: str
) -> None:
    record = Skipped(7, 1.5, 1024.0, loss, PATHS).explained(kept_at)
    assert (record.update, record.at, record.loss_scale) == (7, 1.5, 1024.0)
    found = record.finding
    assert (found.cause, found.module) == (cause, module)
    assert told in found.note
    assert any(remedy in one for one in found.remedies)
    assert not any("LAYER" in one for one in found.remedies if module)
    assert found.propagators[0] == "net/dense_14: gradient of kernel"
    assert found.propagators[-1] == "and 3 more"


@pytest.mark.parametrize("loss", [1.0, math.nan])
def test_of_a_step_that_nobody_can_repeat_it_is_not_said_that_it_has_not_happened_again(loss: float) -> None:
    found = Skipped(7, 1.5, 1024.0, loss, PATHS).explained(None).finding
    assert "again yet" not in str(found)
    assert "again yet" not in found.why
    assert found.note in str(found)
    assert found.alarms
