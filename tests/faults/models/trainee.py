"""Trainee: models, their optimizers and the losses of a step, drawn from seeds: two made alike train alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Any, ...]
Make = Callable[[Any], Optimizer]
Place = Callable[[], nn.Module] | None


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


@dataclass
class Trainee:
    """Models, their optimizers, and the losses of a step.

    Args:
        models: by the name of their part in the training; one, `main`, unless it is a GAN.
        optimizers: one for each part that has steps of its own.
        draw: step number -> batch.
        losses: the batch -> (part, loss of that part) in the order of the step; a loss is computed when it is called.
        spoil: what is done to each batch before it is used: where bad batches are planted.
        loss: a loss in place of the trainee's own: where faults outside of the model are planted.
        kept: models that nobody trains.
    """

    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    draw: Callable[[int], Batch]
    losses: Callable[[Trainee, Batch], Iterator[tuple[str, Callable[[], Tensor]]]]
    spoil: Callable[[Batch], Batch] = lambda batch: batch
    loss: Callable[..., Tensor] | None = None
    kept: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        return self.models["main"]

    def step(self, number: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """The losses of step `number`, each to be called inside its part's region."""
        return self.losses(self, self.spoil(self.draw(number)))

    def arm(self) -> None:
        """Let every fault that is built in act from now on."""
        for model in (*self.models.values(), *self.kept.values()):
            for module in model.modules():
                if hasattr(module, "armed"):
                    module.armed = True


def one_loss(default: Callable[..., Tensor]) -> Callable[[Trainee, Batch], Any]:
    def losses(trainee: Trainee, batch: Batch) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        chosen = trainee.loss or default
        yield "main", lambda: chosen(trainee.model, *batch)

    return losses


def drawn(make: Callable[[torch.Generator], Batch]) -> Callable[[int], Batch]:
    return lambda number: make(torch.Generator().manual_seed(100 + number))


def place(make: Place) -> nn.Module:
    return nn.Identity() if make is None else make()
