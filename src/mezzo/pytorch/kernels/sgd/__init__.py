"""Stochastic gradient descent, with momentum and Nesterov's form of it, as `torch.optim.SGD` has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mezzo.pytorch.kernels.states import StateSpec

_MOMENTUM = (StateSpec("momentum_buffer", signed=True),)


class SgdConstants(NamedTuple):
    """What one step multiplies with: computed in FP64, to be rounded to FP32 once."""

    lr: float
    momentum: float
    one_minus_dampening: float
    weight_decay: float
    is_first: bool  # the buffer starts as the gradient, undampened


@dataclass(frozen=True, slots=True)
class SgdHyper:
    """One parameter group's settings.

    Args:
        lr: learning rate.
        momentum: decay of the buffer; 0 for none, and then no state either.
        dampening: the part of the gradient that does not enter the buffer.
        weight_decay: coefficient of an L2 term in the gradient.
        nesterov: look ahead along the buffer.
        maximize: go up the gradient.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The states that a parameter has under these settings."""
        return _MOMENTUM if self.momentum else ()

    def constants(self, step: int) -> SgdConstants:
        """The factors of a parameter's move number `step` (1, 2, ...)."""
        return SgdConstants(
            lr=self.lr,
            momentum=self.momentum,
            one_minus_dampening=1 - self.dampening,
            weight_decay=self.weight_decay,
            is_first=step == 1,
        )
