"""Lion in Triton: the lines of `reference.py`, on one block."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from mezzo.pytorch.kernels.lion import LionHyper

MAXIMIZE = 2


def packed(hyper: LionHyper) -> tuple[float, ...]:
    """The FP64 numbers from which `constants` starts."""
    c = hyper.constants(1)
    return (c.lr, c.decay, c.beta1, c.one_minus_beta1, c.beta2, c.one_minus_beta2)


def variant(hyper: LionHyper) -> int:
    """Which code the settings need, as bits: `MAXIMIZE`."""
    return MAXIMIZE * hyper.maximize


@triton.jit
def constants(hyper: tl.tensor, step: tl.tensor) -> tl.tuple:
    """What a move multiplies with, in FP32, whatever its number; `hyper` points at `packed`."""
    lr = tl.load(hyper).to(tl.float32)
    decay = tl.load(hyper + 1).to(tl.float32)
    beta1 = tl.load(hyper + 2).to(tl.float32)
    one_minus_beta1 = tl.load(hyper + 3).to(tl.float32)
    beta2 = tl.load(hyper + 4).to(tl.float32)
    one_minus_beta2 = tl.load(hyper + 5).to(tl.float32)
    return lr, decay, beta1, one_minus_beta1, beta2, one_minus_beta2


@triton.jit
def update(w: tl.tensor, g: tl.tensor, m: tl.tensor, c: tl.tuple) -> tl.tuple:
    """New FP32 values and momentum of a block."""
    lr, decay, beta1, one_minus_beta1, beta2, one_minus_beta2 = c
    w = w * decay
    u = beta1 * m + one_minus_beta1 * g
    u = tl.where(u > 0, 1.0, tl.where(u < 0, -1.0, tl.where(u == 0, 0.0, u)))
    w = w - lr * u
    m = beta2 * m + one_minus_beta2 * g
    return w, m
