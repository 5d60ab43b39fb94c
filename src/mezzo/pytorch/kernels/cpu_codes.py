"""Codes of 8 bits and fewer, and scales of blocks, in Numba: the pieces of `cpu_quantized`'s loops.

Magnitudes are integers with FP32 patterns. `binade` is the power of two at or below one, and there a format has
``2**nmant`` gaps; below its smallest normal number, of biased exponent `least`, the gap stays the same.
"""

from __future__ import annotations

import torch

from mezzo.pytorch.kernels.cpu import bits, f32, float_of, float_of_half, i16, i32, inline, u32

INFINITY = 0x7F800000  # the pattern
_LARGEST = f32(torch.finfo(torch.float32).max)

Given = tuple[int, int, int]  # what the scales of a matrix have in common


@inline
def binade_of(magnitude: int, least: int) -> int:
    """The pattern of the largest power of two up to a magnitude, at least that of the biased exponent."""
    return max(i32(magnitude & i32(INFINITY)), i32(least << 23))


@inline
def nearest(magnitude: int, sign: int, binade: int, nmant: int, place: int) -> int:
    """A magnitude in the format's gaps, ties to even: the low bits of its sum with 1.5 * 2**23 gaps."""
    anchor = i32(binade + i32(((23 - nmant) << 23) + (1 << 22)))
    return i32(bits(f32(float_of(magnitude) + float_of(anchor))) - anchor)


@inline
def stochastic(magnitude: int, sign: int, binade: int, nmant: int, place: int) -> int:
    """The same, up or down at random: `RoundingPlan.round` with `random_integers` of seed 0."""
    h = u32(u32(u32(magnitude | sign) * u32(0x2C1B3C6D)) + u32(u32(place) * u32(0x297A2D39)))
    h = u32(u32(h ^ u32(h >> 16)) * u32(0x7FEB352D))
    h = u32(u32(h ^ u32(h >> 15)) * u32(0x846CA68B))
    h = u32(u32(h ^ u32(h >> 16)) & u32(0x3FFFFFFF))
    exponent = max(u32(u32(magnitude) >> 23), u32(1))
    significand = u32(u32(magnitude) - u32(u32(exponent - u32(1)) << 23))
    below = u32(u32(u32(23 - nmant) + u32(u32(binade) >> 23)) - exponent)
    kept = min(below, u32(30))
    cut = min(u32(below - kept), u32(30))
    return i32(u32(u32(significand >> cut) + u32(h >> u32(u32(30) - kept))) >> kept)


@inline
def value_of(gaps: int, binade: int, nmant: int) -> float:
    """A number of gaps as FP32."""
    return f32(f32(gaps) * float_of(i32(binade - i32(nmant << 23))))


@inline
def own_code(gaps: int, binade: int, rounded: float, least: int, nmant: int) -> int:
    """Without the sign: the gaps from 0, and the binades of as many codes below."""
    return i32(gaps + i32(i32(binade - i32(least << 23)) >> i32(23 - nmant)))


@inline
def wider_code(gaps: int, binade: int, rounded: float, least: int, nmant: int) -> int:
    """The code of e4m3fn with the value."""
    return max(i32(0), i32(i32(bits(rounded) >> 20) - i32(120 << 3)))


@inline
def power(biased: int) -> float:
    """``2 ** (biased - 127)``, for 0 as well."""
    return float_of(i32(biased << 23) if biased > 0 else i32(1 << 22))


@inline
def by_power(largest: int, divisor: float, given: Given) -> tuple[float, float]:
    """A block's scale and its inverse, powers of two: up from the quotient, or the floor if `given` has an exponent."""
    lowest, highest, floor = given
    quotient = bits(f32(float_of(largest) / divisor))
    up = i32(i32(quotient + i32(0x7FFFFF)) >> 23) if quotient > i32(1 << 22) else i32(0)
    biased = i32(i32(largest >> 23) - floor) if floor else up
    biased = min(max(biased, lowest), highest)
    return power(biased), power(i32(i32(254) - biased))


@inline
def by_e4m3fn(largest: int, divisor: float, given: Given) -> tuple[float, float]:
    """NVFP4's scale of a block, and what its elements are multiplied by; `given` are the tensor's factors."""
    of_tensor, decode_tensor = float_of(given[0]), float_of(given[1])
    wanted = min(bits(f32(float_of(largest) * of_tensor)), bits(f32(448.0)))
    binade = binade_of(wanted, 121)
    scale = value_of(nearest(wanted, i32(0), binade, 3, 0), binade, 3)
    inverse = f32(f32(1.0) / f32(scale * decode_tensor))
    return scale, _LARGEST if inverse > _LARGEST else inverse


@inline
def value_of_e4m3fn(code: int) -> float:
    """The fp16 with the same bits, which is 2**-8 of it; NaN is in the exponent of fp16's largest."""
    low = i32(code & i32(0x7F))
    pattern = i32(i32(i32(code & i32(0x80)) << 8) | i32(low << 7))
    return f32(float_of_half(i16(i32(0x7E00) if low == i32(0x7F) else pattern)) * f32(256.0))


@inline
def value_of_e5m2(code: int) -> float:
    """The upper half of an fp16."""
    return float_of_half(i16(i32(code << 8)))
