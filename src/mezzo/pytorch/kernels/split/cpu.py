"""Weights and masters, one element at a time: `split.reference` for every way of keeping a master.

Each is a pair: `load_X(weight, master, i)` gives the FP32 master, and `store_X(weight, master, i, value, noise)`
stores a new one and tells whether the 16-bit weight is now infinite.

Two conditions of the reference are one comparison here. Where a remainder belongs to another weight, (0, less
than 0) and (infinity, more than 0) alike sum to a NaN's pattern, and only a NaN weight does so otherwise: there
the weight alone counts. Adding half of what is cut rounds half away from zero and carries by itself. And noise
stays below the bits that are kept of an infinity or of the one NaN, whose other bits are 0.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.native import (
    Pointer,
    bits,
    f32,
    float_of,
    float_of_half,
    half_bits,
    i8,
    i16,
    i32,
    inline,
)

_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_NAN = 0x7FC00000


@inline
def load_split(weight: Pointer, master: Pointer, i: int) -> float:
    """A bf16 weight and an int16 remainder."""
    high = i32(i32(weight[i]) << 16)
    return _unless_nan(i32(high + i32(master[i])), high)


@inline
def store_split(weight: Pointer, master: Pointer, i: int, value: float, noise: int) -> bool:
    """A bf16 weight and an int16 remainder, exactly."""
    pattern = canonical(value)
    weight[i] = i16(i32(pattern + 0x8000) >> 16)
    master[i] = i16(pattern)
    return is_infinite(i32(pattern + 0x8000) & ~0xFFFF)


@inline
def load_split8(weight: Pointer, master: Pointer, i: int) -> float:
    """A bf16 weight and an int8 remainder."""
    high = i32(i32(weight[i]) << 16)
    return _unless_nan(i32(high + i32(i32(master[i]) << 8)), high)


@inline
def store_split8(weight: Pointer, master: Pointer, i: int, value: float, noise: int) -> bool:
    """A bf16 weight and an int8 remainder, rounded stochastically."""
    pattern = i32(canonical(value) + noise)
    weight[i] = i16(i32(pattern + 0x8000) >> 16)
    master[i] = i8(pattern >> 8)
    return is_infinite(i32(pattern + 0x8000) & ~0xFFFF)


@inline
def load_none(weight: Pointer, master: Pointer, i: int) -> float:
    """A bf16 weight alone."""
    return float_of(i32(i32(weight[i]) << 16))


@inline
def store_none(weight: Pointer, master: Pointer, i: int, value: float, noise: int) -> bool:
    """A bf16 weight alone, rounded stochastically."""
    pattern = i32(canonical(value) + noise)
    weight[i] = i16(pattern >> 16)
    return is_infinite(pattern & ~0xFFFF)


@inline
def load_own(weight: Pointer, master: Pointer, i: int) -> float:
    """An FP32 weight."""
    return f32(weight[i])


@inline
def store_own(weight: Pointer, master: Pointer, i: int, value: float, noise: int) -> bool:
    """An FP32 weight."""
    weight[i] = value
    return False


@inline
def load_bf16(weight: Pointer, master: Pointer, i: int) -> float:
    """A separate FP32 master; the bf16 weight, where it was edited."""
    value, stored = f32(master[i]), i32(weight[i])
    expected = i32(i16(i32(canonical(value) + 0x8000) >> 16))
    return value if stored == expected else float_of(i32(stored << 16))


@inline
def store_bf16(weight: Pointer, master: Pointer, i: int, value: float, noise: int) -> bool:
    """A separate FP32 master, and the bf16 weight half away from it."""
    pattern = canonical(value)
    weight[i] = i16(i32(pattern + 0x8000) >> 16)
    master[i] = value
    return is_infinite(i32(pattern + 0x8000) & ~0xFFFF)


@inline
def load_fp16(weight: Pointer, master: Pointer, i: int) -> float:
    """A separate FP32 master; the fp16 weight, where it was edited."""
    value, stored = f32(master[i]), i16(weight[i])
    return value if i32(stored) == i32(half_bits(value)) else float_of_half(stored)


@inline
def store_fp16(weight: Pointer, master: Pointer, i: int, value: float, noise: int) -> bool:
    """A separate FP32 master, and the fp16 weight nearest to it, ties to even."""
    half = half_bits(value)
    weight[i] = half
    master[i] = value
    return i32(i32(half) & 0x7FFF) == i32(0x7C00)


@inline
def bf16_at_infinity(weight: Pointer, i: int) -> bool:
    """Whether a bf16 weight in memory is an infinity."""
    return i16(weight[i] & i16(0x7FFF)) == i16(0x7F80)


@inline
def fp16_at_infinity(weight: Pointer, i: int) -> bool:
    """Whether an fp16 weight in memory is an infinity."""
    return i16(weight[i] & i16(0x7FFF)) == i16(0x7C00)


@inline
def fp32_at_infinity(weight: Pointer, i: int) -> bool:
    """Never: what an FP32 weight is told of is only what 16 bits can't hold."""
    return False


@inline
def canonical(value: float) -> int:
    """An FP32's pattern; the one pattern that NaN is stored as."""
    return i32(_NAN) if value != value else bits(value)


@inline
def is_infinite(pattern: int) -> bool:
    """Whether this is an infinity."""
    return i32(pattern & _MAGNITUDE) == i32(_INFINITY)


@inline
def _unless_nan(pattern: int, otherwise: int) -> float:
    value = float_of(pattern)
    return float_of(otherwise) if value != value else value
