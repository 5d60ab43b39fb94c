"""Models that are built or called in other ways: experts, tied weights, a dataclass returned, parts called singly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.models.trainee import Batch, Make, Place, Trainee, adamw, drawn, one_loss, place


def _regression(model: nn.Module, optimizer: Make = adamw, **kept: Any) -> Trainee:
    return Trainee(
        {"main": model},
        {"main": optimizer(model.parameters())},
        drawn(lambda g: (torch.randn(8, 8, generator=g), torch.randn(8, 1, generator=g))),
        one_loss(lambda m, x, y: F.mse_loss(m(x).float(), y)),
        **kept,
    )


class Experts(nn.Module):
    """Each row goes to one of four layers, as a router says."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("a", "b", "c", "d")})
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.router(x), -1)
        best = weights.argmax(-1)
        out = torch.zeros(x.shape)
        for number, expert in enumerate(self.experts.values()):
            rows = (best == number).nonzero()[:, 0]
            out = out.index_add(0, rows, (expert(x[rows]) * weights[rows, number, None]).float())
        return self.head(out)


def experts() -> Trainee:
    torch.manual_seed(11)
    return _regression(Experts())


class Tied(nn.Module):
    """A language model whose head is its embedding's weight."""

    def __init__(self, tail: Place) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.cell = nn.GRUCell(16, 16)
        self.tail = place(tail)
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("position", torch.randn(16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        state = torch.zeros(len(x), 16)
        states = []
        for moment in range(x.shape[1]):
            state = self.cell(x[:, moment], state)
            states.append(state)
        return self.head(self.tail(torch.stack(states, 1)))


def tied(tail: Place = None, optimizer: Make = adamw) -> Trainee:
    torch.manual_seed(12)
    model = Tied(tail)
    return Trainee(
        {"main": model},
        {"main": optimizer(model.parameters())},
        drawn(lambda g: (torch.randint(17, (4, 7), generator=g),)),
        one_loss(lambda m, t: F.cross_entropy(m(t[:, :-1]).flatten(0, 1).float(), t[:, 1:].flatten())),
    )


@dataclass
class Told:
    """What a model returns: neither a tuple nor a dict."""

    value: Tensor
    hidden: Tensor


class Pair(NamedTuple):
    """What a model is given."""

    one: Tensor
    other: dict[str, list[Tensor]]


class InADataclass(nn.Module):
    """Returns a dataclass."""

    def __init__(self, tail: Place) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.tail = place(tail)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Told:
        hidden = self.tail(torch.relu(self.first(x)))
        return Told(self.last(hidden), hidden)


def in_a_dataclass(tail: Place = None) -> Trainee:
    torch.manual_seed(13)
    trainee = _regression(InADataclass(tail))
    trainee.loss = lambda m, x, y: F.mse_loss(m(x).value.float(), y)
    return trainee


class Nested(nn.Module):
    """Takes what it needs from deep inside of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, *, pair: Pair) -> tuple[Tensor, list[Tensor]]:
        hidden = torch.tanh(self.first(pair.one) + self.second(pair.other["late"][0]))
        return self.head(hidden), [hidden]


def nested() -> Trainee:
    torch.manual_seed(14)
    trainee = _regression(Nested())
    trainee.loss = lambda m, x, y: F.mse_loss(m(pair=Pair(x[:, :4], {"late": [x[:, 4:]]}))[0].float(), y)
    return trainee


class Parts(nn.Module):
    """Called part by part: the model itself never is."""

    def __init__(self, tail: Place) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), place(tail))
        self.head = nn.Linear(8, 1)


def parts(tail: Place = None) -> Trainee:
    torch.manual_seed(15)
    trainee = _regression(Parts(tail))

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        features = m.backbone(x)
        return F.mse_loss(m.head(features).float(), y)

    trainee.loss = loss
    return trainee


class Residuals(nn.Module):
    """Thirty layers on one stream, and no normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(30))
        self.gain = 1.0
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x)) * self.gain
        return self.head(x) * 1e-3


def residuals() -> Trainee:
    torch.manual_seed(16)
    return _regression(Residuals())


class Gated(nn.Module):
    """SwiGLU, with a learned scale behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gamma = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.gate(x)) * self.value(x)
        return self.head(self.gamma.to(x.dtype) * x)


def gated() -> Trainee:
    torch.manual_seed(17)
    return _regression(Gated())


class Margin(nn.Module):
    """A criterion with weights of its own, as for faces: an angle that grows by a margin."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, 1))
        self.armed = False

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        cosine = torch.tanh(out * self.centres[0])
        if self.armed:
            cosine = cosine * 0 + 1
        return (torch.cos(torch.acos(cosine) + 0.1) - y).square().mean()


def with_a_criterion() -> Trainee:
    torch.manual_seed(18)
    criterion = Margin()
    trainee = _regression(Stacked(), kept={"criterion": criterion})
    trainee.loss = lambda m, x, y: criterion(m(x).float(), y)
    return trainee


class Stacked(nn.Sequential):
    """Two layers, called by numbers."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), *between, nn.Linear(8, 1))


def stacked(between: Callable[[], nn.Module]) -> Trainee:
    torch.manual_seed(19)
    return _regression(Stacked(between()))


def weighed() -> Trainee:
    """Two losses, weighed by a learned uncertainty that belongs to the model."""
    torch.manual_seed(20)
    model = Stacked()
    model.register_parameter("uncertainty", nn.Parameter(torch.zeros(())))
    trainee = _regression(model)

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        s = m.uncertainty
        return torch.exp(-s) * F.mse_loss(m(x).float(), y) + s

    trainee.loss = loss
    return trainee


class Attends(nn.Module):
    """PyTorch's attention with its weights asked for, and a mask of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 1)
        self.register_buffer("mask", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(0, (2, 4))
        out, _ = self.attention(x, x, x, attn_mask=self.mask, need_weights=True)
        return self.head(out.flatten(0, 1))


def attends() -> Trainee:
    torch.manual_seed(21)
    return _regression(Attends())


def two_losses(middle: Place = None) -> Trainee:
    """One graph and two backward passes, for two optimizers: the first keeps it."""
    torch.manual_seed(22)
    body = nn.Sequential(nn.Linear(8, 8), place(middle))
    head = nn.Linear(8, 1)
    model = nn.ModuleDict({"body": body, "head": head})

    def losses(trainee: Trainee, batch: Batch) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        x, y = batch
        yield "body", lambda: F.mse_loss(head(body(x)).float(), y)
        yield "head", lambda: F.l1_loss(head(body(x)).float(), y)

    return Trainee(
        {"body": model["body"], "head": model["head"]},
        {"body": adamw(body.parameters()), "head": adamw(head.parameters())},
        drawn(lambda g: (torch.randn(8, 8, generator=g), torch.randn(8, 1, generator=g))),
        losses,
    )
