"""The planted faults: what is planted, and what a search for the culprit has to say of it.

Each row is a truth about the code of `plants.py` and `models.py`, checked without any tracer by `plain.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
from faults import plants
from faults.models import (
    Batch,
    Carried,
    OwnCell,
    Trainee,
    autoencoder,
    cnn,
    encoder,
    gan,
    recurrent,
    sgd,
    stack,
    transformer,
    two_heads,
)
from mezzo.core.finding import OUTSIDE

PLANTED = 2
"""The step in which a fault acts for the first time."""


@dataclass(frozen=True)
class Expected:
    """What is to be found.

    Args:
        module: path of the culprit.
        op: key of `score.FAMILIES`, or the operation's own name in small letters; "" where there is none.
        cause: a key of `mezzo.core.finding.CAUSES`.
        direction: forward or backward.
        line: part of the code of the user's line; "" where the operation is inside of a module of torch.
        part: whose step, in a training of several.
        also: another path that says the same.
    """

    module: str
    op: str
    cause: str
    direction: str = "forward"
    line: str = ""
    part: str = "main"
    also: str = ""


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Args:
        name: what it is.
        family: CNN, transformer, recurrent, GAN or perceptron.
        make: makes the training.
        expected: what is to be found, in one step or in several parts' steps.
        plant: done before step `PLANTED`; by default what is built in is armed.
        mended: whether the same step is finite in FP32; None where it can't be run there.
        precision: the policy.
        scale: first loss scale: low enough that nothing else overflows.
        repeats: how many steps it acts in; the last one's finding counts.
        delay: how many steps after it was planted it acts.
        options: of `MixedPrecision`.
        seen: whether `plain.py`, which looks at modules only, can tell.
    """

    name: str
    family: str
    make: Callable[[], Trainee]
    expected: Expected | tuple[Expected, ...]
    plant: Callable[[Trainee], Any] = Trainee.arm
    mended: bool | None = True
    precision: str = "fp16"
    scale: float = 2.0**6
    repeats: int = 1
    delay: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    seen: bool = True

    @property
    def all_expected(self) -> tuple[Expected, ...]:
        return self.expected if isinstance(self.expected, tuple) else (self.expected,)


# ------------------------------------------------------------------------------------ ways of planting


def weight(path: str, value: float, parameter: str = "weight") -> Callable[[Trainee], None]:
    """One element of a parameter set to a number."""

    def plant(trainee: Trainee) -> None:
        with torch.no_grad():
            getattr(trainee.model.get_submodule(path), parameter).view(-1)[0] = value

    return plant


def grown(path: str, gain: float, parameter: str = "weight") -> Callable[[Trainee], None]:
    """A whole parameter multiplied."""

    def plant(trainee: Trainee) -> None:
        with torch.no_grad():
            getattr(trainee.model.get_submodule(path), parameter).mul_(gain)

    return plant


def buffer(path: str, name: str, value: float) -> Callable[[Trainee], None]:
    """A buffer filled with a number."""

    def plant(trainee: Trainee) -> None:
        getattr(trainee.model.get_submodule(path), name).fill_(value)

    return plant


def batch(spoil: Callable[[Batch], Batch]) -> Callable[[Trainee], None]:
    """Every batch from now on."""

    def plant(trainee: Trainee) -> None:
        trainee.spoil = spoil

    return plant


def element(value: float, place: int = 0, row: int = 0) -> Callable[[Trainee], None]:
    """One number of one sample of a batch's tensor number `place`."""

    def spoil(old: Batch) -> Batch:
        tensors = list(old)
        tensors[place] = old[place].clone()
        tensors[place][row].view(-1)[0] = value
        return tuple(tensors)

    return batch(spoil)


def loss(own: Callable[..., Tensor]) -> Callable[[Trainee], None]:
    """Another loss from now on."""

    def plant(trainee: Trainee) -> None:
        trainee.loss = own

    return plant


def learning_rate(rate: float) -> Callable[[Trainee], None]:
    """A step that is far too long."""

    def plant(trainee: Trainee) -> None:
        for group in trainee.optimizers["main"].param_groups:
            group["lr"] = rate

    return plant


def state(path: str, name: str, value: float) -> Callable[[Trainee], None]:
    """The optimizer's state of a module's weight filled with a number."""

    def plant(trainee: Trainee) -> None:
        of_weight = trainee.optimizers["main"].state[trainee.model.get_submodule(path).weight]
        of_weight[name].fill_(value)

    return plant


