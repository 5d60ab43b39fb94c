"""The planted faults: what is planted, and what a search for the culprit has to say of it.

Each row is a truth about the code of `faults.plants` and `faults.models`, checked without any tracer by `plain.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import nn

import mezzo
from faults import planting, plants
from faults.models import (
    FAMILIES,
    Carried,
    OwnCell,
    Trainee,
    attends,
    autoencoder,
    cnn,
    encoder,
    experts,
    gan,
    gated,
    in_a_dataclass,
    nested,
    parts,
    recurrent,
    residuals,
    scored,
    sgd,
    stack,
    stacked,
    taught,
    tied,
    transformer,
    two_heads,
    two_losses,
    weighed,
    with_a_criterion,
)
from faults.planting import (
    all_padding,
    attribute,
    batch,
    both,
    buffer,
    certain_of_it,
    closed_row,
    contrast,
    element,
    gain,
    grown,
    iterated,
    learning_rate,
    loss,
    masked,
    mezzos,
    padded_row,
    poisoned_offset,
    split_weights,
    state,
    strong,
    uncertain,
    weight,
)
from mezzo.core.overflow import OUTSIDE

PLANTED = 2
"""The step in which a fault acts for the first time."""


@dataclass(frozen=True)
class Expected:
    """What is to be found.

    Args:
        module: path of the culprit.
        op: key of `score.FAMILIES`, or the operation's own name in small letters; "" where there is none.
        cause: a key of `mezzo.core.overflow.CAUSES`.
        direction: forward or backward.
        line: part of the code of the user's line; "" where the operation is inside of a module of torch.
        part: whose step, in a training of several.
        also: another path that says the same.
        in_script: the path in a plain script, where another module is the one that is called.
    """

    module: str
    op: str
    cause: str
    direction: str = "forward"
    line: str = ""
    part: str = "main"
    also: str = ""
    in_script: str | None = None


def overflow(module: str, op: str, line: str = "", **others: Any) -> Expected:
    return Expected(module, op, "overflow", line=line, **others)


def invalid(module: str, op: str, line: str = "", **others: Any) -> Expected:
    return Expected(module, op, "invalid", line=line, **others)


def slope(module: str, op: str, line: str = "", **others: Any) -> Expected:
    return Expected(module, op, "invalid", "backward", line, **others)


def given(module: str, **others: Any) -> Expected:
    return Expected(module, "", "input", **others)


def held(module: str, **others: Any) -> Expected:
    return Expected(module, "", "state", **others)


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Args:
        name: what it is.
        make: makes the training.
        family: CNN, transformer, recurrent, GAN or perceptron.
        all_expected: what is to be found, in one step or in several parts' steps.
        mended: whether the same step is finite in FP32; None where it can't be run there.
        repeats: how many steps it acts in; the last one's finding counts.
        plant: done before step `PLANTED`; by default what is built in is armed.
        precision: the policy.
        scale: first loss scale: low enough that nothing else overflows.
        delay: how many steps after it was planted it acts.
        options: of `MixedPrecision`.
        seen: whether `plain.py`, which looks at modules only, can tell.
    """

    name: str
    make: Callable[[], Trainee]
    family: str
    all_expected: tuple[Expected, ...]
    mended: bool | None
    repeats: int
    plant: Callable[[Trainee], Any] = Trainee.arm
    precision: str = "fp16"
    scale: float = 2.0**6
    delay: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    seen: bool = True


_FIELDS = {one.name for one in fields(Fault)}


def fault(
    name: str,
    expected: Expected | tuple[Expected, ...],
    make: Callable[..., Trainee],
    *args: Any,
    **options: Any,
) -> Fault:
    """A row; options that are no field of `Fault` are those of `make`.

    Unless the row says so, FP32 holds what overflows and nothing else, and a fault outside of the model acts twice.
    """
    row = {name: options.pop(name) for name in _FIELDS & options.keys()}
    every = expected if isinstance(expected, tuple) else (expected,)
    row.setdefault("mended", all(one.cause == "overflow" for one in every))
    row.setdefault("repeats", 2 if all(one.module == OUTSIDE for one in every) else 1)
    return Fault(name, partial(make, *args, **options), FAMILIES.get(make, "perceptron"), every, **row)


