"""The planted faults: what is planted, and what a search for the culprit has to say of it.

Each row is a truth about the code of `faults.plants` and `faults.models`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from torch import nn

from faults import models as m
from faults import planting as p
from faults import plants
from mezzo.core.overflow import OUTSIDE


@dataclass(frozen=True)
class Expected:
    module: str  # path of the culprit
    op: str  # the operation's name; "" where there is none
    cause: str  # a key of `mezzo.core.overflow.CAUSES`
    direction: str = "forward"
    line: str = ""  # part of the user's line; "" where the operation is inside of a module of torch
    part: str = "main"  # whose step, in a training of several
    also: str = ""  # another path that says the same
    in_script: str | None = None  # the path in a plain script, where another module is the one that is called


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
class Row:
    """One planted fault; or one run without a fault, whose loss scale overflows because it looks for its place."""

    name: str  # of the fault, or of what could be mistaken for one
    make: Callable[[], m.Trainee]
    family: str  # CNN, transformer, recurrent, GAN or perceptron
    expected: tuple[Expected, ...]  # in one step or in several parts' steps; nothing, if clean
    planted: int  # step before which `plant` is done
    repeats: int  # how many steps it acts in; the last one's finding counts
    plant: p.Plant
    scale: Any  # first value of a dynamic loss scale, or a loss scale
    mended: bool | None = None  # whether the same step is finite in FP32; None where it can't be run there
    precision: str = "fp16"
    delay: int = 0  # how many steps after it was planted it acts
    options: dict[str, Any] = field(default_factory=dict)  # of `MixedPrecision`

    @property
    def acting(self) -> range:
        first = self.planted + self.delay
        return range(first, first + self.repeats)

    @property
    def can_be_a_script(self) -> bool:
        """Whether the same can be a script: no weights or clipping of MixedPrecision's, a scale that stays."""
        stays = self.scale < 2.0**20 if self.expected else self.scale == 2.0**24
        return stays and not self.options.keys() - {"accumulate"}


def _row(name: str, make: Callable[..., m.Trainee], args: Any, given: dict[str, Any], **usual: Any) -> Row:
    """A row; what is no field of `Row` is given to `make`."""
    row = {one.name: given.pop(one.name) for one in fields(Row) if one.name in given}
    family = next((m.FAMILIES[one] for one in (make, *args[:1]) if one in m.FAMILIES), "perceptron")
    return Row(name, partial(make, *args, **given), family, **{**usual, **row})


def fault(name: str, expected: Any, make: Callable[..., m.Trainee], *args: Any, **given: Any) -> Row:
    """At a loss scale so low that nothing else overflows.

    Unless the row says so, FP32 holds what overflows and nothing else, and a fault outside of the model acts twice.
    """
    every = expected if isinstance(expected, tuple) else (expected,)
    mended = all(one.cause == "overflow" for one in every)
    usual = {"expected": every, "planted": 2, "plant": m.Trainee.arm, "scale": 2.0**6, "mended": mended}
    usual["repeats"] = 2 if all(one.module == OUTSIDE for one in every) else 1
    return _row(name, make, args, given, **usual)


def clean(name: str, make: Callable[..., m.Trainee], *args: Any, **given: Any) -> Row:
    usual = {"planted": 0, "repeats": 12, "plant": lambda trainee: None, "scale": 2.0**24}
    return _row(name, make, args, given, expected=(), **usual)


