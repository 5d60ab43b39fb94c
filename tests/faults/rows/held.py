"""What was held or handed in was not finite, or not what it had been."""

from __future__ import annotations

from functools import partial

from torch import nn

from faults import plants
from faults.models import Carried, cnn, recurrent, stack, transformer
from faults.rows.batches import gain, poisoned_offset
from faults.rows.fault import Expected, Fault
from faults.rows.planting import batch, buffer, element, grown, state, weight

ROWS: list[Fault] = [
    Fault(
        "a NaN in the head's weight",
        "CNN",
        cnn,
        Expected("head", "", "state"),
        plant=weight("head", float("nan")),
        mended=False,
    ),
    Fault(
        "an infinite bias in an MLP",
        "transformer",
        transformer,
        Expected("blocks.0.mlp.up", "", "state"),
        plant=weight("blocks.0.mlp.up", float("inf"), "bias"),
        mended=False,
    ),
    Fault(
        "a NaN in a BatchNorm's weight",
        "CNN",
        cnn,
        Expected("norm1", "", "state"),
        plant=weight("norm1", float("nan")),
        mended=False,
    ),
    Fault(
        "a frozen BatchNorm with a NaN mean",
        "CNN",
        partial(cnn, middle=lambda: plants.Frozen(4)),
        Expected("middle.norm", "", "state"),
        plant=buffer("middle.norm", "running_mean", float("nan")),
        mended=False,
    ),
    Fault(
        "a NaN in Adam's first moment, one step later in the weight",
        "recurrent",
        recurrent,
        Expected("head", "", "state"),
        plant=state("head", "exp_avg", float("nan")),
        delay=1,
        mended=False,
    ),
    Fault(
        "an embedding's row that is NaN",
        "transformer",
        transformer,
        Expected("embed", "", "state"),
        plant=grown("embed", float("nan")),
        mended=False,
    ),
    Fault(
        "a recurrent weight that is infinite",
        "recurrent",
        partial(recurrent, nn.GRU),
        Expected("rnn", "", "state"),
        plant=weight("rnn", float("inf"), "weight_hh_l0"),
        mended=False,
    ),
    Fault(
        "a NaN pixel",
        "CNN",
        cnn,
        Expected("", "", "input", also="conv1"),
        plant=element(float("nan")),
        mended=False,
    ),
    Fault(
        "an infinite sample",
        "recurrent",
        recurrent,
        Expected("", "", "input", also="inner"),
        plant=element(float("inf"), row=2),
        mended=False,
    ),
    Fault(
        "a NaN in an argument by the side",
        "perceptron",
        stack,
        Expected("", "", "input", also="head"),
        plant=batch(poisoned_offset),
        mended=False,
    ),
    Fault(
        "bf16: a NaN pixel",
        "CNN",
        cnn,
        Expected("", "", "input", also="conv1"),
        plant=element(float("nan"), row=3),
        precision="bf16,loss_scale=1",
        mended=False,
    ),
    Fault(
        "a state carried from batch to batch in a buffer, growing",
        "recurrent",
        partial(recurrent, partial(Carried, buffer=True)),
        Expected("rnn", "mul", "overflow", line="state * self.gain"),
        plant=gain,
    ),
    Fault(
        "a state carried from batch to batch in an attribute, growing",
        "recurrent",
        partial(recurrent, Carried),
        Expected("rnn", "mul", "overflow", line="state * self.gain"),
        plant=gain,
    ),
]
