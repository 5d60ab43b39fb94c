"""Adam and AdamW on one element: `adam.reference`, line by line.

A rule takes the master, the gradient, both moments and the constants (`AdamConstants`, in FP32), and gives the new
master and moments. AdamW is also Adam without weight decay, for a factor of 1 changes nothing.
"""

from __future__ import annotations

from math import sqrt

from mezzo.pytorch.kernels.native import fma, inline

Constants = tuple[float, ...]


@inline
def adamw(w: float, g: float, m: float, v: float, constants: Constants) -> tuple[float, float, float]:
    """Adam with decoupled weight decay."""
    decay, _, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_bc2, eps = constants[:8]
    w = w * decay
    m = m + one_minus_beta1 * (g - m)
    v = beta2 * v + one_minus_beta2 * g * g
    return w - step_size * m / (sqrt(v) * inv_bc2 + eps), m, v


@inline
def adam(w: float, g: float, m: float, v: float, constants: Constants) -> tuple[float, float, float]:
    """Adam with an L2 term in the gradient."""
    g = fma(constants[1], w, g)
    return adamw(w, g, m, v, constants)
