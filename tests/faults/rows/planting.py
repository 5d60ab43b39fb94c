"""Ways of planting a fault in a training that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from faults.models import Batch, Trainee


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