def _both(*plants_: Callable[[Trainee], Any]) -> Callable[[Trainee], None]:
    def plant(trainee: Trainee) -> None:
        for each in plants_:
            each(trainee)

    return plant


def _padded_row(old: Batch) -> Batch:
    tokens, _ = old
    padding = torch.zeros(len(tokens), 8, dtype=torch.bool)
    padding[1] = True
    return tokens, padding


def _poisoned_offset(old: Batch) -> Batch:
    x, y = old
    offset = torch.zeros_like(x)
    offset[0, 0] = float("nan")
    return x, y, offset


def _all_padding(old: Batch) -> Batch:
    tokens, padding, y = old
    return tokens, torch.ones_like(padding), y


def _masked(tail: Callable[[], nn.Module]) -> Trainee:
    """A CNN that forbids its last class with -inf, and is never given it as a label."""
    trainee = cnn(tail=tail, end=plants.MasksLogits)
    trainee.loss = lambda m, x, y: F.cross_entropy(m(x), y.clamp(max=2))
    return trainee


def _gain(trainee: Trainee) -> None:
    trainee.model.rnn.gain = 1e3


# ------------------------------------------------------------------------------------- losses with faults


def _log_of_zero(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    told = torch.softmax(m(x).float() * 1e4, -1)
    return -torch.log(told.gather(1, y[:, None])).mean()


def _nothing_kept(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(m(x), y, reduction="none")
    keep = (y > 100).float()
    return (losses * keep).sum() / keep.sum()


def _no_temperature(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x).float() / 0.0, y)


def _distance_of_nothing(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = m(x).float()
    return (out - y).square().mean() + (out - out.detach()).square().sum().sqrt()


def _far_from_start(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The distance of the weights from a copy of them that has just been taken."""
    now = m.head.weight
    start = now.detach().clone()
    return F.mse_loss(m(x).float(), y) + ((now - start) ** 2).sum().sqrt()


def _focal(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """(1 - p)^0.5, where p has become 1."""
    logits = m(x).float()
    sure = F.one_hot(y, logits.shape[-1]) * 1e3
    p = torch.softmax(logits + sure, -1).gather(1, y[:, None])
    return F.cross_entropy(logits, y) + ((1 - p) ** 0.5).mean()


def _huge_factor(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m(x).float(), y) * 1e39


def _half_of_a_square(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    missed = (m(x).float() - y) * 1e3 + 300.0
    return (missed.half() * missed.half()).float().mean()


def _changed_afterwards(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The input is overwritten once the model has seen it."""
    out = m(x)
    with torch.no_grad():
        x.zero_()
    return F.mse_loss(out.float(), y)


def _divides_by_its_spread(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = m(x).float()
    return F.mse_loss(out, y) + (out / (out - out.detach())).mean()


# ------------------------------------------------------------------------------------------------- rows

FORWARD_OVERFLOWS = [
    Fault(
        "an activation multiplied by 1e7",
        "CNN",
        partial(cnn, tail=plants.Amplifies),
        Expected("tail", "mul", "overflow", line="* self.times(1e7)"),
    ),
    Fault(
        "squares of numbers above 256",
        "CNN",
        partial(cnn, middle=plants.Squares),
        Expected("middle", "mul", "overflow", line="wide * wide"),
    ),
    Fault(
        "a convolution's weights grown a thousandfold and more",
        "CNN",
        cnn,
        Expected("conv2", "conv", "overflow"),
        plant=grown("conv2", 3e5),
    ),
    Fault(
        "one weight of the head beyond fp16",
        "CNN",
        cnn,
        Expected("head", "linear", "overflow"),
        plant=weight("head", 1e5),
    ),
    Fault(
        "one bright pixel, 1e6",
        "CNN",
        cnn,
        Expected("conv1", "conv", "overflow"),
        plant=element(1e6),
    ),
    Fault(
        "a cast of the script's own to fp16",
        "CNN",
        partial(cnn, tail=plants.Halves),
        Expected("tail", "half", "overflow", line="wide.half()"),
        mended=False,
    ),
    Fault(
        "exp, that FP32 holds, then multiplied in fp16",
        "CNN",
        partial(cnn, tail=plants.Exponential),
        Expected("head", "linear", "overflow"),
    ),
    Fault(
        "a fourth power, multiplied in fp16 afterwards",
        "transformer",
        partial(transformer, middle=plants.Powers),
        Expected("blocks.1.mlp.down", "linear", "overflow"),
    ),
    Fault(
        "a softmax without its maximum",
        "transformer",
        partial(transformer, tail=plants.NaiveSoftmax),
        Expected("tail", "exp", "overflow", line="torch.exp("),
        mended=False,
    ),
    Fault(
        "attention scores of large queries and keys",
        "transformer",
        transformer,
        Expected("blocks.0.attn", "matmul", "overflow", line="q @ k"),
        plant=grown("blocks.0.attn.qkv", 3000.0),
    ),
    Fault(
        "an MLP's weights grown",
        "transformer",
        transformer,
        Expected("blocks.1.mlp.up", "linear", "overflow"),
        plant=grown("blocks.1.mlp.up", 6e5),
    ),
    Fault(
        "outer products of large features",
        "transformer",
        partial(transformer, middle=plants.Scores),
        Expected("blocks.1.mlp.middle", "matmul", "overflow", line="torch.einsum"),
    ),
    Fault(
        "a product of two projections",
        "transformer",
        partial(transformer, tail=lambda: plants.Bilinear(16)),
        Expected("tail", "mul", "overflow", line="self.one(x"),
    ),
    Fault(
        "a sum by hand in fp16",
        "recurrent",
        partial(recurrent, tail=plants.AddsUp),
        Expected("tail", "add", "overflow", line="total + part"),
    ),
    Fault(
        "a variance by hand in fp16",
        "recurrent",
        partial(recurrent, tail=plants.Variance),
        Expected("tail", "mul", "overflow", line="(wide * wide).mean"),
    ),
    Fault(
        "a ReLU recurrence that explodes",
        "recurrent",
        partial(recurrent, OwnCell),
        Expected("rnn.again", "linear", "overflow"),
        plant=grown("rnn.again", 300.0),
    ),
    Fault(
        "an LSTM given numbers beyond fp16",
        "recurrent",
        partial(recurrent, front=plants.Exponential),
        Expected("rnn", "lstm", "overflow"),
    ),
    Fault(
        "a GRU whose input weights are beyond fp16",
        "recurrent",
        partial(recurrent, nn.GRU),
        Expected("rnn", "gru", "overflow", "backward"),  # forward, the gates absorb the infinity
        plant=weight("rnn", 1e5, "weight_ih_l0"),
    ),
    Fault(
        "a residual branch as large as its stream",
        "perceptron",
        partial(stack, between=plants.Residual),
        Expected("between", "add", "overflow", line="branch + branch"),
    ),
    Fault(
        "a shared layer that overflows in a later of its calls",
        "perceptron",
        stack,
        Expected("shared.0", "linear", "overflow"),
        plant=grown("shared.0", 120.0),
    ),
    Fault(
        "one step with a learning rate of 1e7",
        "CNN",
        partial(cnn, optimizer=sgd),
        Expected("conv1", "conv", "overflow"),
        plant=learning_rate(1e7),
        delay=1,
    ),
    Fault(
        "a generator's output multiplied by 1e7",
        "GAN",
        partial(gan, generator_middle=plants.Amplifies),
        (
            Expected("", "", "input", part="critic", also="first"),
            Expected("middle", "mul", "overflow", part="generator", line="* self.times(1e7)"),
        ),
    ),
    Fault(
        "a critic's squared features",
        "GAN",
        partial(gan, critic_middle=plants.Squares),
        Expected("middle", "mul", "overflow", part="critic", line="wide * wide"),
    ),
    Fault(
        "a latent spread of exp(100)",
        "CNN",
        partial(autoencoder, plants.Reparameterises),
        Expected("middle", "exp", "overflow", line="torch.exp(0.5"),
        mended=False,
    ),
    Fault(
        "a transposed convolution's weights grown",
        "CNN",
        autoencoder,
        Expected("up", "conv_transpose", "overflow"),
        plant=grown("up", 1e6),
    ),
    Fault(
        "PyTorch's encoder, its second layer's weights grown",
        "transformer",
        encoder,
        Expected("encoder.layers.1.linear2", "linear", "overflow"),
        plant=grown("encoder.layers.1.linear2", 6e5),
    ),
    Fault(
        "bf16: a product beyond FP32's largest number",
        "CNN",
        partial(cnn, tail=plants.WideHuge),
        Expected("tail", "mul", "overflow", line="huge * huge"),
        precision="bf16,loss_scale=1",
        mended=False,
    ),
    Fault(
        "bf16: weights of 1e37 sum to infinity",
        "perceptron",
        stack,
        Expected("head", "linear", "overflow"),
        plant=_both(grown("head", 1e38), grown("shared.0", 100.0)),
        precision="bf16,loss_scale=1",
        mended=False,
    ),
]

NO_RESULT_FORWARD = [
    Fault(
        "an eps of 1e-8, which fp16 rounds to 0",
        "CNN",
        partial(cnn, tail=plants.SmallEps),
        Expected("tail", "div", "invalid", line="x / (spread + 1e-8)"),
    ),
    Fault(
        "a share of a sum that is 0",
        "recurrent",
        partial(recurrent, tail=plants.Share),
        Expected("tail", "div", "invalid", line="x / x.sum"),
        mended=False,
    ),
    Fault(
        "the inverse root of a variance of 0",
        "transformer",
        partial(transformer, tail=plants.InverseRoot),
        Expected("tail", "rsqrt", "invalid", line="torch.rsqrt"),
        mended=False,
    ),
    Fault(
        "a LayerNorm without eps over a constant row",
        "transformer",
        partial(transformer, tail=lambda: plants.Normal(nn.LayerNorm(16, eps=0.0))),
        Expected("tail.norm", "layer_norm", "invalid"),
        mended=False,
    ),
    Fault(
        "a GroupNorm without eps over a constant picture",
        "CNN",
        partial(cnn, middle=lambda: plants.Normal(nn.GroupNorm(2, 4, eps=0.0))),
        Expected("middle.norm", "group_norm", "invalid"),
        mended=False,
    ),
    Fault(
        "an RMSNorm without eps over a row of zeros",
        "recurrent",
        partial(recurrent, tail=lambda: plants.Normal(nn.RMSNorm(8, eps=0.0), 0.0)),
        Expected("tail.norm", "rms_norm", "invalid"),
        mended=False,
    ),
    Fault(
        "a vector of length 0 brought to length 1",
        "recurrent",
        partial(recurrent, nn.GRU, tail=plants.UnitLength),
        Expected("tail", "normalize", "invalid", line="F.normalize"),
        mended=False,
    ),
    Fault(
        "the logarithm of 0",
        "CNN",
        partial(cnn, tail=plants.Logarithm),
        Expected("tail", "log", "invalid", line="torch.log("),
        mended=False,
    ),
    Fault(
        "0 log 0 in an entropy",
        "transformer",
        partial(transformer, tail=plants.Entropy),
        Expected("tail", "log", "invalid", line="p * torch.log(p)"),
        mended=False,
    ),
    Fault(
        "log-odds of a certainty",
        "GAN",
        partial(gan, critic_middle=plants.Odds),
        Expected("middle", "logit", "invalid", part="critic", line="torch.logit"),
        mended=False,
    ),
    Fault(
        "1 / 0",
        "perceptron",
        partial(stack, tail=plants.Reciprocal),
        Expected("tail", "reciprocal", "invalid", line="torch.reciprocal"),
        mended=False,
    ),
    Fault(
        "the root of a negative number",
        "recurrent",
        partial(recurrent, tail=plants.NegativeRoot),
        Expected("tail", "sqrt", "invalid", line="torch.sqrt"),
        mended=False,
    ),
    Fault(
        "the mean over a mask that keeps nothing",
        "transformer",
        partial(transformer, tail=plants.KeepsNothing),
        Expected("tail", "div", "invalid", line="/ keep.sum"),
        mended=False,
    ),
    Fault(
        "a sentence whose every token is padding",
        "transformer",
        partial(transformer, padded=True),
        Expected("blocks.0.attn", "softmax", "invalid", line="torch.softmax"),
        plant=batch(_padded_row),
        mended=False,
    ),
    Fault(
        "PyTorch's encoder, a batch of nothing but padding, its mean of what is left",
        "transformer",
        partial(encoder, plants.KeepsNothing),
        Expected("tail", "div", "invalid", line="/ keep.sum"),
        plant=_both(Trainee.arm, batch(_all_padding)),
        mended=False,
    ),
    Fault(
        "a mask by 0 times -inf",
        "transformer",
        partial(transformer, middle=plants.MaskedByProduct),
        Expected("blocks.1.mlp.middle", "mul", "invalid", line="penalty = closed"),
        mended=False,
    ),
    Fault(
        "divided by what dropout set to 0",
        "perceptron",
        partial(stack, tail=plants.Dropped),
        Expected("tail", "div", "invalid", line="x / F.dropout"),
        mended=False,
    ),
    Fault(
        "a running average that has sunk to 0",
        "perceptron",
        partial(stack, tail=plants.Decays),
        Expected("tail", "div", "invalid", line="x / self.average"),
        mended=False,
    ),
    Fault(
        "a frozen BatchNorm with a negative variance",
        "CNN",
        partial(cnn, middle=lambda: plants.Frozen(4)),
        Expected("middle.norm", "batch_norm", "invalid"),
        plant=buffer("middle.norm", "running_var", -1.0),
        mended=False,
    ),
]

NO_RESULT_BACKWARD = [
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

HELD = [
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
        plant=batch(_poisoned_offset),
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
        plant=_gain,
    ),
    Fault(
        "a state carried from batch to batch in an attribute, growing",
        "recurrent",
        partial(recurrent, Carried),
        Expected("rnn", "mul", "overflow", line="state * self.gain"),
        plant=_gain,
    ),
]

OUTSIDE_THE_MODEL = [
    Fault(
        "the loss takes the logarithm of 0",
        "CNN",
        cnn,
        Expected(OUTSIDE, "log", "invalid", line="torch.log("),
        plant=loss(_log_of_zero),
        mended=False,
        repeats=2,
    ),
    Fault(
        "the loss is the mean of nothing",
        "CNN",
        cnn,
        Expected(OUTSIDE, "div", "invalid", line="/ keep.sum()"),
        plant=loss(_nothing_kept),
        mended=False,
        repeats=2,
    ),
    Fault(
        "logits divided by a temperature of 0",
        "CNN",
        cnn,
        Expected(OUTSIDE, "div", "invalid", line="m(x).float() / 0.0"),
        plant=loss(_no_temperature),
        mended=False,
        repeats=2,
    ),
    Fault(
        "the root of a distance of 0 in the loss",
        "recurrent",
        recurrent,
        Expected(OUTSIDE, "sqrt", "invalid", "backward", line=".sum().sqrt()"),
        plant=loss(_distance_of_nothing),
        mended=False,
        repeats=2,
    ),
    Fault(
        "the slope of (1 - p)^0.5 at p = 1 in the loss",
        "CNN",
        cnn,
        Expected(OUTSIDE, "pow", "invalid", "backward", line="(1 - p) ** 0.5"),
        plant=loss(_focal),
        mended=False,
        repeats=2,
    ),
    Fault(
        "a penalty on the weights' distance from their start, which is 0",
        "perceptron",
        stack,
        Expected(OUTSIDE, "sqrt", "invalid", "backward", line=".sum().sqrt()"),
        plant=loss(_far_from_start),
        seen=False,
        mended=False,
        repeats=2,
    ),
    Fault(
        "a loss multiplied by 1e39",
        "perceptron",
        stack,
        Expected(OUTSIDE, "mul", "overflow", line="* 1e39"),
        plant=loss(_huge_factor),
        mended=False,
        repeats=2,
    ),
    Fault(
        "a loss squared in fp16 by the script",
        "perceptron",
        stack,
        Expected(OUTSIDE, "mul", "overflow", line="missed.half() * missed.half()"),
        plant=loss(_half_of_a_square),
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
        plant=loss(_divides_by_its_spread),
        mended=False,
        repeats=2,
    ),
]


HARDER = [
    Fault(
        "a product inside a checkpoint",
        "transformer",
        partial(transformer, middle=plants.Amplifies, how="not reentrant"),
        Expected("blocks.1.mlp.middle", "mul", "overflow", line="* self.times(1e7)"),
    ),
    Fault(
        "a product inside a reentrant checkpoint",
        "transformer",
        partial(transformer, middle=plants.Amplifies, how="reentrant"),
        Expected("blocks.1.mlp.middle", "mul", "overflow", line="* self.times(1e7)"),
    ),
    Fault(
        "a slope inside a checkpoint",
        "transformer",
        partial(transformer, middle=plants.Root, how="not reentrant"),
        Expected("blocks.1.mlp.middle", "sqrt", "invalid", "backward", line="torch.sqrt"),
        mended=False,
    ),
    Fault(
        "a slope inside a reentrant checkpoint",
        "transformer",
        partial(transformer, middle=plants.Root, how="reentrant"),
        Expected("blocks.1.mlp.middle", "sqrt", "invalid", "backward", line="torch.sqrt"),
        mended=False,
    ),
    Fault(
        "the second of four losses of a window",
        "perceptron",
        partial(stack, accumulate=4),
        Expected("", "", "input", also="shared.0"),
        plant=element(float("nan"), row=2),
        options={"accumulate": 4},
        mended=False,
    ),
    Fault(
        "the last of four losses of a window, in the model",
        "perceptron",
        partial(stack, accumulate=4),
        Expected("shared.0", "linear", "overflow"),
        plant=element(1e6, row=7),
        options={"accumulate": 4},
    ),
    Fault(
        "one of two heads, each with its own optimizer",
        "perceptron",
        partial(two_heads, right=plants.Amplifies, split=True),
        Expected("right.0", "mul", "overflow", part="right", line="* self.times(1e7)"),
    ),
    Fault(
        "the slope of one of two heads",
        "perceptron",
        partial(two_heads, left=plants.Root),
        Expected("left.0", "sqrt", "invalid", "backward", line="torch.sqrt"),
        mended=False,
    ),
    Fault(
        "what a random number decides",
        "transformer",
        partial(transformer, middle=plants.Sometimes, dropout=0.1),
        Expected("blocks.1.mlp.middle", "mul", "overflow", line="gain * (x.clamp"),
    ),
    Fault(
        "an input that is overwritten after the call",
        "perceptron",
        partial(stack, tail=plants.Amplifies),
        Expected("tail", "mul", "overflow", line="* self.times(1e7)"),
        plant=_both(Trainee.arm, loss(_changed_afterwards)),
        mended=None,
        repeats=2,
    ),
    Fault(
        "a fault while the loss scale still looks for its place",
        "CNN",
        partial(cnn, tail=plants.Amplifies),
        Expected("tail", "mul", "overflow", line="* self.times(1e7)"),
        scale=2.0**24,
    ),
    Fault(
        "a slope while the loss scale still looks for its place",
        "CNN",
        partial(cnn, tail=plants.Root),
        Expected("tail", "sqrt", "invalid", "backward", line="torch.sqrt"),
        scale=2.0**24,
        mended=False,
    ),
    Fault(
        "a fault beside a mask of -inf, a logged infinity and an unused one",
        "transformer",
        partial(
            transformer,
            middle=plants.LogsPerplexity,
            tail=lambda: nn.Sequential(plants.Unused(), plants.Share()),
        ),
        Expected("tail.1", "div", "invalid", line="x / x.sum"),
        mended=False,
    ),
    Fault(
        "a slope, in a model whose output holds -inf on purpose",
        "CNN",
        partial(_masked, plants.Root),
        Expected("tail", "sqrt", "invalid", "backward", line="torch.sqrt"),
        mended=False,
        seen=False,
    ),
    Fault(
        "a division, in a model whose output holds -inf on purpose",
        "CNN",
        partial(_masked, plants.Share),
        Expected("tail", "div", "invalid", line="x / x.sum"),
        mended=False,
    ),
    Fault(
        "under clipping and a penalty on the critic's slope",
        "GAN",
        partial(gan, critic_middle=plants.Amplifies, penalty=True),
        Expected("middle", "mul", "overflow", part="critic", line="* self.times(1e7)"),
        options={"clip_norm": 1.0},
    ),
    Fault(
        "with Mezzo's AdamW",
        "recurrent",
        partial(recurrent, tail=plants.Logarithm, optimizer=lambda p: mezzo.optim.AdamW(p, lr=1e-3)),
        Expected("tail", "log", "invalid", line="torch.log("),
        mended=False,
    ),
    Fault(
        "with fp16 weights and FP32 masters",
        "perceptron",
        partial(stack, tail=plants.Squares),
        Expected("tail", "mul", "overflow", line="wide * wide"),
        options={"weights": "masters"},
    ),
]

FAULTS: list[Fault] = [
    *FORWARD_OVERFLOWS,
    *NO_RESULT_FORWARD,
    *NO_RESULT_BACKWARD,
    *HELD,
    *OUTSIDE_THE_MODEL,
    *HARDER,
]
