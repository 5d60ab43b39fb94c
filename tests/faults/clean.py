"""Runs without a fault, in which the loss scale overflows because it looks for its place: nothing here is an alarm."""

from __future__ import annotations

import random as python_random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
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
    others,
    recurrent,
    scored,
    stack,
    taught,
    transformer,
    two_heads,
)
from faults.plants import stateful
from faults.runs import Around, Turn, owners, plainly, seed, turns
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


def of_clean(
    run: Clean,
    around: Around = plainly,
    ended: Callable[[Trainee, dict[str, Any]], Any] | None = None,
    **options: Any,
) -> Iterator[Turn]:
    """Train, and give each call of `mp.step`; `ended` is called when the last is over, as in `of_fault`."""
    seed(8)
    trainee = run.make()
    if run.plant is not None:
        run.plant(trainee)
    mps = owners(trainee, "fp16", run.scale, **{**run.options, **options})
    try:
        yield from turns(trainee, mps, range(run.steps), around)
        if ended is not None:
            ended(trainee, mps)
    finally:
        for mp in mps.values():
            mp.close()


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The parameters that a backward of this loss reaches: other models' too."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(following for following, _ in node.next_functions)


class AtScaleOne:
    """Computes each loss twice: once for a backward without a loss scale, that has to be finite, then as it is.

    Attributes:
        finite: for each loss, whether it and its gradients are.
    """

    def __init__(self) -> None:
        self.finite: list[bool] = []

    def __call__(self, part: str, mp: Any, compute: Callable[[], Tensor]) -> Tensor:
        buffers = [(held, held.clone()) for held in mp.model.buffers()]
        carried = [(m, m.state) for m in mp.model.modules() if isinstance(m, Carried)]
        random = torch.get_rng_state(), python_random.getstate(), np.random.get_state()
        own_generators = [
            (held, held.get_state())
            for module in mp.model.modules()
            for held in vars(module).values()
            if isinstance(held, torch.Generator)
        ]
        with mp.autocast():
            loss = compute()
        own = [p for group in mp.optimizer.param_groups for p in group["params"]]
        params = list({id(p): p for p in (*own, *_leaves(loss))}.values())
        before = [p.grad for p in params]
        for p in params:
            p.grad = None
        loss.backward()
        self.finite.append(
            bool(loss.isfinite()) and all(bool(p.grad.isfinite().all()) for p in own if p.grad is not None)
        )
        for p, grad in zip(params, before):
            p.grad = grad
        torch.set_rng_state(random[0])
        python_random.setstate(random[1])
        np.random.set_state(random[2])
        for generator, drawn in own_generators:
            generator.set_state(drawn)
        with torch.no_grad():
            for held, value in buffers:
                held.copy_(value)
        for module, state in carried:
            module.state = state
        return plainly(part, mp, compute)


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
        options={"weights": "masters"},
    ),
    Clean("a mask of -inf in a buffer", "transformer", others.attends, plant=_causal_buffer),
    Clean("a dataclass returned", "perceptron", partial(others.in_a_dataclass)),
    Clean("parts called one by one", "perceptron", others.parts),
    Clean("experts", "perceptron", others.experts),
    Clean("a language model with tied weights", "recurrent", others.tied),
    Clean("a learned uncertainty", "perceptron", others.weighed),
    Clean("a criterion with weights of its own", "perceptron", others.with_a_criterion),
    Clean("two models of one graph", "perceptron", others.two_losses),
    Clean("a generator of its own", "perceptron", partial(stack, tail=stateful.OwnGenerator)),
    Clean("NumPy's generator", "perceptron", partial(stack, tail=stateful.NumpyRandom)),
    Clean("a count of calls", "CNN", partial(cnn, tail=stateful.Counts)),
    Clean("vmap", "perceptron", partial(stack, tail=stateful.PerSample)),
    Clean("writes in place", "CNN", partial(cnn, middle=stateful.InPlaceChain)),
    Clean("hooks of the script's own", "recurrent", partial(recurrent, tail=stateful.HookedBackward)),
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
