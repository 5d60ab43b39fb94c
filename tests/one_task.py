"""One small training task for every framework, and what its losses and scales must be.

A perceptron (8 -> 16, tanh -> 4) learns a fixed function, and a `fuse` of one weight v decides which steps overflow: it
adds mean(z v) to the loss, so that v's gradient is z, a sum of 32 equal terms, exact in fp16 as long as it is finite.

Losses are compared within what the format allows. `run` is the task in numpy with every value rounded to the format;
`tolerances` draws it again and again with random errors instead, up to the bound for any way of computing it: u |x| for
one operation, n u |a| @ |b| for a sum of n products (N. Higham, Accuracy and Stability of Numerical Algorithms, (3.5)).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mezzo.core.loss_scale import DynamicLossScale, LossScale, NoLossScale, Observation

Array = NDArray[np.float64]

BATCH, FEATURES, HIDDEN, OUT, STEPS = 32, 8, 16, 4, 60
LEARNING_RATE, MOMENTUM = 2.0**-4, 0.9
# So that the perceptron's gradients stay far from overflow where the fuse does not blow.
PART_OF_ERROR = 0.25
LOSS_SCALE = DynamicLossScale(init=2.0**20, growth_interval=4, ceiling=2.0**21)
NAMES = ("w1", "b1", "w2", "b2", "v")

FORMATS: dict[str, Any] = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24}
SAMPLES = 64


@dataclass(frozen=True)
class Task:
    """What a framework starts from, FP32: x [STEPS, BATCH, FEATURES], target, z, and weights by name as [in, out]."""

    x: NDArray[np.float32]
    target: NDArray[np.float32]
    z: NDArray[np.float32]
    weights: dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Course:
    """What a run went through: the unscaled loss of each step before its update, and the scale that followed each."""

    losses: Array
    scales: list[float]


@cache
def task() -> Task:
    rng = np.random.default_rng(20)
    x = rng.uniform(-1, 1, (STEPS, BATCH, FEATURES))
    teacher = rng.uniform(-1, 1, (FEATURES, OUT))
    target = np.sin(2 * x @ teacher / FEATURES**0.5)
    fuse = np.where(np.arange(STEPS) % 2, -1.5, 1.5)  # alternating, so that v stays small
    fuse[25:28] *= 16
    fuse[34:46] /= 4
    fuse[54] *= 16
    weights = {
        "w1": rng.uniform(-1, 1, (FEATURES, HIDDEN)) / FEATURES**0.5,
        "b1": np.zeros(HIDDEN),
        "w2": rng.uniform(-1, 1, (HIDDEN, OUT)) / HIDDEN**0.5,
        "b2": np.zeros(OUT),
        "v": np.full((1, 1), 0.25),
    }
    z = np.broadcast_to(fuse[:, None, None], (STEPS, BATCH, 1))
    single = {name: w.astype(np.float32) for name, w in weights.items()}
    return Task(*(each.astype(np.float32) for each in (x, target, z)), single)


def loss_scale(precision: str) -> LossScale:
    return LOSS_SCALE if precision == "fp16" else NoLossScale()


class Rounding:
    """Values as the format holds them: rounded, ties to even."""

    def __init__(self, precision: str) -> None:
        self.format, self.unit = FORMATS[precision], UNIT[precision]

    def __call__(self, exact: Array, bound: Array | None = None) -> Array:
        """`exact` in the format; errors are relative to `bound`, by default to `exact`."""
        with np.errstate(over="ignore"):
            return exact.astype(self.format).astype(np.float64)

    def product(self, a: Array, b: Array) -> Array:
        return self(a @ b, a.shape[-1] * (np.abs(a) @ np.abs(b)))

    def total(self, a: Array, axis: int = -2) -> Array:
        return self(a.sum(axis), a.shape[axis] * np.abs(a).sum(axis))


class Drawn(Rounding):
    """Values with a random error instead, up to the bound of the format. What overflowed in it is infinite here too."""

    def __init__(self, precision: str, seed: int) -> None:
        super().__init__(precision)
        self.rng = np.random.default_rng(seed)

    def __call__(self, exact: Array, bound: Array | None = None) -> Array:
        rounded = super().__call__(exact)
        smallest = 2.0**-25 if self.format is np.float16 else 0.0
        room = self.unit * np.abs(exact if bound is None else bound) + smallest
        return np.where(np.isfinite(rounded), exact + room * self.rng.uniform(-1, 1, exact.shape), rounded)


def run(
    precision: str,
    rounding: Callable[[str], Rounding] = Rounding,
    samples: int | None = None,
) -> Course:
    """The task in numpy: forward and backward in the format, master weights and momentum in FP32.

    With `samples`, so many runs at once, each with errors of its own: losses are [STEPS, samples].
    """
    given, fl, single = task(), rounding(precision), rounding("fp32")
    lead = () if samples is None else (samples,)

    def each(value: NDArray[np.float32]) -> Array:
        return np.broadcast_to(value.astype(np.float64), lead + value.shape)

    def turned(matrix: Array) -> Array:
        return matrix.swapaxes(-1, -2)

    weights = {name: each(value) for name, value in given.weights.items()}
    momentum = {name: np.zeros_like(value) for name, value in weights.items()}
    scale, losses, scales = loss_scale(precision), [], []
    for x32, target, z32 in zip(given.x, given.target, given.z):
        x, z = fl(each(x32)), fl(each(z32))
        w = {name: fl(value) for name, value in weights.items()}
        hidden = fl(np.tanh(fl(fl.product(x, w["w1"]) + w["b1"][..., None, :])))
        error = fl(fl(fl.product(hidden, w["w2"]) + w["b2"][..., None, :]) - target)
        squared, fuse = fl(error * error), fl.product(z, w["v"])
        whole = single.total(squared.reshape(*lead, -1), -1) / target.size
        losses.append(single(PART_OF_ERROR * whole + single.total(fuse)[..., 0] / BATCH))

        s = scale.scale
        of_output = fl(fl(error) * (2 * PART_OF_ERROR * s / target.size))
        of_hidden = fl(fl.product(of_output, turned(w["w2"])) * fl(1 - fl(hidden * hidden)))
        found = {
            "w2": fl.product(turned(hidden), of_output),
            "b2": fl.total(of_output),
            "w1": fl.product(turned(x), of_hidden),
            "b1": fl.total(of_hidden),
            # Each partial sum is exact: no error is drawn for it, only the overflow is seen.
            "v": Rounding.product(Rounding(precision), turned(z), np.full((BATCH, 1), s / BATCH)),
        }
        bad = not all(np.isfinite(gradient).all() for gradient in found.values())
        if not bad:
            for name, gradient in found.items():
                momentum[name] = single(single(MOMENTUM * momentum[name]) + single(gradient / s))
                weights[name] = single(weights[name] - single(LEARNING_RATE * momentum[name]))
        scale = scale.next(Observation(bad))
        scales.append(scale.scale)
    return Course(np.array(losses), scales)


@cache
def expected(precision: str) -> Course:
    return run(precision)


@cache
def tolerances(precision: str) -> Array:
    """How far each step's loss may be from the expected one: as far as the farthest of `SAMPLES` draws was."""
    drawn = run(precision, lambda name: Drawn(name, 0), samples=SAMPLES)
    assert drawn.scales == expected(precision).scales
    return np.abs(drawn.losses - expected(precision).losses[:, None]).max(1)


def check(precision: str, losses: Any, scales: Any) -> None:
    """Hold a framework's run to the expected one: scales to the bit, losses within the format's tolerance."""
    wanted = expected(precision)
    assert [float(s) for s in scales] == wanted.scales
    distance = np.abs(np.array([float(loss) for loss in losses]) - wanted.losses)
    allowed = tolerances(precision)
    assert (distance <= allowed).all(), f"step {int((distance / allowed).argmax())} of {precision}"
