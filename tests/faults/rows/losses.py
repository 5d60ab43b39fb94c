"""Losses with a fault in them: outside of the model, where no hook on a module sees it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
