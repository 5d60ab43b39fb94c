"""Rows that were written when the tracer named all the others: how it does with faults that nobody tuned it to."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.models import Trainee, cnn, gan, others, recurrent, stack, transformer
from faults.plants import Root, Squares
from faults.plants import others as weak
from faults.rows.fault import Expected, Fault
from faults.rows.planting import batch, both, buffer, element, grown, learning_rate, loss, weight
from mezzo.core.finding import OUTSIDE


def _set(name: str, value: Any) -> Any:
    return lambda trainee: setattr(trainee.model, name, value)


def _closed_row(trainee: Trainee) -> None:
    trainee.model.mask[2] = float("-inf")


def _contrast(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Similarities raised without their maximum."""
    out = F.normalize(m(x).float().expand(-1, 4), dim=-1)
    raised = torch.exp(out @ out.T / 0.005)
    return -torch.log(raised.diagonal() / raised.sum(1)).mean()


def _uncertain(trainee: Trainee) -> None:
    with torch.no_grad():
        trainee.model.uncertainty.fill_(-200.0)


ROWS: list[Fault] = [
    Fault(
        "afterwards: a Gumbel noise of u = 0",
        "recurrent",
        partial(recurrent, tail=weak.Gumbel),
        Expected("tail", "log", "invalid", line="-torch.log(drawn)"),
        mended=False,
    ),
    Fault(
        "afterwards: the logarithm of a squashed slope",
        "recurrent",
        partial(recurrent, nn.GRU, tail=weak.Squashed),
        Expected("tail", "log", "invalid", line="torch.tanh(wide) ** 2"),
        mended=False,
    ),
    Fault(
        "afterwards: the inverse of softplus at 100",
        "transformer",
        partial(transformer, tail=weak.InverseSoftplus),
        Expected("tail", "exp", "overflow", line="torch.exp(positive)"),
        mended=False,
    ),
    Fault(
        "afterwards: the slope of a geometric mean at 0",
        "CNN",
        partial(cnn, tail=weak.GeometricMean),
        Expected("tail", "pow", "invalid", "backward", line="x.prod("),
        mended=False,
    ),
    Fault(
        "afterwards: messages added up in fp16",
        "perceptron",
        partial(stack, tail=weak.Scatters),
        Expected("tail", "index_add", "overflow", line=".index_add("),
        mended=False,
    ),
    Fault(
        "afterwards: addcmul",
        "CNN",
        partial(cnn, middle=weak.Combines),
        Expected("middle", "addcmul", "overflow", line="torch.addcmul"),
    ),
    Fault(
        "afterwards: sampling positions over an extent of 0",
        "CNN",
        partial(cnn, middle=weak.Samples),
        Expected("middle", "div", "invalid", line="/ extent"),
        mended=False,
    ),
    Fault(
        "afterwards: the variance of one sample",
        "perceptron",
        partial(stack, tail=weak.Unbiased),
        Expected("tail", "div", "invalid", line="- 1)"),
        mended=False,
    ),
    Fault(
        "afterwards: a convolution in its functional form",
        "perceptron",
        partial(stack, tail=weak.Depthwise),
        Expected("tail", "conv1d", "overflow", line="F.conv1d"),
    ),
    Fault(
        "afterwards: a bilinear layer whose products only FP32 holds",
        "perceptron",
        partial(stack, tail=weak.BilinearLayer),
        Expected("head", "linear", "overflow", line="self.head("),
    ),
    Fault(
        "afterwards: 1 / the distance of two rows that are the same",
        "recurrent",
        partial(recurrent, tail=weak.PicksTheWorst),
        Expected("tail", "inverse", "invalid", line="1 / far"),
        mended=False,
    ),
    Fault(
        "afterwards: one of four experts",
        "perceptron",
        others.experts,
        Expected("experts.c", "linear", "overflow", line="expert(x[rows])"),
        plant=grown("experts.c", 1e6),
    ),
    Fault(
        "afterwards: a NaN in a weight that two modules share",
        "recurrent",
        others.tied,
        Expected("embed", "", "state", also="head"),
        plant=grown("embed", float("nan")),
        mended=False,
    ),
    Fault(
        "afterwards: a buffer of positions that is infinite",
        "recurrent",
        others.tied,
        Expected("", "", "state"),
        plant=buffer("", "position", float("inf")),
        mended=False,
    ),
    Fault(
        "afterwards: a slope behind a loop of GRU cells",
        "recurrent",
        partial(others.tied, Root),
        Expected("tail", "sqrt", "invalid", "backward", line="torch.sqrt"),
        mended=False,
    ),
    Fault(
        "afterwards: forward, in a model that returns a dataclass",
        "perceptron",
        partial(others.in_a_dataclass, Squares),
        Expected("tail", "mul", "overflow", line="wide * wide"),
    ),
    Fault(
        "afterwards: backward, in a model that returns a dataclass",
        "perceptron",
        partial(others.in_a_dataclass, Root),
        Expected("tail", "sqrt", "invalid", "backward", line="torch.sqrt"),
        mended=False,
    ),
    Fault(
        "afterwards: a NaN deep in an argument",
        "perceptron",
        others.nested,
        Expected("", "", "input", also="second"),
        plant=batch(lambda old: (old[0].index_fill(1, torch.tensor([6]), float("nan")), old[1])),
        mended=False,
    ),
    Fault(
        "afterwards: forward, in a model whose parts are called one by one",
        "perceptron",
        partial(others.parts, Squares),
        Expected("backbone.2", "mul", "overflow", line="wide * wide", in_script="2"),
        repeats=2,
        seen=False,
    ),
    Fault(
        "afterwards: backward, in a model whose parts are called one by one",
        "perceptron",
        partial(others.parts, Root),
        Expected("backbone.2", "sqrt", "invalid", "backward", line="torch.sqrt", in_script="2"),
        repeats=2,
        seen=False,
        mended=False,
    ),
    Fault(
        "afterwards: a stream that thirty layers double",
        "perceptron",
        others.residuals,
        Expected("layers.18", "linear", "overflow", line="layer(x)"),
        plant=_set("gain", 3.0),
    ),
    Fault(
        "afterwards: a gate times a value",
        "perceptron",
        others.gated,
        Expected("", "mul", "overflow", line="F.silu(self.gate(x)) * self.value(x)"),
        plant=both(grown("gate", 1e3), grown("value", 1e3)),
    ),
    Fault(
        "afterwards: a learned scale that has grown",
        "perceptron",
        others.gated,
        Expected("", "mul", "overflow", line="self.gamma.to(x.dtype) * x"),
        plant=both(grown("", 6e4, "gamma"), grown("value", 30.0)),
    ),
    Fault(
        "afterwards: a criterion with weights of its own",
        "perceptron",
        others.with_a_criterion,
        Expected(OUTSIDE, "acos", "invalid", "backward", line="torch.acos", in_script=""),
        repeats=2,
        mended=False,
    ),
    Fault(
        "afterwards: a learned uncertainty",
        "perceptron",
        others.weighed,
        Expected(OUTSIDE, "exp", "overflow", line="torch.exp(-s)"),
        plant=_uncertain,
        repeats=2,
        mended=False,
    ),
    Fault(
        "afterwards: a contrast of similarities without their maximum",
        "perceptron",
        stack,
        Expected(OUTSIDE, "exp", "overflow", line="torch.exp(out @ out.T"),
        plant=loss(_contrast),
        repeats=2,
        mended=False,
    ),
    Fault(
        "afterwards: a mask of floats with a row of -inf",
        "transformer",
        others.attends,
        Expected("attention", "attention", "invalid", line="self.attention("),
        plant=_closed_row,
        seen=False,
        mended=False,
    ),
    Fault(
        "afterwards: a model that is a Sequential",
        "perceptron",
        partial(others.stacked, Squares),
        Expected("2", "mul", "overflow", line="wide * wide"),
    ),
    Fault(
        "afterwards: two models of one graph, the first one's fault",
        "perceptron",
        partial(others.two_losses, Root),
        Expected("1", "sqrt", "invalid", "backward", part="body", line="torch.sqrt"),
        mended=False,
    ),
    Fault(
        "afterwards: a learning rate of NaN",
        "CNN",
        cnn,
        Expected("conv1", "", "state"),
        plant=learning_rate(float("nan")),
        delay=1,
        mended=False,
    ),
    Fault(
        "afterwards: one real sample that is NaN",
        "GAN",
        gan,
        Expected("", "", "input", part="critic", also="first"),
        plant=element(float("nan"), row=4),
        mended=False,
    ),
    Fault(
        "afterwards: one bias beyond fp16",
        "CNN",
        cnn,
        Expected("conv2", "conv", "overflow", line="self.conv2("),
        plant=weight("conv2", 1e5, "bias"),
    ),
]
