"""Lion as PyTorch operations in FP32: each operation is one rounding, in this order, in every form of it."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.pytorch.kernels.lion import LionHyper


def update(
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
