"""sigmoid and tanh in FP32 with their derivatives, for a loop over many numbers: no branches, 16 lanes at once.

With ``e = exp(-|x|)``, ``sigmoid`` is ``1 / (1 + e)`` or ``e / (1 + e)``, whichever side of 0 ``x`` is, and the
derivative is their product: nothing is subtracted, so a gate that is all but shut or open keeps its digits. With
``m = exp(2|x|) - 1``, computed as such near 0, ``tanh`` is ``m / (m + 2)``, and the derivative
``4 (m + 1) / (m + 2)**2``.

exp is ``2**n * exp(r)`` with ``n`` the nearest integer to ``x / log(2)`` and the polynomial of `cross_entropy.cpu_exp`;
log(2) is taken off as two numbers. On a grid of FP32 numbers `sigmoid` and `tanh` are within 2.5 ulp, what comes in
pairs within 3, tanh's derivative within 5 (`tests/test_recurrent_layer.py`); exp itself is within 1.
The constants are handed over once a row, from `constants`, for the reason given there.
"""

from __future__ import annotations

import math

from mezzo.pytorch.kernels.cross_entropy.cpu_exp import C2, C3, C4, C5, C6, Constants, hold
from mezzo.pytorch.kernels.native import bits, f32, float_of, fma, i32, inline

_ROUND = f32(1.5 * 2**23)
_PER_LOG2 = f32(1 / math.log(2))
_LOG2 = f32(-0.693147182464599609375)  # the nearest FP32
_LOG2_REST = f32(0.693147182464599609375 - math.log(2))
_ONE = f32(1.0)
_ZERO = f32(0.0)
_TWO = f32(2.0)
_LEAST = f32(-126 * math.log(2))
_MOST = f32(60.0)  # tanh is 1 from 9.1 on; further down nothing overflows or is subnormal
_SIGN, _MAGNITUDE = -(2**31), 2**31 - 1


@inline
def constants() -> Constants:
    """For all functions here."""
    return (
        hold(_PER_LOG2), hold(_ROUND), hold(_LOG2), hold(_LOG2_REST),
        hold(C6), hold(C5), hold(C4), hold(C3), hold(C2), hold(_ONE),
    )  # fmt: skip


@inline
def decay(x: float, given: Constants) -> float:
    """``exp(-|x|)``, 0 where that is subnormal, NaN of a NaN."""
    per_log2, rounding, log2, rest, c6, c5, c4, c3, c2, one = given
    y = float_of(i32(bits(x) | i32(_SIGN)))
    t = fma(y, per_log2, rounding)
    n = f32(t - rounding)
    r = fma(n, rest, fma(n, log2, y))
    p = fma(c6, r, c5)
    p = fma(p, r, c4)
    p = fma(p, r, c3)
    p = fma(p, r, c2)
    p = fma(p, r, one)
    p = fma(p, r, one)
    e = float_of(i32(bits(p) + i32(bits(t) << 23)))
    return _ZERO if y < _LEAST else e


@inline
def sigmoid(x: float, given: Constants) -> float:
    """``1 / (1 + exp(-x))``; 0 below -87.3."""
    e = decay(x, given)
    return f32((e if x < _ZERO else _ONE) / f32(_ONE + e))


@inline
def sigmoid_and_rest(x: float, given: Constants) -> tuple[float, float]:
    """sigmoid, and 1 less it, each with all its digits; their product is the derivative."""
    e = decay(x, given)
    large = f32(_ONE / f32(_ONE + e))
    small = f32(e * large)
    return (small, large) if x < _ZERO else (large, small)


@inline
def growth(x: float, given: Constants) -> float:
    """``exp(2|x|) - 1`` up to 60, NaN of a NaN."""
    per_log2, rounding, log2, rest, c6, c5, c4, c3, c2, one = given
    y = float_of(i32(bits(x) & i32(_MAGNITUDE)))
    y = f32(y + y)
    y = _MOST if y > _MOST else y
    t = fma(y, per_log2, rounding)
    n = f32(t - rounding)
    r = fma(n, rest, fma(n, log2, y))
    p = fma(c6, r, c5)
    p = fma(p, r, c4)
    p = fma(p, r, c3)
    p = fma(p, r, c2)
    p = fma(f32(r * r), p, r)
    power = float_of(i32(bits(one) + i32(bits(t) << 23)))
    return fma(power, p, f32(power - one))


@inline
def signed(magnitude: float, x: float) -> float:
    """A number that is not negative, with the sign of another."""
    return float_of(i32(bits(magnitude) | i32(bits(x) & i32(_SIGN))))


@inline
def tanh(x: float, given: Constants) -> float:
    """tanh."""
    m = growth(x, given)
    return signed(f32(m / f32(m + _TWO)), x)


@inline
def tanh_and_slope(x: float, given: Constants) -> tuple[float, float]:
    """tanh and its derivative, which is not 0 where tanh is rounded to 1."""
    m = growth(x, given)
    inverse = f32(_ONE / f32(m + _TWO))
    half_slope = f32(f32(m + _ONE) * f32(inverse + inverse))
    return signed(f32(m * inverse), x), f32(half_slope * f32(inverse + inverse))


@inline
def relu(x: float, given: Constants) -> float:
    """The larger of x and 0; a NaN is kept."""
    return _ZERO if x < _ZERO else x
