"""Perceptrons: two heads on one trunk, and one layer that is used again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.models.trainee import Batch, Make, Place, Trainee, adamw, drawn, one_loss, place


class TwoHeads(nn.Module):
    """A trunk with two heads; each head may have an optimizer of its own."""

    def __init__(self, left: Place, right: Place) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 12)
        self.left = nn.Sequential(place(left), nn.Linear(12, 1))
        self.right = nn.Sequential(place(right), nn.Linear(12, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.trunk(x))
        return {"left": self.left(x), "right": self.right(x)}


def two_heads(
    left: Place = None,
    right: Place = None,
    both: bool = True,
    split: bool = False,
    optimizer: Make = adamw,
) -> Trainee:
    """One loss of both heads (`both=False`: of the left one only, so that the other's output reaches nothing), or
    with `split` two optimizers over one model: `main` trains trunk and left head, `right` the right head.
    """
    torch.manual_seed(4)
    model = TwoHeads(left, right)

    def losses(trainee: Trainee, batch: Batch) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        x, y = batch

        def of(head: str) -> Tensor:
            return F.mse_loss(model(x)[head].float(), y)

        def of_both() -> Tensor:
            out = model(x)
            return F.mse_loss(out["left"].float(), y) + F.mse_loss(out["right"].float(), y)

        if split:
            yield "main", lambda: of("left")
            yield "right", lambda: of("right")
        else:
            yield "main", of_both if both else lambda: of("left")

    if split:
        optimizers = {
            "main": optimizer([*model.trunk.parameters(), *model.left.parameters()]),
            "right": optimizer(model.right.parameters()),
        }
    else:
        optimizers = {"main": optimizer(model.parameters())}
    return Trainee(
        {"main": model} | ({"right": model} if split else {}),
        optimizers,
        drawn(lambda g: (torch.randn(6, 5, generator=g), torch.randn(6, 1, generator=g))),
        losses,
    )


class Stack(nn.Module):
    """One layer used again and again, and a head."""

    def __init__(self, times: int, between: Place, tail: Place) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.between = place(between)
        self.tail = place(tail)
        self.head = nn.Linear(8, 1)
        self.times = times

    def forward(self, x: Tensor, offset: Tensor | None = None) -> Tensor:
        for _ in range(self.times):
            x = self.between(self.shared(x))
        x = self.tail(x)
        return self.head(x if offset is None else x + offset)


def stack(
    times: int = 3,
    between: Place = None,
    tail: Place = None,
    accumulate: int = 1,
    optimizer: Make = adamw,
) -> Trainee:
    """Regression; with `accumulate` so many quarters of a batch in each step."""
    torch.manual_seed(5)
    model = Stack(times, between, tail)

    def losses(trainee: Trainee, batch: Batch) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        x, y, *rest = batch
        chosen = trainee.loss or (lambda m, x, y, *rest: F.mse_loss(m(x, *rest).float(), y))
        for part in range(accumulate):
            rows = slice(part * len(x) // accumulate, (part + 1) * len(x) // accumulate)
            yield "main", lambda rows=rows: chosen(model, x[rows], y[rows], *(r[rows] for r in rest))

    return Trainee(
        {"main": model},
        {"main": optimizer(model.parameters())},
        drawn(lambda g: (torch.randn(8, 8, generator=g), torch.randn(8, 1, generator=g))),
        losses,
    )


class Scored(nn.Module):
    """A model that returns its own loss, as those of large libraries do."""

    def __init__(self, tail: Place) -> None:
        super().__init__()
        self.body = Stack(2, None, tail)
        self.sure = 1.0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = self.body(x).float()
        chance = torch.sigmoid(out * self.sure)
        loss = -torch.log(torch.where(y > 0, chance, 1 - chance)).mean()
        return {"loss": loss, "out": out}


def scored(tail: Place = None, optimizer: Make = adamw) -> Trainee:
    """A model whose output is the loss."""
    torch.manual_seed(9)
    model = Scored(tail)
    return Trainee(
        {"main": model},
        {"main": optimizer(model.parameters())},
        drawn(lambda g: (torch.randn(8, 8, generator=g), torch.randn(8, 1, generator=g))),
        one_loss(lambda m, x, y: m(x, y)["loss"]),
    )


def taught(tail: Place = None, optimizer: Make = adamw) -> Trainee:
    """A student that follows a teacher, which nobody trains."""
    trainee = stack(optimizer=optimizer)
    torch.manual_seed(10)
    teacher = Stack(3, None, tail)
    trainee.kept["teacher"] = teacher

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        return F.mse_loss(m(x).float(), wanted.float())

    trainee.loss = loss
    return trainee
