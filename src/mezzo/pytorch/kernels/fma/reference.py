"""The fused multiply-add as PyTorch operations, on any device that has FP64.

The product of two FP32 numbers is exact in FP64. The sum with a third need not be, and to round it to FP64 and then
to FP32 would be two roundings, wrong where the first ends on a tie of the second. So the first rounds *to odd*: what
is inexact gets the one of its two FP64 neighbours whose last bit is 1. That is never a tie of FP32's, it lies on
the same side of every tie as the exact sum, and so the second rounding is right by itself, in FP32's normal and
subnormal ranges alike.

S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd",
IEEE Transactions on Computers 57(4), 2008. The error of a sum is D. E. Knuth's: "The Art of Computer
Programming", volume 2, section 4.2.2, theorem B.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fma(a: float | Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` in exact arithmetic, rounded once, ties to even.

    NaN, infinities and the sign of a zero are IEEE 754's: ``inf * 0`` is NaN whatever is added.

    Args:
        a: FP32, or a number, which is rounded to FP32 first.
        b: FP32.
        c: FP32, of b's shape.
    """
    if not isinstance(a, Tensor):
        a = torch.tensor(a, dtype=torch.float32, device=b.device)
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)  # exact, or NaN where the total isn't finite
    bits = total.view(torch.int64)
    away = (error > 0) == (total > 0)  # from zero: a larger pattern, whatever the sign
    is_even = ((bits & 1) == 0) & (error.abs() > 0)
    odd = bits + torch.where(is_even, torch.where(away, 1, -1), 0)
    return odd.view(torch.float64).float()
