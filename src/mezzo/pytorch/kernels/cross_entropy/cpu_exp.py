"""exp in FP32 for a loop over many numbers: no branches, 12 operations, so that 16 lanes compute at once.

``exp(x) = 2**n * exp(r)`` with ``n`` the nearest integer to ``x / log(2)`` and ``|r| <= log(2) / 2``. Added to
1.5 * 2**23 a number is rounded to an integer, which is then the sum's lowest bits; shifted by 23 they are an exponent.
The polynomial is the one of degree 6 that starts with ``1 + r`` and has the least relative error on the interval, 3e-9
(Lawson's iteration, weights of the errors). log(2) is one FP32 number: what is lost to it is a twentieth of what is
lost in ``x`` itself, which is a difference of two rounded numbers. Measured on a grid of FP32 numbers: 1.3 ulp from -16
to 0, and 4.5 at -87. Degree 5 would be 2.5 ulp.

The constants are handed over, from `constants`, once for each row. Seen as constants they are loaded again and again:
LLVM moves them out of all loops, where calls of other functions leave no register for them, and then back to where
they are used. That doubles the loads of the loop, and it takes half as long again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from mezzo.pytorch.kernels.native import bits, f32, float_of, fma, i32, inline, intrinsic, types

BIAS = 64
"""The exponential times 2**64 is far from subnormal numbers wherever what it is scaled to later is not zero."""

Constants = tuple[float, ...]

_ROUND = f32(1.5 * 2**23)
_ROUND_BIASED = f32(1.5 * 2**23 + BIAS)
_LEAST = f32(-126 * math.log(2))
_LEAST_BIASED = f32(-(126 + BIAS) * math.log(2))
_PER_LOG2 = f32(1 / math.log(2))
_LOG2 = f32(-math.log(2))
C6 = f32(0.0013814540579915047)
C5 = f32(0.00836874540614519)
C4 = f32(0.04166838899254799)
C3 = f32(0.1666652113199234)
C2 = f32(0.4999999403953552)
_ONE = f32(1.0)


def _held(typing: Any, pattern: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        return builder.asm(ir.FunctionType(word, [word]), "", "=r,0", [args[0]], side_effect=True)

    return types.int32(types.int32), build


held: Callable[[int], int] = intrinsic(_held)
"""The same int32, of which the compiler knows nothing."""


@inline
def hold(value: float) -> float:
    """The same FP32, of which the compiler knows nothing."""
    return float_of(held(bits(value)))


@inline
def constants() -> Constants:
    """For `exp`, up to 88. Of less than -87.3, where it would be subnormal, it is 2**-126 or less."""
    return (
        hold(_LEAST), hold(_PER_LOG2), hold(_ROUND), hold(_LOG2),
        hold(C6), hold(C5), hold(C4), hold(C3), hold(C2), hold(_ONE),
    )  # fmt: skip


@inline
def biased_constants() -> Constants:
    """For 2**64 times the exponential, up to 44. Of less than -131.7 it is 2**-126 or less."""
    return (
        hold(_LEAST_BIASED), hold(_PER_LOG2), hold(_ROUND_BIASED), hold(_LOG2),
        hold(C6), hold(C5), hold(C4), hold(C3), hold(C2), hold(_ONE),
    )  # fmt: skip


@inline
def exp(x: float, given: Constants) -> float:
    """exp, or what the constants make of it; NaN if x is, with its lowest 9 bits 0."""
    least, per_log2, rounding, log2, c6, c5, c4, c3, c2, one = given
    x = least if x < least else x  # in this order a NaN is kept
    t = fma(x, per_log2, rounding)
    r = fma(f32(t - rounding), log2, x)
    p = fma(c6, r, c5)
    p = fma(p, r, c4)
    p = fma(p, r, c3)
    p = fma(p, r, c2)
    p = fma(p, r, one)
    p = fma(p, r, one)
    return float_of(i32(bits(p) + i32(bits(t) << 23)))
