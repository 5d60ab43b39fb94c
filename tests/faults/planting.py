"""Ways of planting a fault in a training that runs: in weights, batches, states, and the loss outside of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mezzo
from faults import plants
from faults.models import FAMILIES, Batch, Place, Trainee, cnn

Plant = Callable[[Trainee], Any]


def _changed(path: str, name: str, change: Callable[[Tensor], Any]) -> Plant:
    def plant(trainee: Trainee) -> None:
        with torch.no_grad():
            change(getattr(trainee.model.get_submodule(path), name))

    return plant


def weight(path: str, value: float, parameter: str = "weight") -> Plant:
    return _changed(path, parameter, lambda tensor: tensor.view(-1)[0].fill_(value))


def grown(path: str, gain: float, parameter: str = "weight") -> Plant:
    return _changed(path, parameter, lambda tensor: tensor.mul_(gain))


def filled(path: str, name: str, value: float) -> Plant:
    return _changed(path, name, lambda tensor: tensor.fill_(value))


def attribute(path: str, name: str, value: Any) -> Plant:
    return lambda trainee: setattr(trainee.model.get_submodule(path), name, value)


def batch(spoil: Callable[..., Batch]) -> Plant:
    """Every batch from now on, as a function of its tensors."""
    return lambda trainee: setattr(trainee, "spoil", lambda old: spoil(*old))


def element(value: float, place: int = 0, row: int = 0) -> Plant:
    """One number of one sample of a batch's tensor number `place`."""

    def spoil(*old: Tensor) -> Batch:
        tensors = list(old)
        tensors[place] = old[place].clone()
        tensors[place][row].view(-1)[0] = value
        return tuple(tensors)

    return batch(spoil)


def loss(own: Callable[..., Tensor]) -> Plant:
    return lambda trainee: setattr(trainee, "loss", own)


def learning_rate(rate: float) -> Plant:
    return lambda trainee: trainee.optimizers["main"].param_groups[0].update(lr=rate)


def state(path: str, name: str, value: float) -> Plant:
    def plant(trainee: Trainee) -> None:
        of_weight = trainee.optimizers["main"].state[trainee.model.get_submodule(path).weight]
        of_weight[name].fill_(value)

    return plant


def both(*plants_: Plant) -> Plant:
    return lambda trainee: [plant(trainee) for plant in plants_]


def marked(mask: Tensor, row: int, value: Any) -> Tensor:
    mask = mask.clone()
    mask[row] = value
    return mask


padded_row = batch(lambda tokens, _: (tokens, marked(torch.zeros(len(tokens), 8, dtype=torch.bool), 1, True)))
poisoned_offset = batch(lambda x, y: (x, y, marked(torch.zeros_like(x), 0, float("nan"))))
all_padding = batch(lambda tokens, padding, y: (tokens, torch.ones_like(padding), y))
late_nan = batch(lambda x, y: (x.index_fill(1, torch.tensor([6]), float("nan")), y))


def masked(tail: Place) -> Trainee:
    """A CNN that forbids its last class with -inf, and is never given it as a label."""
    trainee = cnn(tail=tail, end=plants.masks_logits)
    trainee.loss = lambda m, x, y: F.cross_entropy(m(x), y.clamp(max=2))
    return trainee


no_temperature = loss(lambda m, x, y: F.cross_entropy(m(x).float() / 0.0, y))
huge_factor = loss(lambda m, x, y: F.mse_loss(m(x).float(), y) * 1e39)
log_of_zero = loss(
    lambda m, x, y: -torch.log(torch.softmax(m(x).float() * 1e4, -1).gather(1, y[:, None])).mean()
)
nothing_kept = loss(
    lambda m, x, y: (F.cross_entropy(m(x), y, reduction="none") * 0).sum() / (y > 100).float().sum()
)
distance_of_nothing = loss(
    lambda m, x, y: ((out := m(x).float()) - out.detach()).square().sum().sqrt() + out.mean()
)
half_of_a_square = loss(
    lambda m, x, y: ((missed := ((m(x).float() - y) * 1e3 + 300.0).half()) * missed).float().mean()
)
divides_by_its_spread = loss(lambda m, x, y: ((out := m(x).float()) / (out - out.detach())).mean())
# The density of a normal distribution whose deviation is 0.
certain = loss(
    lambda m, x, y: (
        -torch.distributions.Normal(m(x).float(), torch.zeros(1), validate_args=False).log_prob(y).mean()
    )
)


@loss
def far_from_start(m: Any, x: Tensor, y: Tensor) -> Tensor:
    now = m.head.weight
    return F.mse_loss(m(x).float(), y) + ((now - now.detach().clone()) ** 2).sum().sqrt()


@loss
def focal(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """(1 - p)^0.5, where p has become 1."""
    logits = m(x).float()
    p = torch.softmax(logits + F.one_hot(y, logits.shape[-1]) * 1e3, -1).gather(1, y[:, None])
    return F.cross_entropy(logits, y) + ((1 - p) ** 0.5).mean()


@loss
def changed_afterwards(m: Any, x: Tensor, y: Tensor) -> Tensor:
    out = m(x)
    with torch.no_grad():
        x.zero_()
    return F.mse_loss(out.float(), y)


@loss
def contrast(m: Any, x: Tensor, y: Tensor) -> Tensor:
    out = F.normalize(m(x).float().expand(-1, 4), dim=-1)
    raised = torch.exp(out @ out.T / 0.005)
    return -torch.log(raised.diagonal() / raised.sum(1)).mean()


def mezzos(params: Any) -> Any:
    return mezzo.optim.AdamW(params, lr=1e-3)


def split_weights(params: Any) -> Any:
    return mezzo.optim.AdamW(params, lr=1e-3, masters="split")


FAMILIES[masked] = "CNN"
