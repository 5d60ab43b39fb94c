"""Adam and AdamW as PyTorch operations in FP32: each operation is one rounding, in this order, in every form of it.

The L2 term is an `fma`, one operation, as in torch's own Adam; elsewhere a product is rounded before it is added.
"""

from __future__ import annotations

from torch import Tensor

from mezzo.pytorch.kernels.adam import AdamHyper
from mezzo.pytorch.kernels.fma.reference import fma


def update(
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
