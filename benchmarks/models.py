"""The workloads of the benchmarks: one training step's model, data and loss, with its sizes in `summary`.

`WORKLOADS[name]()` -> `Workload`, the same weights and data at every call: a benchmark makes one for each
contender, so that none of them sees another's gradients or optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.demos.digits import Stage
from mezzo.demos.text_gpt import Block


@dataclass(frozen=True)
class Workload:
    """A model, one batch, and the loss of the model's output against the batch's targets."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    summary: str

    def to(self, device: str) -> Workload:
        """The same on another device."""
        return Workload(self.model.to(device), self.inputs.to(device), self.targets.to(device), self.summary)

    def loss(self) -> Tensor:
        """The training loss of one forward pass, in whatever region the caller has entered."""
        output = self.model(self.inputs)
        return F.cross_entropy(output.flatten(0, -2), self.targets.flatten())


class GPT(nn.Module):
    """[N, T] tokens -> [N, T, vocabulary] logits; pre-norm blocks, untied head."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.blocks(self.token(tokens) + self.position)))
        return out


class CNN(nn.Module):
    """[N, 3, 32, 32] images -> [N, 10] logits; two convolutions a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(Stage(3, 64), Stage(64, 128), Stage(128, 256))
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


def gpt() -> Workload:
    torch.manual_seed(0)
    model = GPT(layers=6, width=384, heads=6, context=256, vocabulary=8192)
    tokens = torch.randint(8192, (8, 257))
    return Workload(
        model, tokens[:, :-1], tokens[:, 1:], "GPT, 6 layers, width 384, 2048 tokens, vocabulary 8192"
    )


def cnn() -> Workload:
    torch.manual_seed(0)
    model = CNN()
    summary = "CNN, 3 stages of 64-128-256, batch 64 at 32x32"
    return Workload(model, torch.randn(64, 3, 32, 32), torch.randint(10, (64,)), summary)


def lstm() -> Workload:
    torch.manual_seed(0)
    model = LanguageLSTM(width=512, vocabulary=2048)
    tokens = torch.randint(2048, (32, 65))
    return Workload(model, tokens[:, :-1], tokens[:, 1:], "LSTM, 2 x 512, 32 x 64 tokens, vocabulary 2048")


WORKLOADS: Mapping[str, Callable[[], Workload]] = {"gpt": gpt, "cnn": cnn, "lstm": lstm}
