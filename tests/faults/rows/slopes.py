"""Finite forward, and not backward."""

from __future__ import annotations

from functools import partial

from faults import plants
from faults.models import cnn, gan, recurrent, stack, transformer
from faults.rows.fault import Expected, Fault

ROWS: list[Fault] = [
    Fault(
        "the slope of a root at 0",
        "CNN",
        partial(cnn, tail=plants.Root),
        Expected("tail", "sqrt", "invalid", "backward", line="torch.sqrt"),
        mended=False,
    ),
    Fault(
        "the slope of a length at the origin",
        "recurrent",
        partial(recurrent, tail=plants.Length),
        Expected("tail", "sqrt", "invalid", "backward", line="torch.sqrt"),
        mended=False,
    ),
    Fault(
        "the slope of x^0.5 at 0",
        "transformer",
        partial(transformer, middle=plants.HalfPower),
        Expected("blocks.1.mlp.middle", "pow", "invalid", "backward", line=".pow(0.5)"),
        mended=False,
    ),
    Fault(
        "where() around a log(0)",
        "CNN",
        partial(cnn, tail=plants.Chosen),
        Expected("tail", "log", "invalid", "backward", line="torch.log(x)"),
        mended=False,
    ),
    Fault(
        "a clamp after log(0)",
        "transformer",
        partial(transformer, tail=plants.Clamped),
        Expected("tail", "log", "invalid", "backward", line="torch.log("),
        mended=False,
    ),
    Fault(
        "the slope of principal axes of equal length",
        "recurrent",
        partial(recurrent, tail=plants.Axes),
        Expected("tail", "eigh", "invalid", "backward", line="torch.linalg.eigh"),
        mended=False,
    ),
    Fault(
        "the slope of acos at 1",
        "GAN",
        partial(gan, generator_middle=plants.ArcCosine),
        Expected("middle", "acos", "invalid", "backward", part="generator", line="torch.acos"),
        mended=False,
    ),
    Fault(
        "the slope of x / y at a small y, beyond fp16",
        "perceptron",
        partial(stack, tail=plants.Steep),
        Expected("tail", "div", "overflow", "backward", line="/ small"),
    ),
    Fault(
        "the slope of normalize() at 0, which is 1 / 1e-12",
        "recurrent",
        partial(recurrent, tail=lambda: plants.UnitLength(1e-12)),
        Expected("tail", "normalize", "overflow", "backward", line="F.normalize"),
    ),
    Fault(
        "a hook of the script's own on a gradient of 0",
        "recurrent",
        partial(recurrent, tail=plants.HooksAGradient),
        Expected("tail", "", "invalid", "backward"),
        mended=False,
    ),
    Fault(
        "a slope of 1e30 on its way into fp16",
        "CNN",
        partial(cnn, tail=plants.Frequencies),
        Expected("tail", "cast", "overflow", "backward", line="x.float()"),
    ),
    Fault(
        "a backward by hand with 0 / 0 in it",
        "CNN",
        partial(cnn, tail=plants.OwnFunction),
        Expected("tail", "careless", "invalid", "backward", line="_Careless.apply"),
        mended=False,
    ),
]
