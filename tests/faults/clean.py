"""Runs without a fault, in which the loss scale overflows because it looks for its place: nothing here is an alarm."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults import models as m
from faults import planting as p
from faults import plants
from faults.rows import Row, clean
from mezzo.core.loss_scale import DynamicLossScale, StaticLossScale

# Inputs near fp16's largest number, and a first layer that takes them.
_LARGE = p.both(p.grown("conv1", 1e-4), p.batch(lambda x, y: (x.clamp(-1, 1) * 60000.0, y)))
_IN_HALF = p.loss(lambda m, x, y: (m(x) - y.half()).abs().sum())
# So steep that even small scales overflow, and 1 does not.
_STEEP = p.loss(lambda m, x, y: F.mse_loss(m(x).float(), y) * 2000)
_ALLOWED_LABELS = p.loss(lambda m, x, y: F.cross_entropy(m(x), y.clamp(max=2)))
_OFFSET = p.batch(lambda x, y: (x, y, torch.zeros_like(x)))


@p.loss
def _weak_penalty(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m(x).float(), y) + 1e-3 * sum(p.square().sum() for p in m.parameters())


def _causal_buffer(trainee: m.Trainee) -> None:
    trainee.model.mask.copy_(torch.full((4, 4), plants.MASK).triu(1))


@p.loss
def _evaluates(m: Any, x: Tensor, y: Tensor) -> Tensor:
    told = F.mse_loss(m(x).float(), y)
    m.eval()
    with torch.no_grad():
        m(x * 1e6)
    m.train()
    return told


@p.loss
def _tries_first(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m(x * 1e6)
    return F.mse_loss(m(x).float(), y)


_QUICK = DynamicLossScale(init=2.0**14, growth_interval=1)
_AFTER_TWO = DynamicLossScale(init=2.0**15, growth_interval=2)

# fmt: off
CLEAN: list[Row] = [
    clean("a CNN from 2^24", m.cnn),
    clean("a CNN whose scale doubles every step", m.cnn, scale=_QUICK, repeats=24),
    clean("a scale that grows after two good steps", m.transformer, scale=_AFTER_TWO, repeats=30),
    clean("inputs of 60000", m.cnn, plant=_LARGE),
    clean("a constant scale that is too large", m.cnn, scale=StaticLossScale(2.0**24), repeats=6),
    clean("a causal mask of -inf", m.transformer),
    clean("padding masked with -inf", m.transformer, padded=True),
    clean("dropout", m.transformer, dropout=0.3),
    clean("checkpoints", m.transformer, how="not reentrant", dropout=0.1),
    clean("reentrant checkpoints", m.transformer, how="reentrant"),
    clean("a perplexity of infinity, logged", m.transformer, tail=plants.logs_perplexity),
    clean("all but two logits masked", m.transformer, tail=plants.top_only),
    clean("an infinity that nobody uses", m.recurrent, tail=plants.unused),
    clean("infinities inside amax and logsumexp", m.recurrent, nn.GRU, tail=plants.absorbed),
    clean("an LSTM", m.recurrent),
    clean("a recurrence by hand", m.recurrent, m.Loop),
    clean("a state carried in a buffer", m.recurrent, partial(m.Loop, carried="buffer")),
    clean("a state carried in an attribute", m.recurrent, partial(m.Loop, carried="attribute")),
    clean("a logarithm made safe before where()", m.recurrent, tail=plants.safely_chosen),
    clean("a GAN", m.gan),
    clean("a GAN with a penalty on the slope", m.gan, penalty=True),
    clean("four losses a window", m.stack, accumulate=4, options={"accumulate": 4}),
    clean("clipping", m.stack, options={"clip_norm": 0.5}),
    clean("a loss in fp16", m.stack, plant=_IN_HALF),
    clean("a steep loss", m.stack, plant=_STEEP),
    clean("a penalty on the weights", m.stack, plant=_weak_penalty),
    clean("an argument by the side", m.stack, plant=_OFFSET),
    clean("a gate that saturates past infinity", m.stack, between=plants.saturates),
    clean("an output that reaches no loss", m.two_heads, right=plants.unused, both=False),
    clean("two optimizers over one model", m.two_heads, split=True),
    clean("Mezzo's AdamW, fp16 weights", m.cnn, optimizer=p.mezzos, options={"masters": "fp32"}),
    clean("a mask of -inf in a buffer", m.regression, m.attends, plant=_causal_buffer),
    clean("a dataclass returned", m.structured),
    clean("parts called one by one", m.parts),
    clean("experts", m.regression, m.experts),
    clean("a language model with tied weights", m.tied),
    clean("a learned uncertainty", m.weighed),
    clean("a criterion with weights of its own", m.with_a_criterion),
    clean("two models of one graph", m.two_losses),
    clean("a generator of its own", m.stack, tail=plants.own_generator),
    clean("NumPy's generator", m.stack, tail=plants.numpy_random),
    clean("a count of calls", m.cnn, tail=plants.counts),
    clean("vmap", m.stack, tail=plants.per_sample),
    clean("writes in place", m.cnn, middle=plants.in_place_chain),
    clean("hooks of the script's own", m.recurrent, tail=partial(plants.Hooked, backward=True)),
    clean("an output of -inf on purpose", m.cnn, end=plants.masks_logits, plant=_ALLOWED_LABELS),
    clean("a transposed convolution", m.cnn, middle=m.up),
    clean("a draw around a mean", m.cnn, middle=plants.reparameterises),
    clean("PyTorch's encoder with padding", m.encoder),
    clean("PyTorch's encoder, a batch of nothing but padding", m.encoder, plant=p.all_padding),
    clean("deviation and length of nothing", m.recurrent, tail=plants.spread_of_nothing),
    clean("an evaluation that overflows, beside each step", m.stack, plant=_evaluates),
    clean("a call that overflows and is thrown away", m.stack, plant=_tries_first),
    clean("a model that returns its own loss", m.scored),
    clean("a teacher", m.taught),
    clean("writing in place", m.cnn, tail=plants.in_place),
    clean("a hook on a gradient", m.recurrent, tail=plants.hooks_a_gradient),
    clean("a weight under weight_norm", m.stack,
          tail=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
    clean("a frozen BatchNorm", m.cnn, middle=plants.Frozen),
]
# fmt: on
