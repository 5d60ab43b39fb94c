"""SGD on one element: `sgd.reference`, line by line.

A rule takes the master, the gradient, two states (here at most one is used) and the constants (`SgdConstants`, in
FP32, then 1 for Nesterov or 0), and gives the new master and states.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.native import inline

Constants = tuple[float, ...]


@inline
def plain(w: float, g: float, a: float, b: float, constants: Constants) -> tuple[float, float, float]:
    """Without momentum."""
    lr, weight_decay = constants[0], constants[3]
    g = g + weight_decay * w if weight_decay != 0 else g
    return w - lr * g, a, b


@inline
def momentum(w: float, g: float, buf: float, b: float, constants: Constants) -> tuple[float, float, float]:
    """With momentum, Nesterov's or not."""
    lr, momentum, one_minus_dampening, weight_decay, is_first, nesterov = constants[:6]
    g = g + weight_decay * w if weight_decay != 0 else g
    buf = g if is_first != 0 else momentum * buf + one_minus_dampening * g
    g = g + momentum * buf if nesterov != 0 else buf
    return w - lr * g, buf, b
