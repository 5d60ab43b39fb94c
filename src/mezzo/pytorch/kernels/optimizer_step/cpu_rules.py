"""The update rules on one element: `rules`, line by line.

A rule takes the master, the gradient, two states and the constants in FP32 (`AdamConstants`; `SgdConstants`, then 1 for
Nesterov or 0; `LionConstants`), and gives the new master and states. States that a rule does not use pass through.
"""

from __future__ import annotations

from math import sqrt

from mezzo.pytorch.kernels.cpu import f32, fma, inline

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


@inline
def plain(w: float, g: float, a: float, b: float, constants: Constants) -> tuple[float, float, float]:
    """Without momentum."""
    lr, weight_decay = constants[0], constants[3]
    g = fma(weight_decay, w, g) if weight_decay != 0 else g
    return fma(-lr, g, w), a, b


@inline
def momentum(w: float, g: float, buf: float, b: float, constants: Constants) -> tuple[float, float, float]:
    """With momentum, Nesterov's or not."""
    lr, momentum, one_minus_dampening, weight_decay, is_first, nesterov = constants[:6]
    g = fma(weight_decay, w, g) if weight_decay != 0 else g
    buf = g if is_first != 0 else fma(one_minus_dampening, g, momentum * buf)
    g = fma(momentum, buf, g) if nesterov != 0 else buf
    return fma(-lr, g, w), buf, b


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
