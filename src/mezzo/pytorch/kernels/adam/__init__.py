"""Adam and AdamW: steps in units of the gradient's own size, from two moving averages.

D. P. Kingma and J. Ba, "Adam: A Method for Stochastic Optimization", 2015; I. Loshchilov and F. Hutter,
"Decoupled Weight Decay Regularization", 2019.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from mezzo.pytorch.kernels.states import StateSpec


class AdamConstants(NamedTuple):
    """What one step multiplies with: computed in FP64, to be rounded to FP32 once."""

    decay: float  # of the weight, 1 unless decoupled
    weight_decay: float  # into the gradient, 0 if decoupled
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float  # lr / (1 - beta1^t)
    inv_bc2: float  # 1 / sqrt(1 - beta2^t)
    eps: float


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """One parameter group's settings.

    Args:
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: a coefficient, of the weight if `decoupled` (AdamW), else of an L2 term in the gradient.
        decoupled: AdamW instead of Adam.
        maximize: go up the gradient.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool = False

    STATES: ClassVar[tuple[StateSpec, ...]] = (
        StateSpec("exp_avg", signed=True),
        StateSpec("exp_avg_sq", signed=False),
    )

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The states that a parameter has under these settings."""
        return self.STATES

    def constants(self, step: int) -> AdamConstants:
        """The factors of a parameter's move number `step` (1, 2, ...)."""
        return AdamConstants(
            decay=1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            weight_decay=0.0 if self.decoupled else self.weight_decay,
            one_minus_beta1=1 - self.beta1,
            beta2=self.beta2,
            one_minus_beta2=1 - self.beta2,
            step_size=self.lr / (1 - self.beta1**step),
            inv_bc2=1 / math.sqrt(1 - self.beta2**step),
            eps=self.eps,
        )
