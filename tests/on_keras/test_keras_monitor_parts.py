"""What PrecisionMonitor is made of: exponents counted, losses kept, skipped steps counted and explained."""

from __future__ import annotations

import math
from typing import Any

import keras
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from conftest import BACKEND
from mezzo.core.ranges import BINS, NAN, ZERO, Histogram
from mezzo.keras.callback import NAMED, Skipped, _array, histogram, ratios
from mezzo.keras.steps import RecentLosses, _Held, _Optimizer

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
    assert histogram(_array(tensor)) == reference(numbers)


def test_ratios() -> None:
    before, after = (np.array(one, "float32") for one in ([1, -2, 0, 0, 4], [1, -3, 0, 1, 3]))
    assert ratios(before, after).tolist() == [0, 0.5, 0, math.inf, 0.25]
    assert histogram(ratios(before, after)) == Histogram(-2, [1, 1], 2, 1, 0, 0.5)


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


class Held:
    """An optimizer that has stepped so often, with Keras's loss scale or Mezzo's."""

    def __init__(self, *, mezzos: bool, moves: bool = True) -> None:
        self.optimizer = _Optimizer(keras.optimizers.SGD(), "optimizer")
        self.optimizer.is_mezzos, self.optimizer.moves = mezzos, moves

    def skipped(self, before: tuple[Any, ...], after: tuple[Any, ...], steps: int) -> int:
        return self.optimizer.skipped(_Held(*before), _Held(*after), steps)


# scale, iterations and counter before and after, steps -> skipped. A skipped step of Keras's is no iteration.
KERAS = [
    ((8, 1, 1), (8, 2, 2), 1, 0),
    ((8, 2, 2), (16, 3, 0), 1, 0),
    ((8, 2, 2), (4, 2, 0), 1, 1),
    ((0, 5, 0), (0, 5, 0), 1, 1),
    ((64, 5, 5), (8, 6, 1), 4, 3),
    ((8, 1, 1), (8, 5, 5), 4, 0),
    ((8, 2**20 - 2, 1), (8, 2, 5), 4, 0),
]


@pytest.mark.parametrize(("before", "after", "steps", "skipped"), KERAS)
def test_skips_of_keras_optimizer(before: Any, after: Any, steps: int, skipped: int) -> None:
    assert Held(mezzos=False).skipped(before, after, steps) == skipped
    assert Held(mezzos=False, moves=False).skipped(before, after, steps) == 0
    stepped = Held(mezzos=False).optimizer.stepped(_Held(*before), _Held(*after))
    assert stepped


def test_skips_of_mezzos_optimizer() -> None:
    assert Held(mezzos=True).skipped((8, 0, 3), (4, 0, 5), 4) == 2
    assert Held(mezzos=True).skipped((8, 0, 3), (8, 0, 0), 4) == 0  # its state was loaded anew


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
