"""SGD as PyTorch operations in FP32: each operation is one rounding, in this order, in every form of it.

An `fma` is one operation, and stands where torch's own SGD has one: in each `add` with an `alpha`.
"""

from __future__ import annotations

from torch import Tensor

from mezzo.pytorch.kernels.fma.reference import fma
from mezzo.pytorch.kernels.sgd import SgdHyper


def update(
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
