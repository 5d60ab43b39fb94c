"""The update rules in Triton: the lines of `rules.py`, on one block; and their constants, on the device.

How often a parameter has moved is known on the device alone (an overflow skips a move without telling the host),
so Adam's bias corrections are computed there, in FP64 like the reference's. The fused multiply-add is the GPU's own
instruction, also where the compiler may contract nothing; of Triton's interpreter some versions round twice, so there
the lines of `rules.fma` serve.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from mezzo.pytorch.kernels.optimizer_step.rules import AdamHyper, LionHyper, SgdHyper

# Which code the settings of a group need, as bits.
L2, MAXIMIZE, MOMENTUM, NESTEROV = 1, 2, 4, 8


@triton.jit
def fma(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """``a * b + c`` with one rounding, of FP32 blocks, or a scalar `a` and blocks."""
    if _IS_INTERPRETED:
        return _through_fp64(a, b, c)
    else:
        return tl.fma(a, b, c)


@triton.jit
def _through_fp64(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    product, addend = a.to(tl.float64) * b.to(tl.float64), c.to(tl.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.to(tl.int64, bitcast=True)
    away = (error > 0) == (total > 0)
    is_even = ((bits & 1) == 0) & (tl.abs(error) > 0)
    odd = bits + tl.where(is_even, tl.where(away, 1, -1), 0)
    return odd.to(tl.float64, bitcast=True).to(tl.float32)


_IS_INTERPRETED = tl.constexpr(not isinstance(fma, triton.runtime.JITFunction))


def adam_packed(hyper: AdamHyper) -> tuple[float, ...]:
    """The FP64 numbers from which `adam_constants` starts."""
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


def adam_variant(hyper: AdamHyper) -> int:
    """Which code the settings need, as bits: `L2`, `MAXIMIZE`."""
    coupled = not hyper.decoupled and hyper.weight_decay != 0
    return L2 * coupled + MAXIMIZE * hyper.maximize


@triton.jit
def adam_constants(hyper: tl.tensor, step: tl.tensor) -> tl.tuple:
    """What move number `step`, an int32 scalar, multiplies with, in FP32; `hyper` points at `adam_packed`."""
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
def adam_update(
    w: tl.tensor, g: tl.tensor, m: tl.tensor, v: tl.tensor, c: tl.tuple, l2: tl.constexpr
) -> tl.tuple:
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


def sgd_packed(hyper: SgdHyper) -> tuple[float, ...]:
    """The FP64 numbers from which `sgd_constants` starts."""
    c = hyper.constants(1)
    return (c.lr, c.momentum, c.one_minus_dampening, c.weight_decay)


def sgd_variant(hyper: SgdHyper) -> int:
    """Which code the settings need, as bits: `L2`, `MAXIMIZE`, `MOMENTUM`, `NESTEROV`."""
    momentum = hyper.momentum != 0
    nesterov = momentum and hyper.nesterov
    return (
        L2 * (hyper.weight_decay != 0) + MAXIMIZE * hyper.maximize + MOMENTUM * momentum + NESTEROV * nesterov
    )


@triton.jit
def sgd_constants(hyper: tl.tensor, step: tl.tensor) -> tl.tuple:
    """What move number `step`, an int32 scalar, multiplies with, in FP32; `hyper` points at `sgd_packed`."""
    minus_lr = tl.load(hyper).to(tl.float32) * -1.0
    momentum = tl.load(hyper + 1).to(tl.float32)
    one_minus_dampening = tl.load(hyper + 2).to(tl.float32)
    weight_decay = tl.load(hyper + 3).to(tl.float32)
    return minus_lr, momentum, one_minus_dampening, weight_decay, step == 1


@triton.jit
def sgd_update(
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


def lion_packed(hyper: LionHyper) -> tuple[float, ...]:
    """The FP64 numbers from which `lion_constants` starts."""
    c = hyper.constants(1)
    return (c.lr, c.decay, c.beta1, c.one_minus_beta1, c.beta2, c.one_minus_beta2)


def lion_variant(hyper: LionHyper) -> int:
    """Which code the settings need, as bits: `MAXIMIZE`."""
    return MAXIMIZE * hyper.maximize


@triton.jit
def lion_constants(hyper: tl.tensor, step: tl.tensor) -> tl.tuple:
    """What a move multiplies with, in FP32, whatever its number; `hyper` points at `lion_packed`."""
    lr = tl.load(hyper).to(tl.float32)
    decay = tl.load(hyper + 1).to(tl.float32)
    beta1 = tl.load(hyper + 2).to(tl.float32)
    one_minus_beta1 = tl.load(hyper + 3).to(tl.float32)
    beta2 = tl.load(hyper + 4).to(tl.float32)
    one_minus_beta2 = tl.load(hyper + 5).to(tl.float32)
    return lr, decay, beta1, one_minus_beta1, beta2, one_minus_beta2


@triton.jit
def lion_update(w: tl.tensor, g: tl.tensor, m: tl.tensor, c: tl.tuple) -> tl.tuple:
    """New FP32 values and momentum of a block."""
    lr, decay, beta1, one_minus_beta1, beta2, one_minus_beta2 = c
    w = w * decay
    u = beta1 * m + one_minus_beta1 * g
    u = tl.where(u > 0, 1.0, tl.where(u < 0, -1.0, tl.where(u == 0, 0.0, u)))
    w = w - lr * u
    m = beta2 * m + one_minus_beta2 * g
    return w, m
