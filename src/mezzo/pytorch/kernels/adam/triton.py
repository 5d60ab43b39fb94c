"""Adam and AdamW in Triton: the lines of `reference.py`, on one block; and their constants, on the device.

How often a parameter has moved is known on the device alone (an overflow skips a move without telling the host),
so the bias corrections are computed there, in FP64 like the reference's.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from mezzo.pytorch.kernels.adam import AdamHyper
from mezzo.pytorch.kernels.fma.triton import fma

L2 = 1
MAXIMIZE = 2


def packed(hyper: AdamHyper) -> tuple[float, ...]:
    """The FP64 numbers from which `constants` starts."""
    c = hyper.constants(1)
    return (
        hyper.lr,
        hyper.beta1,
        hyper.beta2,
        c.decay,
        c.weight_decay,
        c.one_minus_beta1,
        c.one_minus_beta2,
        c.eps,
    )


def variant(hyper: AdamHyper) -> int:
    """Which code the settings need, as bits: `L2`, `MAXIMIZE`."""
    coupled = not hyper.decoupled and hyper.weight_decay != 0
    return L2 * coupled + MAXIMIZE * hyper.maximize


@triton.jit
def constants(hyper: tl.tensor, step: tl.tensor) -> tl.tuple:
    """What move number `step`, an int32 scalar, multiplies with, in FP32; `hyper` points at `packed`."""
    lr = tl.load(hyper)
    beta1 = tl.load(hyper + 1)
    beta2 = tl.load(hyper + 2)
    decay = tl.load(hyper + 3).to(tl.float32)
    weight_decay = tl.load(hyper + 4).to(tl.float32)
    one_minus_beta1 = tl.load(hyper + 5).to(tl.float32)
    one_minus_beta2 = tl.load(hyper + 6).to(tl.float32)
    eps = tl.load(hyper + 7).to(tl.float32)
    step_size = (lr / (1.0 - power(beta1, step))).to(tl.float32)
    inv_bc2 = (1.0 / tl.sqrt(1.0 - power(beta2, step))).to(tl.float32)
    return (
        decay,
        weight_decay,
        one_minus_beta1,
        beta2.to(tl.float32),
        one_minus_beta2,
        step_size,
        inv_bc2,
        eps,
    )


@triton.jit
def update(w: tl.tensor, g: tl.tensor, m: tl.tensor, v: tl.tensor, c: tl.tuple, l2: tl.constexpr) -> tl.tuple:
    """New FP32 values and moments of a block; an AdamW without weight decay has a `decay` of 1."""
    decay, weight_decay, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_bc2, eps = c
    if l2:
        g = fma(weight_decay, w, g)
    else:
        w = w * decay
    m = m + one_minus_beta1 * (g - m)
    v = beta2 * v + (one_minus_beta2 * g) * g
    w = w - tl.div_rn(step_size * m, tl.sqrt_rn(v) * inv_bc2 + eps)
    return w, m, v


@triton.jit
def power(base: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    """``base ** exponent`` of an FP64 scalar by squaring: IEEE products alone, so the same on every device.

    Off by at most about `exponent` units of 2**-53; where that matters the power is small.
    """
    result = base * 0.0 + 1.0
    while exponent > 0:
        result = tl.where((exponent & 1) == 1, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result
