"""SGD as PyTorch operations in FP32: each line is one rounding, in this order, in every form of it."""

from __future__ import annotations

from torch import Tensor

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
        g = g + c.weight_decay * w
    if hyper.momentum:
        buffer = g if c.is_first else c.momentum * states[0] + c.one_minus_dampening * g
        g = g + c.momentum * buffer if hyper.nesterov else buffer
        states = (buffer,)
    return w - c.lr * g, states
