"""Lion: steps of one size everywhere, in the direction of an interpolated momentum's sign.

X. Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from mezzo.pytorch.kernels.states import StateSpec


class LionConstants(NamedTuple):
    """What one step multiplies with: computed in FP64, to be rounded to FP32 once."""

    lr: float
    decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float


@dataclass(frozen=True, slots=True)
class LionHyper:
    """One parameter group's settings.

    Args:
        lr: learning rate, which is the size of every element's step.
        beta1: weight of the momentum in the direction.
        beta2: decay of the momentum.
        weight_decay: decoupled, a coefficient of the weight.
        maximize: go up the gradient.
    """

    lr: float
    beta1: float
    beta2: float
    weight_decay: float = 0.0
    maximize: bool = False

    STATES: ClassVar[tuple[StateSpec, ...]] = (StateSpec("exp_avg", signed=True),)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The states that a parameter has under these settings."""
        return self.STATES

    def constants(self, step: int) -> LionConstants:
        """The factors of a move; the same for every `step`."""
        return LionConstants(
            lr=self.lr,
            decay=1 - self.lr * self.weight_decay,
            beta1=self.beta1,
            one_minus_beta1=1 - self.beta1,
            beta2=self.beta2,
            one_minus_beta2=1 - self.beta2,
        )