# fmt: off
FAULTS: list[Row] = [
    # Too large for the format, forward.
    fault("an activation multiplied by 1e7", overflow("tail", "mul", "* self.times(1e7)"), m.cnn,
          tail=plants.amplifies),
    fault("squares of numbers above 256", overflow("middle", "mul", "(wide := x"), m.cnn, middle=plants.squares),
    fault("a convolution's weights grown a thousandfold and more", overflow("conv2", "conv2d", "self.conv2("), m.cnn,
          plant=p.grown("conv2", 3e5)),
    fault("one weight of the head beyond fp16", overflow("head", "linear", "self.head("), m.cnn,
          plant=p.weight("head", 1e5)),
    fault("one bright pixel, 1e6", overflow("conv1", "conv2d", "self.conv1("), m.cnn, plant=p.element(1e6)),
    fault("a cast of the script's own to fp16", overflow("tail", "half", ").half()"), m.cnn, tail=plants.halves,
          mended=False),
    fault("exp, that FP32 holds, then multiplied in fp16", overflow("head", "linear", "self.head("), m.cnn,
          tail=plants.exponential),
    fault("a fourth power, multiplied in fp16 afterwards", overflow("blocks.1.mlp.down", "linear", "self.mlp("),
          m.transformer, middle=plants.powers),
    fault("a softmax without its maximum", overflow("tail", "exp", "torch.exp("), m.transformer,
          tail=plants.naive_softmax, mended=False),
    fault("attention scores of large queries and keys", overflow("blocks.0.attn", "matmul", "q @ k"), m.transformer,
          plant=p.grown("blocks.0.attn.qkv", 3000.0)),
    fault("an MLP's weights grown", overflow("blocks.1.mlp.up", "linear", "self.mlp("), m.transformer,
          plant=p.grown("blocks.1.mlp.up", 6e5)),
    fault("outer products of large features", overflow("blocks.1.mlp.middle", "einsum", "torch.einsum"),
          m.transformer, middle=plants.scores),
    fault("a product of two projections", overflow("tail", "mul", "self.one(x"), m.transformer, tail=plants.bilinear),
    fault("a sum by hand in fp16", overflow("tail", "add", "total + part"), m.recurrent, tail=plants.adds_up),
    fault("a variance by hand in fp16", overflow("tail", "mul", "(wide * wide).mean"), m.recurrent,
          tail=plants.variance),
    fault("a ReLU recurrence that explodes", overflow("rnn.again", "linear", "self.again("), m.recurrent, m.Loop,
          plant=p.grown("rnn.again", 300.0)),
    fault("an LSTM given numbers beyond fp16", overflow("rnn", "lstm", "self.rnn("), m.recurrent,
          front=plants.exponential),
    fault("a GRU whose input weights are beyond fp16", overflow("rnn", "gru", "self.rnn(", direction="backward"),
          m.recurrent, nn.GRU, plant=p.weight("rnn", 1e5, "weight_ih_l0")),
    fault("a residual branch as large as its stream", overflow("between", "add", "(branch := "), m.stack,
          between=plants.residual),
    fault("a shared layer that overflows in a later of its calls", overflow("shared.0", "linear", "self.shared("),
          m.stack, plant=p.grown("shared.0", 120.0)),
    fault("one step with a learning rate of 1e7", overflow("conv1", "conv2d", "self.conv1("), m.cnn, optimizer=m.sgd,
          plant=p.learning_rate(1e7), delay=1),
    fault("a generator's output multiplied by 1e7",
          tuple(overflow("middle", "mul", "* self.times(1e7)", part=part) for part in ("critic", "generator")),
          m.gan, generator_middle=plants.amplifies, mended=True),
    fault("a critic's squared features", overflow("middle", "mul", "(wide := x", part="critic"), m.gan,
          critic_middle=plants.squares),
    fault("a latent spread of exp(100)", overflow("middle", "exp", "torch.exp(0.5"), m.cnn,
          middle=plants.reparameterises, mended=False),
    fault("a transposed convolution's weights grown", overflow("middle", "conv_transpose2d", "self.middle(x)"), m.cnn,
          middle=m.up, plant=p.grown("middle", 1e6)),
    fault("PyTorch's encoder, its second layer's weights grown",
          overflow("encoder.layers.1.linear2", "linear", "self.encoder("), m.encoder,
          plant=p.grown("encoder.layers.1.linear2", 6e5)),
    fault("a product in place", overflow("tail", "mul", ".mul_("), m.cnn, tail=plants.in_place),
    fault("a sum that the script wants in fp16", overflow("blocks.1.mlp.middle", "sum", "dtype=torch.float16"),
          m.transformer, middle=plants.half_sum, mended=False),
    fault("a running product beyond FP32", overflow("tail", "cumprod", "torch.cumprod"), m.recurrent,
          tail=plants.running_product, mended=False),
    fault("both heads of a model, the left one first", overflow("left.0", "mul", "(wide := x"), m.two_heads,
          left=plants.squares, right=plants.amplifies),
    fault("bf16: a product beyond FP32's largest number", overflow("tail", "mul", "(huge := "), m.cnn,
          tail=plants.wide_huge, mended=False, precision="bf16,loss_scale=1"),
    fault("bf16: weights of 1e37 sum to infinity", overflow("head", "linear", "self.head("), m.stack,
          plant=p.both(p.grown("head", 1e38), p.grown("shared.0", 100.0)), mended=False,
          precision="bf16,loss_scale=1"),
    # No finite result for what went in, forward.
    fault("an eps of 1e-8, which fp16 rounds to 0", invalid("tail", "div", "x / (spread + 1e-8)"), m.cnn,
          tail=plants.small_eps, mended=True),
    fault("a share of a sum that is 0", invalid("tail", "div", "x / x.sum"), m.recurrent, tail=plants.share),
    fault("the inverse root of a variance of 0", invalid("tail", "rsqrt", "torch.rsqrt"), m.transformer,
          tail=plants.inverse_root),
    fault("a LayerNorm without eps over a constant row", invalid("tail.norm", "layer_norm", "self.norm("),
          m.transformer, tail=plants.around(lambda: nn.LayerNorm(16, eps=0.0), 1.0)),
    fault("a GroupNorm without eps over a constant picture", invalid("middle.norm", "group_norm", "self.norm("),
          m.cnn, middle=plants.around(lambda: nn.GroupNorm(2, 4, eps=0.0), 1.0)),
    fault("an RMSNorm without eps over a row of zeros", invalid("tail.norm", "rms_norm", "self.norm("), m.recurrent,
          tail=plants.around(lambda: nn.RMSNorm(8, eps=0.0), 0.0)),
    fault("a vector of length 0 brought to length 1", invalid("tail", "div", "F.normalize"), m.recurrent, nn.GRU,
          tail=plants.unit_length),
    fault("the logarithm of 0", invalid("tail", "log", "torch.log("), m.cnn, tail=plants.logarithm),
    fault("0 log 0 in an entropy", invalid("tail", "log", "* torch.log(p)"), m.transformer, tail=plants.entropy),
    fault("log-odds of a certainty", invalid("middle", "logit", "torch.logit", part="critic"), m.gan,
          critic_middle=plants.odds),
    fault("1 / 0", invalid("tail", "reciprocal", "torch.reciprocal"), m.stack, tail=plants.reciprocal),
    fault("the root of a negative number", invalid("tail", "sqrt", "torch.sqrt"), m.recurrent,
          tail=plants.negative_root),
    fault("the mean over a mask that keeps nothing", invalid("tail", "div", "/ keep.sum"), m.transformer,
          tail=plants.keeps_nothing),
    fault("a sentence whose every token is padding", invalid("blocks.0.attn", "softmax", "torch.softmax"),
          m.transformer, padded=True, plant=p.padded_row),
    fault("PyTorch's encoder, a batch of nothing but padding, its mean of what is left",
          invalid("tail", "div", "/ keep.sum"), m.encoder, plants.keeps_nothing,
          plant=p.both(m.Trainee.arm, p.all_padding)),
    fault("a weight that is standardised, and has become constant", invalid("tail", "div", "centred / centred.norm"),
          m.stack, tail=plants.standardised_weight, plant=p.grown("tail", 0.0)),
    fault("weight_norm of a weight of zeros", invalid("tail.parametrizations.weight.0", "_weight_norm"), m.stack,
          tail=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
          plant=p.grown("tail.parametrizations.weight", 0.0, "original1")),
    fault("a model that returns its own loss, the logarithm of 0", invalid("", "log", "-torch.log(torch.where"),
          m.scored, plant=p.attribute("", "sure", 1e6)),
    fault("a mask by 0 times -inf", invalid("blocks.1.mlp.middle", "mul", "torch.zeros(x.shape[-1]) * "),
          m.transformer, middle=plants.masked_by_product),
    fault("divided by what dropout set to 0", invalid("tail", "div", "x / F.dropout"), m.stack, tail=plants.dropped),
    fault("a running average that has sunk to 0", invalid("tail", "div", "x / self.average"), m.stack,
          tail=plants.decays),
    fault("a frozen BatchNorm with a negative variance", invalid("middle.norm", "batch_norm", "self.norm("), m.cnn,
          middle=plants.Frozen, plant=p.filled("middle.norm", "running_var", -1.0)),
    # Finite forward, and not backward.
    fault("the slope of a root at 0", slope("tail", "sqrt", "torch.sqrt"), m.cnn, tail=plants.root),
    fault("the slope of a length at the origin", slope("tail", "sqrt", "torch.sqrt"), m.recurrent,
          tail=plants.length),
    fault("the slope of x^0.5 at 0", slope("blocks.1.mlp.middle", "pow", ".pow(0.5)"), m.transformer,
          middle=plants.half_power),
    fault("where() around a log(0)", slope("tail", "log", "torch.log(x)"), m.cnn, tail=plants.chosen),
    fault("a clamp after log(0)", slope("tail", "log", "torch.log("), m.transformer, tail=plants.clamped),
    fault("the slope of principal axes of equal length", slope("tail", "linalg_eigh", "torch.linalg.eigh"),
          m.recurrent, tail=plants.axes),
    fault("the slope of acos at 1", slope("middle", "acos", "torch.acos", part="generator"), m.gan,
          generator_middle=plants.arc_cosine),
    fault("the slope of x / y at a small y, beyond fp16",
          overflow("tail", "div", "/ (self.width", direction="backward"), m.stack, tail=plants.steep),
    fault("the slope of normalize() at 0, which is 1 / 1e-12",
          overflow("tail", "div", "F.normalize", direction="backward"), m.recurrent, tail=plants.nearly_unit_length),
    fault("a hook of the script's own on a gradient of 0", slope("tail", ""), m.recurrent,
          tail=plants.hooks_a_gradient),
    fault("a slope of 1e30 on its way into fp16", overflow("tail", "float", "x.float()", direction="backward"), m.cnn,
          tail=plants.frequencies),
    fault("a backward by hand with 0 / 0 in it", slope("tail", "_Careless", "_Careless.apply"), m.cnn,
          tail=plants.own_function),
    # What was held or handed in was not finite, or not what it had been.
    fault("a NaN in the head's weight", held("head"), m.cnn, plant=p.weight("head", float("nan"))),
    fault("an infinite bias in an MLP", held("blocks.0.mlp.up"), m.transformer,
          plant=p.weight("blocks.0.mlp.up", float("inf"), "bias")),
    fault("a NaN in a BatchNorm's weight", held("norm1"), m.cnn, plant=p.weight("norm1", float("nan"))),
    fault("a frozen BatchNorm with a NaN mean", held("middle.norm"), m.cnn, middle=plants.Frozen,
          plant=p.filled("middle.norm", "running_mean", float("nan"))),
    fault("a NaN in Adam's first moment, one step later in the weight", held("head"), m.recurrent,
          plant=p.state("head", "exp_avg", float("nan")), delay=1),
    fault("an embedding's row that is NaN", held("embed"), m.transformer, plant=p.grown("embed", float("nan"))),
    fault("a recurrent weight that is infinite", held("rnn"), m.recurrent, nn.GRU,
          plant=p.weight("rnn", float("inf"), "weight_hh_l0")),
    fault("a NaN pixel", given("", also="conv1"), m.cnn, plant=p.element(float("nan"))),
    fault("an infinite sample", given("", also="inner"), m.recurrent, plant=p.element(float("inf"), row=2)),
    fault("a NaN in an argument by the side", given("", also="head"), m.stack, plant=p.poisoned_offset),
    fault("bf16: a NaN pixel", given("", also="conv1"), m.cnn, plant=p.element(float("nan"), row=3),
          precision="bf16,loss_scale=1"),
    *(fault(f"a state carried from batch to batch in {kind}, growing", overflow("rnn", "mul", "state * self.gain"),
            m.recurrent, partial(m.Loop, carried=kind.split()[1]), plant=p.attribute("rnn", "gain", 1e3))
      for kind in ("a buffer", "an attribute")),
    # Outside of the model.
    fault("the loss takes the logarithm of 0", invalid(OUTSIDE, "log", "torch.log("), m.cnn, plant=p.log_of_zero),
    fault("the loss is the mean of nothing", invalid(OUTSIDE, "div", "/ (y > 100)"), m.cnn, plant=p.nothing_kept),
    fault("logits divided by a temperature of 0", invalid(OUTSIDE, "div", "m(x).float() / 0.0"), m.cnn,
          plant=p.no_temperature),
    fault("the root of a distance of 0 in the loss", slope(OUTSIDE, "sqrt", ".sum().sqrt()"), m.recurrent,
          plant=p.distance_of_nothing),
    fault("the slope of (1 - p)^0.5 at p = 1 in the loss", slope(OUTSIDE, "pow", "(1 - p) ** 0.5"), m.cnn,
          plant=p.focal),
    fault("a penalty on the weights' distance from their start, which is 0", slope(OUTSIDE, "sqrt", ".sum().sqrt()"),
          m.stack, plant=p.far_from_start),
    fault("a loss multiplied by 1e39", overflow(OUTSIDE, "mul", "* 1e39"), m.stack, plant=p.huge_factor,
          mended=False),
    fault("a loss squared in fp16 by the script", overflow(OUTSIDE, "mul", ".half()) * missed"), m.stack,
          plant=p.half_of_a_square),
    fault("a deviation of 0 in a density", invalid(OUTSIDE, "log", ".log_prob(y)"), m.recurrent, plant=p.certain),
    fault("a teacher that overflows, which nobody trains", overflow(OUTSIDE, "mul", "(wide := x"), m.taught,
          plants.squares),
    fault("a target that is NaN", given(OUTSIDE), m.recurrent, plant=p.element(float("nan"), place=1)),
    fault("a loss divided by 0", invalid(OUTSIDE, "div", "/ (out - out.detach())"), m.recurrent,
          plant=p.divides_by_its_spread),
    # The same faults where they are harder to see.
    *(fault(f"{what} inside a {word}checkpoint", expected, m.transformer, middle=middle, how=f"{prefix}reentrant")
      for what, expected, middle in (
          ("a product", overflow("blocks.1.mlp.middle", "mul", "* self.times(1e7)"), plants.amplifies),
          ("a slope", slope("blocks.1.mlp.middle", "sqrt", "torch.sqrt"), plants.root))
      for prefix, word in (("not ", ""), ("", "reentrant "))),
    fault("the second of four losses of a window", given("", also="shared.0"), m.stack, accumulate=4,
          plant=p.element(float("nan"), row=2), options={"accumulate": 4}),
    fault("the last of four losses of a window, in the model", overflow("shared.0", "linear", "self.shared("),
          m.stack, accumulate=4, plant=p.element(1e6, row=7), options={"accumulate": 4}),
    fault("one of two heads, each with its own optimizer",
          overflow("right.0", "mul", "* self.times(1e7)", part="right"), m.two_heads, right=plants.amplifies,
          split=True),
    fault("the slope of one of two heads", slope("left.0", "sqrt", "torch.sqrt"), m.two_heads, left=plants.root),
    fault("what a random number decides", overflow("blocks.1.mlp.middle", "mul", "(x.clamp(-1, 1).abs() + 2)"),
          m.transformer, middle=plants.sometimes, dropout=0.1),
    fault("an input that is overwritten after the call", overflow("tail", "mul", "* self.times(1e7)"), m.stack,
          tail=plants.amplifies, plant=p.both(m.Trainee.arm, p.changed_afterwards), mended=None, repeats=2),
    fault("a fault while the loss scale still looks for its place", overflow("tail", "mul", "* self.times(1e7)"),
          m.cnn, tail=plants.amplifies, scale=2.0**24),
    fault("a slope while the loss scale still looks for its place", slope("tail", "sqrt", "torch.sqrt"), m.cnn,
          tail=plants.root, scale=2.0**24),
    fault("a fault beside a mask of -inf, a logged infinity and an unused one", invalid("tail.1", "div", "x / x.sum"),
          m.transformer, middle=plants.logs_perplexity, tail=lambda: nn.Sequential(plants.unused(), plants.share())),
    fault("a slope, in a model whose output holds -inf on purpose", slope("tail", "sqrt", "torch.sqrt"), p.masked,
          plants.root),
    fault("a division, in a model whose output holds -inf on purpose", invalid("tail", "div", "x / x.sum"), p.masked,
          plants.share),
    fault("under clipping and a penalty on the critic's slope",
          overflow("middle", "mul", "* self.times(1e7)", part="critic"), m.gan, critic_middle=plants.amplifies,
          penalty=True, options={"clip_norm": 1.0}),
    fault("with Mezzo's AdamW", invalid("tail", "log", "torch.log("), m.recurrent, tail=plants.logarithm,
          optimizer=p.mezzos),
    fault("with fp16 weights and FP32 masters", overflow("tail", "mul", "(wide := x"), m.stack, tail=plants.squares,
          options={"masters": "fp32"}),
    # Rows that were written when the tracer named all the others: how it does with faults that nobody tuned it to.
    fault("afterwards: a Gumbel noise of u = 0", invalid("tail", "log", "-torch.log(torch.rand("), m.recurrent,
          tail=plants.gumbel),
    fault("afterwards: the logarithm of a squashed slope", invalid("tail", "log", "torch.tanh(x.float()"),
          m.recurrent, nn.GRU, tail=plants.squashed),
    fault("afterwards: the inverse of softplus at 100", overflow("tail", "exp", "torch.exp(x.float().abs()"),
          m.transformer, tail=plants.inverse_softplus, mended=False),
    fault("afterwards: the slope of a geometric mean at 0", slope("tail", "pow", "x.prod("), m.cnn,
          tail=plants.geometric_mean),
    fault("afterwards: messages added up in fp16", overflow("tail", "index_add", ".index_add("), m.stack,
          tail=plants.scatters, mended=False),
    fault("afterwards: addcmul", overflow("middle", "addcmul", "torch.addcmul"), m.cnn, middle=plants.combines),
    fault("afterwards: sampling positions over an extent of 0", invalid("middle", "div", "/ torch.tensor(self"),
          m.cnn, middle=plants.samples),
    fault("afterwards: the variance of one sample", invalid("tail", "div", "- 1)"), m.stack, tail=plants.unbiased),
    fault("afterwards: a convolution in its functional form", overflow("tail", "conv1d", "F.conv1d"), m.stack,
          tail=plants.depthwise),
    fault("afterwards: a bilinear layer whose products only FP32 holds", overflow("head", "linear", "self.head("),
          m.stack, tail=plants.bilinear_layer),
    fault("afterwards: 1 / the distance of two rows that are the same", invalid("tail", "reciprocal", "1 / far"),
          m.recurrent, tail=plants.picks_the_worst),
    fault("afterwards: one of four experts", overflow("experts.c", "linear", "expert(x[rows])"), m.regression,
          m.experts, plant=p.grown("experts.c", 1e6)),
    fault("afterwards: a NaN in a weight that two modules share", held("embed", also="head"), m.tied,
          plant=p.grown("embed", float("nan"))),
    fault("afterwards: a buffer of positions that is infinite", held(""), m.tied,
          plant=p.filled("", "position", float("inf"))),
    fault("afterwards: a slope behind a loop of GRU cells", slope("tail", "sqrt", "torch.sqrt"), m.tied, plants.root),
    fault("afterwards: forward, in a model that returns a dataclass", overflow("tail", "mul", "(wide := x"),
          m.structured, plants.squares),
    fault("afterwards: backward, in a model that returns a dataclass", slope("tail", "sqrt", "torch.sqrt"),
          m.structured, plants.root),
    fault("afterwards: a NaN deep in an argument", given("", also="second"), m.structured, plant=p.late_nan),
    fault("afterwards: forward, in a model whose parts are called one by one",
          overflow("backbone.2", "mul", "(wide := x", in_script="2"), m.parts, plants.squares, repeats=2),
    fault("afterwards: backward, in a model whose parts are called one by one",
          slope("backbone.2", "sqrt", "torch.sqrt", in_script="2"), m.parts, plants.root, repeats=2),
    fault("afterwards: a stream that thirty layers double", overflow("layers.17", "linear", "layer(x)"), m.regression,
          m.residuals, plant=p.attribute("", "gain", 3.0)),
    fault("afterwards: a gate times a value", overflow("", "mul", "F.silu(self.gate(x)) * self.value(x)"),
          m.regression, m.gated, plant=p.both(p.grown("gate", 1e3), p.grown("value", 1e3))),
    fault("afterwards: a learned scale that has grown", overflow("", "mul", "self.gamma.to(x.dtype) * x"),
          m.regression, m.gated, plant=p.both(p.grown("", 6e4, "gamma"), p.grown("value", 30.0))),
    fault("afterwards: a criterion with weights of its own", slope(OUTSIDE, "acos", "torch.acos", in_script=""),
          m.with_a_criterion),
    fault("afterwards: a learned uncertainty", overflow(OUTSIDE, "exp", "torch.exp(-m.s)"), m.weighed,
          plant=p.filled("", "s", -200.0), mended=False),
    fault("afterwards: a contrast of similarities without their maximum",
          overflow(OUTSIDE, "exp", "torch.exp(out @ out.T"), m.stack, plant=p.contrast, mended=False),
    fault("afterwards: a mask of floats with a row of -inf", invalid("attention", "softmax", "self.attention("),
          m.regression, m.attends, plant=p._changed("", "mask", lambda mask: mask[2].fill_(plants.MASK))),
    fault("afterwards: a model that is a Sequential", overflow("2", "mul", "(wide := x"), m.regression, m.layers,
          plants.squares),
    fault("afterwards: two models of one graph, the first one's fault", slope("1", "sqrt", "torch.sqrt", part="body"),
          m.two_losses, plants.root),
    fault("afterwards: a learning rate of NaN", held("conv1"), m.cnn, plant=p.learning_rate(float("nan")), delay=1),
    fault("afterwards: one real sample that is NaN", given("", part="critic", also="first"), m.gan,
          plant=p.element(float("nan"), row=4)),
    fault("afterwards: one bias beyond fp16", overflow("conv2", "conv2d", "self.conv2("), m.cnn,
          plant=p.weight("conv2", 1e5, "bias")),
    # Rows whose call, run again, is not the same call; and calls that are not plain ones.
    *(fault(f"again: what {whose} generator draws", overflow("tail", "mul", "(draw(self, x) > 0.95)"), m.stack,
            tail=tail, repeats=2)
      for whose, tail in (("the module's own", plants.own_generator), ("Python's", plants.python_random),
                          ("NumPy's", plants.numpy_random))),
    fault("again: a schedule by the number of calls", overflow("tail", "mul", "* strength"), m.cnn,
          tail=plants.counts),
    fault("again: a list of what was seen", overflow("tail", "to", "self.seen[-1]"), m.stack, tail=plants.remembers),
    fault("again: an iterator as argument", overflow("", "mul", "* self.gain"), m.iterated,
          plant=p.attribute("", "gain", 1e7), repeats=2),
    fault("again: vmap", overflow("tail", "mul", "(row + 0.1) * self"), m.stack, tail=plants.per_sample),
    fault("again: a division in place behind other writes in place", invalid("middle", "div", "x /= "), m.cnn,
          middle=plants.in_place_chain),
    fault("again: an exponential on an island of FP32", overflow("tail", "exp", "torch.exp("), m.transformer,
          tail=plants.island, mended=False),
    fault("again: a forward hook of the script's own", overflow("tail.layer", "mul", "(output + 0.1) *", also="tail"),
          m.recurrent, tail=plants.Hooked),
    fault("again: a backward hook of the script's own", slope("tail.layer", "", also="tail"), m.recurrent,
          tail=partial(plants.Hooked, backward=True)),
    fault("again: a module under two names", overflow("tail.one", "linear", "self.other(", also="tail.other"),
          m.stack, tail=plants.Twice, plant=p.both(m.Trainee.arm, p.grown("tail.one", 10.0))),
    fault("again: gradients released in backward", slope("tail", "sqrt", "torch.sqrt"), m.stack, tail=plants.root,
          optimizer=p.mezzos, options={"release_gradients": True}),
    fault("again: bf16 weights, split from their masters", slope("tail", "sqrt", "torch.sqrt"), m.stack,
          tail=plants.root, optimizer=p.split_weights, precision="bf16,loss_scale=1", options={"masters": "split"}),
]
# fmt: on
