"""Ways of planting a fault in a training that runs: in weights, batches, states, and the loss outside of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
from faults import plants
from faults.models import FAMILIES, Batch, Trainee, cnn, stack


def weight(path: str, value: float, parameter: str = "weight") -> Callable[[Trainee], None]:
    """One element of a parameter set to a number."""

    def plant(trainee: Trainee) -> None:
        with torch.no_grad():
            getattr(trainee.model.get_submodule(path), parameter).view(-1)[0] = value

    return plant


def grown(path: str, gain: float, parameter: str = "weight") -> Callable[[Trainee], None]:
    """A whole parameter multiplied."""

    def plant(trainee: Trainee) -> None:
        with torch.no_grad():
            getattr(trainee.model.get_submodule(path), parameter).mul_(gain)

    return plant


def buffer(path: str, name: str, value: float) -> Callable[[Trainee], None]:
    """A buffer filled with a number."""

    def plant(trainee: Trainee) -> None:
        getattr(trainee.model.get_submodule(path), name).fill_(value)

    return plant


def batch(spoil: Callable[[Batch], Batch]) -> Callable[[Trainee], None]:
    """Every batch from now on."""

    def plant(trainee: Trainee) -> None:
        trainee.spoil = spoil

    return plant


def element(value: float, place: int = 0, row: int = 0) -> Callable[[Trainee], None]:
    """One number of one sample of a batch's tensor number `place`."""

    def spoil(old: Batch) -> Batch:
        tensors = list(old)
        tensors[place] = old[place].clone()
        tensors[place][row].view(-1)[0] = value
        return tuple(tensors)

    return batch(spoil)


def loss(own: Callable[..., Tensor]) -> Callable[[Trainee], None]:
    """Another loss from now on."""

    def plant(trainee: Trainee) -> None:
        trainee.loss = own

    return plant


def learning_rate(rate: float) -> Callable[[Trainee], None]:
    """A step that is far too long."""

    def plant(trainee: Trainee) -> None:
        for group in trainee.optimizers["main"].param_groups:
            group["lr"] = rate

    return plant


def state(path: str, name: str, value: float) -> Callable[[Trainee], None]:
    """The optimizer's state of a module's weight filled with a number."""

    def plant(trainee: Trainee) -> None:
        of_weight = trainee.optimizers["main"].state[trainee.model.get_submodule(path).weight]
        of_weight[name].fill_(value)

    return plant


def both(*plants_: Callable[[Trainee], Any]) -> Callable[[Trainee], None]:
    """All of them."""

    def plant(trainee: Trainee) -> None:
        for each in plants_:
            each(trainee)

    return plant


def padded_row(old: Batch) -> Batch:
    tokens, _ = old
    padding = torch.zeros(len(tokens), 8, dtype=torch.bool)
    padding[1] = True
    return tokens, padding


def poisoned_offset(old: Batch) -> Batch:
    x, y = old
    offset = torch.zeros_like(x)
    offset[0, 0] = float("nan")
    return x, y, offset


def all_padding(old: Batch) -> Batch:
    tokens, padding, y = old
    return tokens, torch.ones_like(padding), y


def masked(tail: Callable[[], nn.Module]) -> Trainee:
    """A CNN that forbids its last class with -inf, and is never given it as a label."""
    trainee = cnn(tail=tail, end=plants.MasksLogits)
    trainee.loss = lambda m, x, y: F.cross_entropy(m(x), y.clamp(max=2))
    return trainee


def gain(trainee: Trainee) -> None:
    trainee.model.rnn.gain = 1e3


def certain_of_it(trainee: Trainee) -> None:
    trainee.model.sure = 1e6


def log_of_zero(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    told = torch.softmax(m(x).float() * 1e4, -1)
    return -torch.log(told.gather(1, y[:, None])).mean()


def nothing_kept(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(m(x), y, reduction="none")
    keep = (y > 100).float()
    return (losses * keep).sum() / keep.sum()


def no_temperature(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x).float() / 0.0, y)


def distance_of_nothing(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = m(x).float()
    return (out - y).square().mean() + (out - out.detach()).square().sum().sqrt()


def far_from_start(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The distance of the weights from a copy of them that has just been taken."""
    now = m.head.weight
    start = now.detach().clone()
    return F.mse_loss(m(x).float(), y) + ((now - start) ** 2).sum().sqrt()


def focal(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """(1 - p)^0.5, where p has become 1."""
    logits = m(x).float()
    sure = F.one_hot(y, logits.shape[-1]) * 1e3
    p = torch.softmax(logits + sure, -1).gather(1, y[:, None])
    return F.cross_entropy(logits, y) + ((1 - p) ** 0.5).mean()


def huge_factor(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m(x).float(), y) * 1e39


def half_of_a_square(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    missed = (m(x).float() - y) * 1e3 + 300.0
    return (missed.half() * missed.half()).float().mean()


def changed_afterwards(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The input is overwritten once the model has seen it."""
    out = m(x)
    with torch.no_grad():
        x.zero_()
    return F.mse_loss(out.float(), y)


def divides_by_its_spread(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = m(x).float()
    return F.mse_loss(out, y) + (out / (out - out.detach())).mean()


def certain(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The density of a normal distribution whose deviation is 0."""
    told = torch.distributions.Normal(m(x).float(), torch.zeros(1), validate_args=False)
    return -told.log_prob(y).mean()


def attribute(name: str, value: Any) -> Any:
    return lambda trainee: setattr(trainee.model, name, value)


def closed_row(trainee: Trainee) -> None:
    trainee.model.mask[2] = float("-inf")


def contrast(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Similarities raised without their maximum."""
    out = F.normalize(m(x).float().expand(-1, 4), dim=-1)
    raised = torch.exp(out @ out.T / 0.005)
    return -torch.log(raised.diagonal() / raised.sum(1)).mean()


def uncertain(trainee: Trainee) -> None:
    with torch.no_grad():
        trainee.model.uncertainty.fill_(-200.0)


class Draws(nn.Module):
    """Is given an iterator, and takes from it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.gain = 1.0

    def forward(self, rows: Iterator[Tensor]) -> Tensor:
        x = torch.stack(list(rows))
        return self.last(torch.relu(self.first(x)) * self.gain)


def iterated() -> Trainee:
    trainee = stack()
    torch.manual_seed(31)
    model = Draws()
    trainee.models["main"] = model
    trainee.optimizers["main"] = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainee.losses = _of_rows
    return trainee


def _of_rows(trainee: Trainee, batch: Any) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    x, y = batch
    yield "main", lambda: F.mse_loss(trainee.model(iter(x)).float(), y)


def strong(trainee: Trainee) -> None:
    trainee.model.gain = 1e7


def mezzos(params: Any) -> Any:
    return mezzo.optim.AdamW(params, lr=1e-3)


def split_weights(params: Any) -> Any:
    return mezzo.optim.AdamW(params, lr=1e-3, masters="split")


FAMILIES[masked] = "CNN"
