"""The update rules: settings, constants, and one step in FP32 as PyTorch operations, the specification of the kernels.

Each operation is one rounding, in this order, in every form of a rule. An `fma` is one operation, and stands where
torch's own optimizers have one: in each `add` with an `alpha`. Elsewhere a product is rounded before it is added.

- Adam and AdamW: D. P. Kingma and J. Ba, "Adam: A Method for Stochastic Optimization", 2015; I. Loshchilov and
  F. Hutter, "Decoupled Weight Decay Regularization", 2019.
- SGD, with momentum and Nesterov's form of it, as `torch.optim.SGD` has them.
- Lion: X. Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mezzo.pytorch.kernels.optimizer_step.storage import StateSpec


def fma(a: float | Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` in exact arithmetic, rounded once, ties to even, on any device that has FP64.

    The product of two FP32 numbers is exact in FP64. The sum with a third need not be, and to round it to FP64 and
    then to FP32 would be two roundings, wrong where the first ends on a tie of the second. So the first rounds *to
    odd*: what is inexact gets the one of its two FP64 neighbours whose last bit is 1. That is never a tie of FP32's,
    it lies on the same side of every tie as the exact sum, and so the second rounding is right by itself, in FP32's
    normal and subnormal ranges alike.

    S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd",
    IEEE Transactions on Computers 57(4), 2008. The error of a sum is D. E. Knuth's: "The Art of Computer
    Programming", volume 2, section 4.2.2, theorem B.

    NaN, infinities and the sign of a zero are IEEE 754's: ``inf * 0`` is NaN whatever is added.

    Args:
        a: FP32, or a number, which is rounded to FP32 first.
        b: FP32.
        c: FP32, of b's shape.
    """
    if not isinstance(a, Tensor):
        a = torch.tensor(a, dtype=torch.float32, device=b.device)
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)  # exact, or NaN where the total isn't finite
    bits = total.view(torch.int64)
    away = (error > 0) == (total > 0)  # from zero: a larger pattern, whatever the sign
    is_even = ((bits & 1) == 0) & (error.abs() > 0)
    odd = bits + torch.where(is_even, torch.where(away, 1, -1), 0)
    return odd.view(torch.float64).float()


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


def adam_update(
    w: Tensor, g: Tensor, states: tuple[Tensor, ...], hyper: AdamHyper, step: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A parameter's new FP32 values and its new moments `(m, v)`; the arguments stay as they are.

    Args:
        w: the master.
        g: the gradient, unscaled and clipped.
        states: `(m, v)` before this step.
        hyper: the group's settings.
        step: the number of this move, from 1.
    """
    c = hyper.constants(step)
    m, v = states
    if hyper.decoupled:
        w = w * c.decay
    elif hyper.weight_decay:
        g = fma(c.weight_decay, w, g)
    m = m + c.one_minus_beta1 * (g - m)
    v = c.beta2 * v + (c.one_minus_beta2 * g) * g
    # In FP32, PyTorch's root on a CPU is off by an ulp in one element of six; through FP64 it is IEEE's.
    root = v.double().sqrt().float()
    w = w - (c.step_size * m) / (root * c.inv_bc2 + c.eps)
    return w, (m, v)


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


def sgd_update(
    w: Tensor, g: Tensor, states: tuple[Tensor, ...], hyper: SgdHyper, step: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A parameter's new FP32 values and its new buffer, if any; the arguments stay as they are.

    Args:
        w: the master.
        g: the gradient, unscaled and clipped.
        states: `(buffer,)` before this step, or `()` without momentum.
        hyper: the group's settings.
        step: the number of this move, from 1.
    """
    c = hyper.constants(step)
    if hyper.weight_decay:
        g = fma(c.weight_decay, w, g)
    if hyper.momentum:
        buffer = g if c.is_first else fma(c.one_minus_dampening, g, c.momentum * states[0])
        g = fma(c.momentum, buffer, g) if hyper.nesterov else buffer
        states = (buffer,)
    return fma(-c.lr, g, w), states


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


def lion_update(
    w: Tensor, g: Tensor, states: tuple[Tensor, ...], hyper: LionHyper, step: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A parameter's new FP32 values and its new momentum; the arguments stay as they are.

    Args:
        w: the master.
        g: the gradient, unscaled and clipped.
        states: `(m,)` before this step.
        hyper: the group's settings.
        step: the number of this move, from 1; it makes no difference.
    """
    c = hyper.constants(step)
    (m,) = states
    w = w * c.decay
    u = c.beta1 * m + c.one_minus_beta1 * g
    u = torch.where(u.isnan(), u, u.sign())
    w = w - c.lr * u
    m = c.beta2 * m + c.one_minus_beta2 * g
    return w, (m,)
