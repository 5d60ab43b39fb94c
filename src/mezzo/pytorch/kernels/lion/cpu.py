"""Lion on one element: `lion.reference`, line by line.

A rule takes the master, the gradient, two states (here one is used) and the constants (`LionConstants`, in FP32),
and gives the new master and states.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.native import f32, inline

Constants = tuple[float, ...]


@inline
def lion(w: float, g: float, m: float, b: float, constants: Constants) -> tuple[float, float, float]:
    """A step of one size, in the direction of the interpolated momentum's sign."""
    lr, decay, beta1, one_minus_beta1, beta2, one_minus_beta2 = constants[:6]
    w = w * decay
    u = sign(beta1 * m + one_minus_beta1 * g)
    w = w - lr * u
    return w, beta2 * m + one_minus_beta2 * g, b


@inline
def sign(x: float) -> float:
    """1, -1, 0 for both zeros, NaN for NaN."""
    if x > 0:
        return f32(1)
    if x < 0:
        return f32(-1)
    return f32(0) if x == 0 else x
