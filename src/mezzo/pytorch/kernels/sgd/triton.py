"""SGD in Triton: the lines of `reference.py`, on one block."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from mezzo.pytorch.kernels.fma.triton import fma
from mezzo.pytorch.kernels.sgd import SgdHyper

L2 = 1
MAXIMIZE = 2
MOMENTUM = 4
NESTEROV = 8


def packed(hyper: SgdHyper) -> tuple[float, ...]:
    """The FP64 numbers from which `constants` starts."""
    c = hyper.constants(1)
    return (c.lr, c.momentum, c.one_minus_dampening, c.weight_decay)


def variant(hyper: SgdHyper) -> int:
    """Which code the settings need, as bits: `L2`, `MAXIMIZE`, `MOMENTUM`, `NESTEROV`."""
    momentum = hyper.momentum != 0
    nesterov = momentum and hyper.nesterov
    return (
        L2 * (hyper.weight_decay != 0) + MAXIMIZE * hyper.maximize + MOMENTUM * momentum + NESTEROV * nesterov
    )


@triton.jit
def constants(hyper: tl.tensor, step: tl.tensor) -> tl.tuple:
    """What move number `step`, an int32 scalar, multiplies with, in FP32; `hyper` points at `packed`."""
    minus_lr = tl.load(hyper).to(tl.float32) * -1.0
    momentum = tl.load(hyper + 1).to(tl.float32)
    one_minus_dampening = tl.load(hyper + 2).to(tl.float32)
    weight_decay = tl.load(hyper + 3).to(tl.float32)
    return minus_lr, momentum, one_minus_dampening, weight_decay, step == 1


@triton.jit
def update(
    w: tl.tensor,
    g: tl.tensor,
    buffer: tl.tensor,
    c: tl.tuple,
    l2: tl.constexpr,
    has_momentum: tl.constexpr,
    nesterov: tl.constexpr,
) -> tl.tuple:
    """New FP32 values and buffer of a block; without momentum `buffer` is passed through."""
    minus_lr, momentum, one_minus_dampening, weight_decay, is_first = c
    if l2:
        g = fma(weight_decay, w, g)
    if has_momentum:
        buffer = tl.where(is_first, g, fma(one_minus_dampening, g, momentum * buffer))
        if nesterov:
            g = fma(momentum, buffer, g)
        else:
            g = buffer
    return fma(minus_lr, g, w), buffer