# fmt: off
FAULTS: list[Fault] = [
    # Too large for the format, forward.
    fault("an activation multiplied by 1e7", overflow("tail", "mul", "* self.times(1e7)"), cnn,
          tail=plants.Amplifies),
    fault("squares of numbers above 256", overflow("middle", "mul", "wide * wide"), cnn,
          middle=plants.Squares),
    fault("a convolution's weights grown a thousandfold and more", overflow("conv2", "conv", "self.conv2("),
          cnn, plant=grown("conv2", 3e5)),
    fault("one weight of the head beyond fp16", overflow("head", "linear", "self.head("), cnn,
          plant=weight("head", 1e5)),
    fault("one bright pixel, 1e6", overflow("conv1", "conv", "self.conv1("), cnn, plant=element(1e6)),
    fault("a cast of the script's own to fp16", overflow("tail", "half", "wide.half()"), cnn,
          tail=plants.Halves, mended=False),
    fault("exp, that FP32 holds, then multiplied in fp16", overflow("head", "linear", "self.head("), cnn,
          tail=plants.Exponential),
    fault("a fourth power, multiplied in fp16 afterwards",
          overflow("blocks.1.mlp.down", "linear", "self.down("), transformer, middle=plants.Powers),
    fault("a softmax without its maximum", overflow("tail", "exp", "torch.exp("), transformer,
          tail=plants.NaiveSoftmax, mended=False),
    fault("attention scores of large queries and keys", overflow("blocks.0.attn", "matmul", "q @ k"),
          transformer, plant=grown("blocks.0.attn.qkv", 3000.0)),
    fault("an MLP's weights grown", overflow("blocks.1.mlp.up", "linear", "self.up("), transformer,
          plant=grown("blocks.1.mlp.up", 6e5)),
    fault("outer products of large features", overflow("blocks.1.mlp.middle", "matmul", "torch.einsum"),
          transformer, middle=plants.Scores),
    fault("a product of two projections", overflow("tail", "mul", "self.one(x"), transformer,
          tail=lambda: plants.Bilinear(16)),
    fault("a sum by hand in fp16", overflow("tail", "add", "total + part"), recurrent, tail=plants.AddsUp),
    fault("a variance by hand in fp16", overflow("tail", "mul", "(wide * wide).mean"), recurrent,
          tail=plants.Variance),
    fault("a ReLU recurrence that explodes", overflow("rnn.again", "linear", "self.again("), recurrent,
          OwnCell, plant=grown("rnn.again", 300.0)),
    fault("an LSTM given numbers beyond fp16", overflow("rnn", "lstm", "self.rnn("), recurrent,
          front=plants.Exponential),
    fault("a GRU whose input weights are beyond fp16",
          overflow("rnn", "gru", "self.rnn(", direction="backward"), recurrent, nn.GRU,
          plant=weight("rnn", 1e5, "weight_ih_l0")),
    fault("a residual branch as large as its stream", overflow("between", "add", "branch + branch"), stack,
          between=plants.Residual),
    fault("a shared layer that overflows in a later of its calls",
          overflow("shared.0", "linear", "self.shared("), stack, plant=grown("shared.0", 120.0)),
    fault("one step with a learning rate of 1e7", overflow("conv1", "conv", "self.conv1("), cnn,
          optimizer=sgd, plant=learning_rate(1e7), delay=1),
    fault("a generator's output multiplied by 1e7",
          (given("", part="critic", also="first"), overflow("middle", "mul", "* self.times(1e7)", part="generator")),
          gan, generator_middle=plants.Amplifies, mended=True),
    fault("a critic's squared features", overflow("middle", "mul", "wide * wide", part="critic"), gan,
          critic_middle=plants.Squares),
    fault("a latent spread of exp(100)", overflow("middle", "exp", "torch.exp(0.5"), autoencoder,
          plants.Reparameterises, mended=False),
    fault("a transposed convolution's weights grown", overflow("up", "conv_transpose", "self.up("),
          autoencoder, plant=grown("up", 1e6)),
    fault("PyTorch's encoder, its second layer's weights grown",
          overflow("encoder.layers.1.linear2", "linear", "self.encoder("), encoder,
          plant=grown("encoder.layers.1.linear2", 6e5)),
    fault("a product in place", overflow("tail", "mul", "x.mul_("), cnn, tail=plants.InPlace),
    fault("a sum that the script wants in fp16",
          overflow("blocks.1.mlp.middle", "sum", "dtype=torch.float16"), transformer, middle=plants.HalfSum,
          mended=False),
    fault("a running product beyond FP32", overflow("tail", "cumprod", "torch.cumprod"), recurrent,
          tail=plants.RunningProduct, mended=False),
    fault("both heads of a model, the left one first", overflow("left.0", "mul", "wide * wide"), two_heads,
          left=plants.Squares, right=plants.Amplifies),
    fault("bf16: a product beyond FP32's largest number", overflow("tail", "mul", "huge * huge"), cnn,
          tail=plants.WideHuge, mended=False, precision="bf16,loss_scale=1"),
    fault("bf16: weights of 1e37 sum to infinity", overflow("head", "linear", "self.head("), stack,
          plant=both(grown("head", 1e38), grown("shared.0", 100.0)), mended=False,
          precision="bf16,loss_scale=1"),
    # No finite result for what went in, forward.
    fault("an eps of 1e-8, which fp16 rounds to 0", invalid("tail", "div", "x / (spread + 1e-8)"), cnn,
          tail=plants.SmallEps, mended=True),
    fault("a share of a sum that is 0", invalid("tail", "div", "x / x.sum"), recurrent, tail=plants.Share),
    fault("the inverse root of a variance of 0", invalid("tail", "rsqrt", "torch.rsqrt"), transformer,
          tail=plants.InverseRoot),
    fault("a LayerNorm without eps over a constant row", invalid("tail.norm", "layer_norm", "self.norm("),
          transformer, tail=lambda: plants.Normal(nn.LayerNorm(16, eps=0.0))),
    fault("a GroupNorm without eps over a constant picture",
          invalid("middle.norm", "group_norm", "self.norm("), cnn,
          middle=lambda: plants.Normal(nn.GroupNorm(2, 4, eps=0.0))),
    fault("an RMSNorm without eps over a row of zeros", invalid("tail.norm", "rms_norm", "self.norm("),
          recurrent, tail=lambda: plants.Normal(nn.RMSNorm(8, eps=0.0), 0.0)),
    fault("a vector of length 0 brought to length 1", invalid("tail", "normalize", "F.normalize"), recurrent,
          nn.GRU, tail=plants.UnitLength),
    fault("the logarithm of 0", invalid("tail", "log", "torch.log("), cnn, tail=plants.Logarithm),
    fault("0 log 0 in an entropy", invalid("tail", "log", "p * torch.log(p)"), transformer,
          tail=plants.Entropy),
    fault("log-odds of a certainty", invalid("middle", "logit", "torch.logit", part="critic"), gan,
          critic_middle=plants.Odds),
    fault("1 / 0", invalid("tail", "reciprocal", "torch.reciprocal"), stack, tail=plants.Reciprocal),
    fault("the root of a negative number", invalid("tail", "sqrt", "torch.sqrt"), recurrent,
          tail=plants.NegativeRoot),
    fault("the mean over a mask that keeps nothing", invalid("tail", "div", "/ keep.sum"), transformer,
          tail=plants.KeepsNothing),
    fault("a sentence whose every token is padding", invalid("blocks.0.attn", "softmax", "torch.softmax"),
          transformer, padded=True, plant=batch(padded_row)),
    fault("PyTorch's encoder, a batch of nothing but padding, its mean of what is left",
          invalid("tail", "div", "/ keep.sum"), encoder, plants.KeepsNothing,
          plant=both(Trainee.arm, batch(all_padding))),
    fault("a weight that is standardised, and has become constant",
          invalid("tail", "div", "centred / centred.norm"), stack, tail=lambda: plants.StandardisedWeight(8),
          plant=grown("tail", 0.0)),
    fault("weight_norm of a weight of zeros", invalid("tail.parametrizations.weight.0", "weight_norm"), stack,
          tail=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
          plant=grown("tail.parametrizations.weight", 0.0, "original1")),
    fault("a model that returns its own loss, the logarithm of 0",
          invalid("", "log", "-torch.log(torch.where"), scored, plant=certain_of_it),
    fault("a mask by 0 times -inf", invalid("blocks.1.mlp.middle", "mul", "penalty = closed"), transformer,
          middle=plants.MaskedByProduct),
    fault("divided by what dropout set to 0", invalid("tail", "div", "x / F.dropout"), stack,
          tail=plants.Dropped),
    fault("a running average that has sunk to 0", invalid("tail", "div", "x / self.average"), stack,
          tail=plants.Decays),
    fault("a frozen BatchNorm with a negative variance", invalid("middle.norm", "batch_norm", "self.norm("),
          cnn, middle=lambda: plants.Frozen(4), plant=buffer("middle.norm", "running_var", -1.0)),
    # Finite forward, and not backward.
    fault("the slope of a root at 0", slope("tail", "sqrt", "torch.sqrt"), cnn, tail=plants.Root),
    fault("the slope of a length at the origin", slope("tail", "sqrt", "torch.sqrt"), recurrent,
          tail=plants.Length),
    fault("the slope of x^0.5 at 0", slope("blocks.1.mlp.middle", "pow", ".pow(0.5)"), transformer,
          middle=plants.HalfPower),
    fault("where() around a log(0)", slope("tail", "log", "torch.log(x)"), cnn, tail=plants.Chosen),
    fault("a clamp after log(0)", slope("tail", "log", "torch.log("), transformer, tail=plants.Clamped),
    fault("the slope of principal axes of equal length", slope("tail", "eigh", "torch.linalg.eigh"),
          recurrent, tail=plants.Axes),
    fault("the slope of acos at 1", slope("middle", "acos", "torch.acos", part="generator"), gan,
          generator_middle=plants.ArcCosine),
    fault("the slope of x / y at a small y, beyond fp16",
          overflow("tail", "div", "/ small", direction="backward"), stack, tail=plants.Steep),
    fault("the slope of normalize() at 0, which is 1 / 1e-12",
          overflow("tail", "normalize", "F.normalize", direction="backward"), recurrent,
          tail=lambda: plants.UnitLength(1e-12)),
    fault("a hook of the script's own on a gradient of 0", slope("tail", ""), recurrent,
          tail=plants.HooksAGradient),
    fault("a slope of 1e30 on its way into fp16", overflow("tail", "cast", "x.float()", direction="backward"),
          cnn, tail=plants.Frequencies),
    fault("a backward by hand with 0 / 0 in it", slope("tail", "careless", "_Careless.apply"), cnn,
          tail=plants.OwnFunction),
    # What was held or handed in was not finite, or not what it had been.
    fault("a NaN in the head's weight", held("head"), cnn, plant=weight("head", float("nan"))),
    fault("an infinite bias in an MLP", held("blocks.0.mlp.up"), transformer,
          plant=weight("blocks.0.mlp.up", float("inf"), "bias")),
    fault("a NaN in a BatchNorm's weight", held("norm1"), cnn, plant=weight("norm1", float("nan"))),
    fault("a frozen BatchNorm with a NaN mean", held("middle.norm"), cnn, middle=lambda: plants.Frozen(4),
          plant=buffer("middle.norm", "running_mean", float("nan"))),
    fault("a NaN in Adam's first moment, one step later in the weight", held("head"), recurrent,
          plant=state("head", "exp_avg", float("nan")), delay=1),
    fault("an embedding's row that is NaN", held("embed"), transformer, plant=grown("embed", float("nan"))),
    fault("a recurrent weight that is infinite", held("rnn"), recurrent, nn.GRU,
          plant=weight("rnn", float("inf"), "weight_hh_l0")),
    fault("a NaN pixel", given("", also="conv1"), cnn, plant=element(float("nan"))),
    fault("an infinite sample", given("", also="inner"), recurrent, plant=element(float("inf"), row=2)),
    fault("a NaN in an argument by the side", given("", also="head"), stack, plant=batch(poisoned_offset)),
    fault("bf16: a NaN pixel", given("", also="conv1"), cnn, plant=element(float("nan"), row=3),
          precision="bf16,loss_scale=1"),
    fault("a state carried from batch to batch in a buffer, growing",
          overflow("rnn", "mul", "state * self.gain"), recurrent, partial(Carried, buffer=True), plant=gain),
    fault("a state carried from batch to batch in an attribute, growing",
          overflow("rnn", "mul", "state * self.gain"), recurrent, Carried, plant=gain),
    # Outside of the model.
    fault("the loss takes the logarithm of 0", invalid(OUTSIDE, "log", "torch.log("), cnn,
          plant=loss(planting.log_of_zero)),
    fault("the loss is the mean of nothing", invalid(OUTSIDE, "div", "/ keep.sum()"), cnn,
          plant=loss(planting.nothing_kept)),
    fault("logits divided by a temperature of 0", invalid(OUTSIDE, "div", "m(x).float() / 0.0"), cnn,
          plant=loss(planting.no_temperature)),
    fault("the root of a distance of 0 in the loss", slope(OUTSIDE, "sqrt", ".sum().sqrt()"), recurrent,
          plant=loss(planting.distance_of_nothing)),
    fault("the slope of (1 - p)^0.5 at p = 1 in the loss", slope(OUTSIDE, "pow", "(1 - p) ** 0.5"), cnn,
          plant=loss(planting.focal)),
    fault("a penalty on the weights' distance from their start, which is 0",
          slope(OUTSIDE, "sqrt", ".sum().sqrt()"), stack, plant=loss(planting.far_from_start), seen=False),
    fault("a loss multiplied by 1e39", overflow(OUTSIDE, "mul", "* 1e39"), stack,
          plant=loss(planting.huge_factor), mended=False),
    fault("a loss squared in fp16 by the script", overflow(OUTSIDE, "mul", "missed.half() * missed.half()"),
          stack, plant=loss(planting.half_of_a_square)),
    fault("a deviation of 0 in a density", invalid(OUTSIDE, "density", ".log_prob(y)"), recurrent,
          plant=loss(planting.certain)),
    fault("a teacher that overflows, which nobody trains", overflow(OUTSIDE, "mul", "wide * wide"), taught,
          plants.Squares),
    fault("a target that is NaN", given(OUTSIDE), recurrent, plant=element(float("nan"), place=1)),
    fault("a loss divided by 0", invalid(OUTSIDE, "div", "out / (out - out.detach())"), recurrent,
          plant=loss(planting.divides_by_its_spread)),
    # The same faults where they are harder to see.
    fault("a product inside a checkpoint", overflow("blocks.1.mlp.middle", "mul", "* self.times(1e7)"),
          transformer, middle=plants.Amplifies, how="not reentrant"),
    fault("a product inside a reentrant checkpoint",
          overflow("blocks.1.mlp.middle", "mul", "* self.times(1e7)"), transformer, middle=plants.Amplifies,
          how="reentrant"),
    fault("a slope inside a checkpoint", slope("blocks.1.mlp.middle", "sqrt", "torch.sqrt"), transformer,
          middle=plants.Root, how="not reentrant"),
    fault("a slope inside a reentrant checkpoint", slope("blocks.1.mlp.middle", "sqrt", "torch.sqrt"),
          transformer, middle=plants.Root, how="reentrant"),
    fault("the second of four losses of a window", given("", also="shared.0"), stack, accumulate=4,
          plant=element(float("nan"), row=2), options={"accumulate": 4}),
    fault("the last of four losses of a window, in the model", overflow("shared.0", "linear", "self.shared("),
          stack, accumulate=4, plant=element(1e6, row=7), options={"accumulate": 4}),
    fault("one of two heads, each with its own optimizer",
          overflow("right.0", "mul", "* self.times(1e7)", part="right"), two_heads, right=plants.Amplifies,
          split=True),
    fault("the slope of one of two heads", slope("left.0", "sqrt", "torch.sqrt"), two_heads,
          left=plants.Root),
    fault("what a random number decides", overflow("blocks.1.mlp.middle", "mul", "gain * (x.clamp"),
          transformer, middle=plants.Sometimes, dropout=0.1),
    fault("an input that is overwritten after the call", overflow("tail", "mul", "* self.times(1e7)"), stack,
          tail=plants.Amplifies, plant=both(Trainee.arm, loss(planting.changed_afterwards)), mended=None,
          repeats=2),
    fault("a fault while the loss scale still looks for its place",
          overflow("tail", "mul", "* self.times(1e7)"), cnn, tail=plants.Amplifies, scale=2.0**24),
    fault("a slope while the loss scale still looks for its place", slope("tail", "sqrt", "torch.sqrt"), cnn,
          tail=plants.Root, scale=2.0**24),
    fault("a fault beside a mask of -inf, a logged infinity and an unused one",
          invalid("tail.1", "div", "x / x.sum"), transformer, middle=plants.LogsPerplexity,
          tail=lambda: nn.Sequential(plants.Unused(), plants.Share())),
    fault("a slope, in a model whose output holds -inf on purpose", slope("tail", "sqrt", "torch.sqrt"),
          masked, plants.Root, seen=False),
    fault("a division, in a model whose output holds -inf on purpose", invalid("tail", "div", "x / x.sum"),
          masked, plants.Share),
    fault("under clipping and a penalty on the critic's slope",
          overflow("middle", "mul", "* self.times(1e7)", part="critic"), gan, critic_middle=plants.Amplifies,
          penalty=True, options={"clip_norm": 1.0}),
    fault("with Mezzo's AdamW", invalid("tail", "log", "torch.log("), recurrent, tail=plants.Logarithm,
          optimizer=lambda p: mezzo.optim.AdamW(p, lr=1e-3)),
    fault("with fp16 weights and FP32 masters", overflow("tail", "mul", "wide * wide"), stack,
          tail=plants.Squares, options={"masters": "fp32"}),
    # Rows that were written when the tracer named all the others: how it does with faults that nobody tuned it to.
    fault("afterwards: a Gumbel noise of u = 0", invalid("tail", "log", "-torch.log(drawn)"), recurrent,
          tail=plants.Gumbel),
    fault("afterwards: the logarithm of a squashed slope", invalid("tail", "log", "torch.tanh(wide) ** 2"),
          recurrent, nn.GRU, tail=plants.Squashed),
    fault("afterwards: the inverse of softplus at 100", overflow("tail", "exp", "torch.exp(positive)"),
          transformer, tail=plants.InverseSoftplus, mended=False),
    fault("afterwards: the slope of a geometric mean at 0", slope("tail", "pow", "x.prod("), cnn,
          tail=plants.GeometricMean),
    fault("afterwards: messages added up in fp16", overflow("tail", "index_add", ".index_add("), stack,
          tail=plants.Scatters, mended=False),
    fault("afterwards: addcmul", overflow("middle", "addcmul", "torch.addcmul"), cnn, middle=plants.Combines),
    fault("afterwards: sampling positions over an extent of 0", invalid("middle", "div", "/ extent"), cnn,
          middle=plants.Samples),
    fault("afterwards: the variance of one sample", invalid("tail", "div", "- 1)"), stack,
          tail=plants.Unbiased),
    fault("afterwards: a convolution in its functional form", overflow("tail", "conv1d", "F.conv1d"), stack,
          tail=plants.Depthwise),
    fault("afterwards: a bilinear layer whose products only FP32 holds",
          overflow("head", "linear", "self.head("), stack, tail=plants.BilinearLayer),
    fault("afterwards: 1 / the distance of two rows that are the same", invalid("tail", "inverse", "1 / far"),
          recurrent, tail=plants.PicksTheWorst),
    fault("afterwards: one of four experts", overflow("experts.c", "linear", "expert(x[rows])"), experts,
          plant=grown("experts.c", 1e6)),
    fault("afterwards: a NaN in a weight that two modules share", held("embed", also="head"), tied,
          plant=grown("embed", float("nan"))),
    fault("afterwards: a buffer of positions that is infinite", held(""), tied,
          plant=buffer("", "position", float("inf"))),
    fault("afterwards: a slope behind a loop of GRU cells", slope("tail", "sqrt", "torch.sqrt"), tied,
          plants.Root),
    fault("afterwards: forward, in a model that returns a dataclass", overflow("tail", "mul", "wide * wide"),
          in_a_dataclass, plants.Squares),
    fault("afterwards: backward, in a model that returns a dataclass", slope("tail", "sqrt", "torch.sqrt"),
          in_a_dataclass, plants.Root),
    fault("afterwards: a NaN deep in an argument", given("", also="second"), nested,
          plant=batch(lambda old: (old[0].index_fill(1, torch.tensor([6]), float("nan")), old[1]))),
    fault("afterwards: forward, in a model whose parts are called one by one",
          overflow("backbone.2", "mul", "wide * wide", in_script="2"), parts, plants.Squares, repeats=2,
          seen=False),
    fault("afterwards: backward, in a model whose parts are called one by one",
          slope("backbone.2", "sqrt", "torch.sqrt", in_script="2"), parts, plants.Root, repeats=2,
          seen=False),
    fault("afterwards: a stream that thirty layers double", overflow("layers.18", "linear", "layer(x)"),
          residuals, plant=attribute("gain", 3.0)),
    fault("afterwards: a gate times a value", overflow("", "mul", "F.silu(self.gate(x)) * self.value(x)"),
          gated, plant=both(grown("gate", 1e3), grown("value", 1e3))),
    fault("afterwards: a learned scale that has grown", overflow("", "mul", "self.gamma.to(x.dtype) * x"),
          gated, plant=both(grown("", 6e4, "gamma"), grown("value", 30.0))),
    fault("afterwards: a criterion with weights of its own",
          slope(OUTSIDE, "acos", "torch.acos", in_script=""), with_a_criterion),
    fault("afterwards: a learned uncertainty", overflow(OUTSIDE, "exp", "torch.exp(-s)"), weighed,
          plant=uncertain, mended=False),
    fault("afterwards: a contrast of similarities without their maximum",
          overflow(OUTSIDE, "exp", "torch.exp(out @ out.T"), stack, plant=loss(contrast), mended=False),
    fault("afterwards: a mask of floats with a row of -inf",
          invalid("attention", "attention", "self.attention("), attends, plant=closed_row, seen=False),
    fault("afterwards: a model that is a Sequential", overflow("2", "mul", "wide * wide"), stacked,
          plants.Squares),
    fault("afterwards: two models of one graph, the first one's fault",
          slope("1", "sqrt", "torch.sqrt", part="body"), two_losses, plants.Root),
    fault("afterwards: a learning rate of NaN", held("conv1"), cnn, plant=learning_rate(float("nan")),
          delay=1),
    fault("afterwards: one real sample that is NaN", given("", part="critic", also="first"), gan,
          plant=element(float("nan"), row=4)),
    fault("afterwards: one bias beyond fp16", overflow("conv2", "conv", "self.conv2("), cnn,
          plant=weight("conv2", 1e5, "bias")),
    # Rows whose call, run again, is not the same call; and calls that are not plain ones.
    fault("again: what the module's own generator draws", overflow("tail", "mul", "drawn > 0.95"), stack,
          tail=plants.OwnGenerator, repeats=2),
    fault("again: what Python's generator draws", overflow("tail", "mul", "torch.tensor(gains)"), stack,
          tail=plants.PythonRandom, repeats=2),
    fault("again: what NumPy's generator draws", overflow("tail", "mul", "noise > 0.95"), stack,
          tail=plants.NumpyRandom, repeats=2),
    fault("again: a schedule by the number of calls", overflow("tail", "mul", "* strength"), cnn,
          tail=plants.Counts),
    fault("again: a list of what was seen", overflow("tail", "half", "self.seen[-1]"), stack,
          tail=plants.Remembers),
    fault("again: an iterator as argument", overflow("", "mul", "* self.gain"), iterated, plant=strong,
          repeats=2),
    fault("again: vmap", overflow("tail", "mul", "(row + 0.1) * gain"), stack, tail=plants.PerSample),
    fault("again: a division in place behind other writes in place", invalid("middle", "div", "x /= "), cnn,
          middle=plants.InPlaceChain),
    fault("again: an exponential on an island of FP32", overflow("tail", "exp", "torch.exp("), transformer,
          tail=plants.Island, mended=False),
    fault("again: a forward hook of the script's own",
          overflow("tail.layer", "mul", "(output + 0.1) *", also="tail"), recurrent, tail=plants.Hooked),
    fault("again: a backward hook of the script's own", slope("tail.layer", "", also="tail"), recurrent,
          tail=plants.HookedBackward),
    fault("again: a module under two names", overflow("tail.one", "linear", "self.other(", also="tail.other"),
          stack, tail=plants.Twice, plant=both(Trainee.arm, grown("tail.one", 10.0))),
    fault("again: gradients released in backward", slope("tail", "sqrt", "torch.sqrt"), stack,
          tail=plants.Root, optimizer=mezzos, options={"release_gradients": True}),
    fault("again: bf16 weights, split from their masters", slope("tail", "sqrt", "torch.sqrt"), stack,
          tail=plants.Root, optimizer=split_weights, precision="bf16,loss_scale=1",
          options={"masters": "split"}),
]
# fmt: on
