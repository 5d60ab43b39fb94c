"""SGD on one element: `sgd.reference`, line by line.

A rule takes the master, the gradient, two states (here at most one is used) and the constants (`SgdConstants`, in
FP32, then 1 for Nesterov or 0), and gives the new master and states.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.native import fma, inline

Constants = tuple[float, ...]


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
