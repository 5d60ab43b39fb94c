"""Outside of the model."""

from __future__ import annotations

from functools import partial

from faults import plants
from faults.models import cnn, recurrent, stack, taught
from faults.rows import losses
from faults.rows.fault import Expected, Fault
from faults.rows.planting import element, loss
from mezzo.core.finding import OUTSIDE

ROWS: list[Fault] = [
    Fault(
        "the loss takes the logarithm of 0",
        "CNN",
        cnn,
        Expected(OUTSIDE, "log", "invalid", line="torch.log("),
        plant=loss(losses.log_of_zero),
        mended=False,
        repeats=2,
    ),
    Fault(
        "the loss is the mean of nothing",
        "CNN",
        cnn,
        Expected(OUTSIDE, "div", "invalid", line="/ keep.sum()"),
        plant=loss(losses.nothing_kept),
        mended=False,
        repeats=2,
    ),
    Fault(
        "logits divided by a temperature of 0",
        "CNN",
        cnn,
        Expected(OUTSIDE, "div", "invalid", line="m(x).float() / 0.0"),
        plant=loss(losses.no_temperature),
        mended=False,
        repeats=2,
    ),
    Fault(
        "the root of a distance of 0 in the loss",
        "recurrent",
        recurrent,
        Expected(OUTSIDE, "sqrt", "invalid", "backward", line=".sum().sqrt()"),
        plant=loss(losses.distance_of_nothing),
        mended=False,
        repeats=2,
    ),
    Fault(
        "the slope of (1 - p)^0.5 at p = 1 in the loss",
        "CNN",
        cnn,
        Expected(OUTSIDE, "pow", "invalid", "backward", line="(1 - p) ** 0.5"),
        plant=loss(losses.focal),
        mended=False,
        repeats=2,
    ),
    Fault(
        "a penalty on the weights' distance from their start, which is 0",
        "perceptron",
        stack,
        Expected(OUTSIDE, "sqrt", "invalid", "backward", line=".sum().sqrt()"),
        plant=loss(losses.far_from_start),
        seen=False,
        mended=False,
        repeats=2,
    ),
    Fault(
        "a loss multiplied by 1e39",
        "perceptron",
        stack,
        Expected(OUTSIDE, "mul", "overflow", line="* 1e39"),
        plant=loss(losses.huge_factor),
        mended=False,
        repeats=2,
    ),
    Fault(
        "a loss squared in fp16 by the script",
        "perceptron",
        stack,
        Expected(OUTSIDE, "mul", "overflow", line="missed.half() * missed.half()"),
        plant=loss(losses.half_of_a_square),
        repeats=2,
    ),
    Fault(
        "a deviation of 0 in a density",
        "recurrent",
        recurrent,
        Expected(OUTSIDE, "density", "invalid", line=".log_prob(y)"),
        plant=loss(losses.certain),
        mended=False,
        repeats=2,
    ),
    Fault(
        "a teacher that overflows, which nobody trains",
        "perceptron",
        partial(taught, plants.Squares),
        Expected(OUTSIDE, "mul", "overflow", line="wide * wide"),
        repeats=2,
    ),
    Fault(
        "a target that is NaN",
        "recurrent",
        recurrent,
        Expected(OUTSIDE, "", "input"),
        plant=element(float("nan"), place=1),
        mended=False,
        repeats=2,
    ),
    Fault(
        "a loss divided by 0",
        "recurrent",
        recurrent,
        Expected(OUTSIDE, "div", "invalid", line="out / (out - out.detach())"),
        plant=loss(losses.divides_by_its_spread),
        mended=False,
        repeats=2,
    ),
]
