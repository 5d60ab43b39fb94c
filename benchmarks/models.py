"""The workloads of the benchmarks: one training step's model, data and loss, with its sizes in `summary`.

`WORKLOADS[name]()` -> `Workload`, the same weights and data at every call: a benchmark makes one for each
contender, so they share no gradients or optimizer state. `LARGE` has the same rows at sizes that
fill a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.demos import digits as digits_demo
from mezzo.demos import text_gpt as text_demo

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of the model's [..., classes] output, in whatever region the caller has entered."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def smoothed_cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of the digits demo."""
    return F.cross_entropy(model(inputs), targets, label_smoothing=0.1)


def own_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a model that computes it."""
    loss: Tensor = model(inputs, targets)
    return loss


@dataclass(frozen=True)
class Workload:
    """A model, one batch, and the loss of the model's output against the batch's targets.

    Args:
        loss_of: model, inputs, targets -> loss.
        lr: of AdamW, the same for every contender.
    """

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    summary: str
    loss_of: Loss = cross_entropy
    lr: float = 1e-4

    def to(self, device: str) -> Workload:
        """The same on another device."""
        inputs, targets = self.inputs.to(device), self.targets.to(device)
        return replace(self, model=self.model.to(device), inputs=inputs, targets=targets)

    def loss(self) -> Tensor:
        """The training loss of one forward pass, in whatever region the caller has entered."""
        return self.loss_of(self.model, self.inputs, self.targets)


class GPT(nn.Module):
    """[N, T] tokens -> [N, T, vocabulary] logits; pre-norm blocks, untied head."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*(text_demo.Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head: nn.Module = nn.Linear(width, vocabulary, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """[N, T, width]: what the head reads."""
        out: Tensor = self.norm(self.blocks(self.token(tokens) + self.position))
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.hidden(tokens))
        return out


class FusedLossGPT(nn.Module):
    """[N, T] tokens, [N, T] targets -> loss; the GPT's head is in `mezzo.nn.LinearCrossEntropy`, without logits."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        weight = gpt.head.weight
        assert isinstance(weight, Tensor)
        classes, width = weight.shape
        fused: nn.Module = importlib.import_module("mezzo.nn").LinearCrossEntropy(width, classes)
        fused.weight = weight  # the parameter itself, which may be the token table's too
        gpt.head = nn.Identity()
        self.trunk, self.fused = gpt, fused

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        out: Tensor = self.fused(self.trunk(tokens).flatten(0, -2), targets.flatten())
        return out


def with_fused_loss(work: Workload) -> Workload:
    """The same training step, with head and loss in `mezzo.nn.LinearCrossEntropy`.

    Raises:
        ModuleNotFoundError: Mezzo lacks it.
    """
    assert isinstance(work.model, GPT)
    return replace(work, model=FusedLossGPT(work.model), loss_of=own_loss)


class CNN(nn.Module):
    """[N, 3, 32, 32] images -> [N, 10] logits; two convolutions a stage."""

    def __init__(self) -> None:
        super().__init__()
        stages = (digits_demo.Stage(3, 64), digits_demo.Stage(64, 128), digits_demo.Stage(128, 256))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(256, 10)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.stages(images).mean(dim=(2, 3)))
        return out


class LanguageLSTM(nn.Module):
    """[N, T] tokens -> [N, T, vocabulary] logits; two LSTM layers."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.token(tokens))[0])
        return out


def digits(batch: int = 64, width: int = 64) -> Workload:
    """The demo's model and its first images, over and over where the batch is larger than the data."""
    torch.manual_seed(0)
    images, labels, _, _ = digits_demo.load()
    chosen = torch.arange(batch) % len(labels)
    model = digits_demo.Network(width)
    summary = f"the digits demo: CNN of width {width}, {batch} images at 16x16"
    return Workload(model, images[chosen], labels[chosen], summary, smoothed_cross_entropy, 2e-3)


def text_gpt(batch: int = 16, width: int = 256, layers: int = 4, context: int = 128) -> Workload:
    """The demo's model on a batch of its text."""
    torch.manual_seed(0)
    inputs, targets = text_demo.batch(text_demo.load(200_000), batch, context)
    model = text_demo.GPT(width, layers, 4, context)
    summary = (
        f"the text demo: GPT, {layers} layers, width {width}, {batch * context} characters, tied embeddings"
    )
    return Workload(model, inputs, targets, summary, lr=1e-3)


def gpt(
    layers: int = 6,
    width: int = 384,
    heads: int = 6,
    batch: int = 8,
    context: int = 256,
    vocabulary: int = 8192,
) -> Workload:
    """A language model on random tokens."""
    torch.manual_seed(0)
    model = GPT(layers, width, heads, context, vocabulary)
    tokens = torch.randint(vocabulary, (batch, context + 1))
    summary = (
        f"GPT, {layers} layers, width {width}, {batch * context} tokens in {batch}, vocabulary {vocabulary}"
    )
    return Workload(model, tokens[:, :-1], tokens[:, 1:], summary)


def cnn(batch: int = 64) -> Workload:
    """The CNN of the figures that Mezzo set out to beat."""
    torch.manual_seed(0)
    model = CNN()
    summary = f"CNN, 3 stages of 64-128-256, batch {batch} at 32x32"
    return Workload(model, torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)), summary)


def lstm(width: int = 512, batch: int = 32, context: int = 64) -> Workload:
    """The LSTM of the figures that Mezzo set out to beat."""
    torch.manual_seed(0)
    model = LanguageLSTM(width=width, vocabulary=2048)
    tokens = torch.randint(2048, (batch, context + 1))
    summary = f"LSTM, 2 x {width}, {batch} x {context} tokens, vocabulary 2048"
    return Workload(model, tokens[:, :-1], tokens[:, 1:], summary)


# Few tokens against many weights: casting the weights is what costs there.
FINE_TUNE = {"layers": 4, "width": 1024, "heads": 16, "batch": 1, "context": 64, "vocabulary": 1024}
# Few layers against many classes: the loss is what costs there.
LARGE_VOCABULARY = {"layers": 2, "width": 384, "heads": 6, "batch": 8, "context": 256, "vocabulary": 2**15}

WORKLOADS: Mapping[str, Callable[[], Workload]] = {
    "digits": digits,
    "text-gpt": text_gpt,
    "gpt": gpt,
    "cnn": cnn,
    "lstm": lstm,
    "fine-tune": partial(gpt, **FINE_TUNE),
    "lm-32k": partial(gpt, **LARGE_VOCABULARY),
}
LARGE: Mapping[str, Callable[[], Workload]] = {
    "digits": partial(digits, batch=4096, width=128),
    "text-gpt": partial(text_gpt, batch=128, width=512, context=256),
    "gpt": partial(gpt, layers=12, width=768, heads=12, batch=16, context=1024, vocabulary=8192),
    "cnn": partial(cnn, batch=2048),
    "lstm": partial(lstm, width=1024, batch=256),
    "fine-tune": partial(gpt, **FINE_TUNE | {"layers": 24, "vocabulary": 2**15}),
    "lm-32k": partial(gpt, **LARGE_VOCABULARY | {"width": 768, "heads": 12, "batch": 16, "context": 1024}),
}
