"""Runs without a fault, in which the loss scale overflows because it looks for its place: nothing here is an alarm."""

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
    attends,
    autoencoder,
    cnn,
    encoder,
    experts,
    gan,
    in_a_dataclass,
    parts,
    recurrent,
    scored,
    stack,
    taught,
    tied,
    transformer,
    two_heads,
    two_losses,
    weighed,
    with_a_criterion,
)
from mezzo.core.loss_scale import DynamicLossScale, StaticLossScale


@dataclass(frozen=True)
class Clean:
    """One run without a fault.

    Args:
        name: what could be mistaken for one.
        family: CNN, transformer, recurrent, GAN or perceptron.
        make: makes the training.
        scale: first value of a dynamic loss scale, or a machine.
        steps: how many.
        plant: done before the first step.
        options: of `MixedPrecision`.
    """

    name: str
    family: str
    make: Callable[[], Trainee]
    scale: Any = 2.0**24
    steps: int = 12
    plant: Callable[[Trainee], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def _large_but_fine(trainee: Trainee) -> None:
    """Inputs near fp16's largest number, and a first layer that takes them."""
    with torch.no_grad():
        trainee.model.conv1.weight.mul_(1e-4)

    def spoil(old: Batch) -> Batch:
        x, y = old
        return x.clamp(-1, 1) * 60000.0, y

    trainee.spoil = spoil


def _in_half(trainee: Trainee) -> None:
    """A loss in fp16, as it leaves the model."""
    trainee.loss = lambda m, x, y: (m(x) - y.half()).abs().sum()


def _weak_penalty(trainee: Trainee) -> None:
    trainee.loss = lambda m, x, y: (
        F.mse_loss(m(x).float(), y) + 1e-3 * sum(p.square().sum() for p in m.parameters())
    )


def _offset(trainee: Trainee) -> None:
    def spoil(old: Batch) -> Batch:
        x, y = old
        return x, y, torch.zeros_like(x)

    trainee.spoil = spoil


def _steeper(trainee: Trainee) -> None:
    """A loss so steep that even small scales overflow, and 1 does not."""
    trainee.loss = lambda m, x, y: F.mse_loss(m(x).float(), y) * 2000


def _allowed_labels(trainee: Trainee) -> None:
    trainee.loss = lambda m, x, y: F.cross_entropy(m(x), y.clamp(max=2))


def _causal_buffer(trainee: Trainee) -> None:
    trainee.model.mask.copy_(torch.full((4, 4), float("-inf")).triu(1))


def _evaluates(trainee: Trainee) -> None:
    """Validation on the side, infinite."""

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        told = F.mse_loss(m(x).float(), y)
        m.eval()
        with torch.no_grad():
            m(x * 1e6)
        m.train()
        return told

    trainee.loss = loss


def _tries_first(trainee: Trainee) -> None:
    """A call in training mode that leads to no loss."""

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        m(x * 1e6)
        return F.mse_loss(m(x).float(), y)

    trainee.loss = loss


def _all_padding(trainee: Trainee) -> None:
    def spoil(old: Batch) -> Batch:
        tokens, padding, y = old
        return tokens, torch.ones_like(padding), y

    trainee.spoil = spoil


class TopOnly(nn.Module):
    """All but the largest two masked with -inf before a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        least = x.topk(2, -1).values[..., -1:]
        return torch.softmax(x.masked_fill(x < least, float("-inf")), -1)


_QUICK = DynamicLossScale(init=2.0**14, growth_interval=1)

CLEAN: list[Clean] = [
    Clean("a CNN from 2^24", "CNN", cnn),
    Clean("a CNN whose scale doubles every step", "CNN", cnn, scale=_QUICK, steps=24),
    Clean(
        "a scale that grows after two good steps",
        "transformer",
        transformer,
        scale=DynamicLossScale(init=2.0**15, growth_interval=2),
        steps=30,
    ),
    Clean("inputs of 60000", "CNN", cnn, plant=_large_but_fine),
    Clean("a constant scale that is too large", "CNN", cnn, scale=StaticLossScale(2.0**24), steps=6),
    Clean("a causal mask of -inf", "transformer", transformer),
    Clean("padding masked with -inf", "transformer", partial(transformer, padded=True)),
    Clean("dropout", "transformer", partial(transformer, dropout=0.3)),
    Clean("checkpoints", "transformer", partial(transformer, how="not reentrant", dropout=0.1)),
    Clean("reentrant checkpoints", "transformer", partial(transformer, how="reentrant")),
    Clean(
        "a perplexity of infinity, logged", "transformer", partial(transformer, tail=plants.LogsPerplexity)
    ),
    Clean("all but two logits masked", "transformer", partial(transformer, tail=TopOnly)),
    Clean("an infinity that nobody uses", "recurrent", partial(recurrent, tail=plants.Unused)),
    Clean(
        "infinities inside amax and logsumexp", "recurrent", partial(recurrent, nn.GRU, tail=plants.Absorbed)
    ),
    Clean("an LSTM", "recurrent", recurrent),
    Clean("a recurrence by hand", "recurrent", partial(recurrent, OwnCell)),
    Clean("a state carried in a buffer", "recurrent", partial(recurrent, partial(Carried, buffer=True))),
    Clean("a state carried in an attribute", "recurrent", partial(recurrent, Carried)),
    Clean("a logarithm made safe before where()", "recurrent", partial(recurrent, tail=plants.SafelyChosen)),
    Clean("a GAN", "GAN", gan),
    Clean("a GAN with a penalty on the slope", "GAN", partial(gan, penalty=True)),
    Clean("four losses a window", "perceptron", partial(stack, accumulate=4), options={"accumulate": 4}),
    Clean("clipping", "perceptron", stack, options={"clip_norm": 0.5}),
    Clean("a loss in fp16", "perceptron", stack, plant=_in_half, scale=2.0**24),
    Clean("a steep loss", "perceptron", stack, plant=_steeper),
    Clean("a penalty on the weights", "perceptron", stack, plant=_weak_penalty),
    Clean("an argument by the side", "perceptron", stack, plant=_offset),
    Clean("a gate that saturates past infinity", "perceptron", partial(stack, between=plants.Saturates)),
    Clean(
        "an output that reaches no loss", "perceptron", partial(two_heads, right=plants.Unused, both=False)
    ),
    Clean("two optimizers over one model", "perceptron", partial(two_heads, split=True)),
    Clean(
        "Mezzo's AdamW, fp16 weights",
        "CNN",
        partial(cnn, optimizer=lambda p: mezzo.optim.AdamW(p, lr=1e-3)),
        options={"masters": "fp32"},
    ),
    Clean("a mask of -inf in a buffer", "transformer", attends, plant=_causal_buffer),
    Clean("a dataclass returned", "perceptron", in_a_dataclass),
    Clean("parts called one by one", "perceptron", parts),
    Clean("experts", "perceptron", experts),
    Clean("a language model with tied weights", "recurrent", tied),
    Clean("a learned uncertainty", "perceptron", weighed),
    Clean("a criterion with weights of its own", "perceptron", with_a_criterion),
    Clean("two models of one graph", "perceptron", two_losses),
    Clean("a generator of its own", "perceptron", partial(stack, tail=plants.OwnGenerator)),
    Clean("NumPy's generator", "perceptron", partial(stack, tail=plants.NumpyRandom)),
    Clean("a count of calls", "CNN", partial(cnn, tail=plants.Counts)),
    Clean("vmap", "perceptron", partial(stack, tail=plants.PerSample)),
    Clean("writes in place", "CNN", partial(cnn, middle=plants.InPlaceChain)),
    Clean("hooks of the script's own", "recurrent", partial(recurrent, tail=plants.HookedBackward)),
    Clean("an output of -inf on purpose", "CNN", partial(cnn, end=plants.MasksLogits), plant=_allowed_labels),
    Clean("an autoencoder", "CNN", autoencoder),
    Clean("a draw around a mean", "CNN", partial(autoencoder, plants.Reparameterises)),
    Clean("PyTorch's encoder with padding", "transformer", encoder),
    Clean("PyTorch's encoder, a batch of nothing but padding", "transformer", encoder, plant=_all_padding),
    Clean("deviation and length of nothing", "recurrent", partial(recurrent, tail=plants.SpreadOfNothing)),
    Clean("an evaluation that overflows, beside each step", "perceptron", stack, plant=_evaluates),
    Clean("a call that overflows and is thrown away", "perceptron", stack, plant=_tries_first),
    Clean("a model that returns its own loss", "perceptron", scored),
    Clean("a teacher", "perceptron", taught),
    Clean("writing in place", "CNN", partial(cnn, tail=plants.InPlace)),
    Clean("a hook on a gradient", "recurrent", partial(recurrent, tail=plants.HooksAGradient)),
    Clean(
        "a weight under weight_norm",
        "perceptron",
        partial(stack, tail=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
    ),
    Clean("a frozen BatchNorm", "CNN", partial(cnn, middle=lambda: plants.Frozen(4))),
]
