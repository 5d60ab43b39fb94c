"""Rows of the tests of compiled training: small models, places where `torch.compile` stands, what is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

WORDS, WIDTH = 31, 16
STEPS = 4
WARM = 2  # steps after which nothing may be compiled any more

Context = Callable[[], AbstractContextManager[Any]]
Wrap = Callable[[Any], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        count, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(count, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(count, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.randn(8, WIDTH) * 0.02)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position)))


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(images).mean((2, 3)))


class Tied(nn.Module):
    """A table that is the head's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.norm(F.silu(self.middle(self.token(tokens)))), self.token.weight)


class LSTM(nn.Module):
    """Dynamo leaves recurrent layers to eager PyTorch, and breaks the graph at them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.token(tokens))[0])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 5))


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (4, 8)), torch.randint(WORDS, (4, 8))


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "mlp": (mlp, lambda: (torch.randn(8, 12), torch.randint(5, (8,)))),
    "gpt": (GPT, words),
    "cnn": (CNN, lambda: (torch.randn(4, 3, 8, 8), torch.randint(5, (4,)))),
    "tied": (Tied, words),
    "lstm": (LSTM, words),
}


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


PLACES = (
    "model in a context",
    "loss in a context",
    "context in a forward",
    "context in a loss",
    "context in a step",
)
"""What is compiled: the model, the loss, or a function that opens the context itself."""


def step_at(place: str, model: nn.Module, context: Context, wrap: Wrap, step_of: Any) -> Any:
    """A training step with `torch.compile` (`wrap`) and the context at one of `PLACES`."""
    inner, outer = place.split(" in a ")
    net = wrap(model) if inner == "model" else model
    plain_loss = wrap(lambda x, y: cross_entropy(model(x), y)) if inner == "loss" else None

    def forward(x: Tensor) -> Tensor:
        with context():
            return model(x)

    compiled_forward = wrap(forward) if outer == "forward" else None

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        if compiled_forward is not None:
            return cross_entropy(compiled_forward(x).float(), y)
        with context():
            return plain_loss(x, y) if plain_loss is not None else cross_entropy(net(x), y)

    step = step_of(wrap(loss_of) if outer == "loss" else loss_of)
    return wrap(step) if outer == "step" else step


@dataclass(frozen=True)
class Trained:
    """What a few steps left behind.

    Args:
        losses: one a step.
        gradients: of the first step, by parameter.
        formats: of the logits in an evaluation after the training.
        graphs: how many Dynamo made.
        breaks: how often it broke one.
        late: graphs made after the first steps.
    """

    losses: list[Tensor]
    gradients: list[Tensor]
    graphs: int
    breaks: int
    late: int


def train(name: str, place: str, context: Context, backend: Any) -> Trained:
    """A few steps of SGD from the same weights and data; `backend` None: eager."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    make, data = MODELS[name]
    model = make()
    inputs, targets = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step_of(loss_of: Any) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(x, y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    wrap = (
        (lambda function: torch.compile(function, backend=backend))
        if backend
        else (lambda function: function)
    )
    step = step_at(place, model, context, wrap, step_of)
    losses: list[Tensor] = []
    gradients: list[Tensor] = []
    graphs = 0
    for index in range(STEPS):
        optimizer.zero_grad()
        losses.append(step(inputs, targets).detach().clone())
        if index == 0:
            gradients = [param.grad.clone() for param in model.parameters()]
        if index + 1 == WARM:
            graphs = counters["stats"]["unique_graphs"]
    total = counters["stats"]["unique_graphs"]
    broken = sum(counters["graph_break"].values())
    torch._dynamo.reset()
    return Trained(losses, gradients, total, broken, total - graphs)
