"""Logits and gradients in memory, one element at a time: bf16, fp16 and FP32.

The largest of 16-bit logits is found among their patterns: seen as integers, with the magnitude's bits flipped where
the sign is set, they are in the numbers' own order, and 32 of them are compared at once. NaNs are beyond
the infinities on either side.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.native import (
    Pointer,
    bits,
    expand,
    f32,
    float_of,
    float_of_half,
    half_bits,
    i16,
    i32,
    inline,
)

_NAN = 0x7FC00000


@inline
def load_bf16(logits: Pointer, i: int) -> float:
    """The upper half of an FP32's pattern."""
    return float_of(i32(i32(logits[i]) << 16))


@inline
def load_fp16(logits: Pointer, i: int) -> float:
    """Exactly, subnormals too."""
    return float_of_half(logits[i])


@inline
def load_fp32(logits: Pointer, i: int) -> float:
    """As it is, but for NaN: the lowest bits of 16-bit ones are 0, which `cpu_exp` relies on."""
    x = f32(logits[i])
    return float_of(i32(_NAN)) if x != x else x


@expand
def largest_bf16(logits: Pointer, start: int, stop: int) -> float:
    """The largest of the elements from `start` to `stop`, or a NaN among them, or -inf although there is a NaN."""
    return float_of(i32(i32(_largest16(logits, start, stop)) << 16))


@expand
def largest_fp16(logits: Pointer, start: int, stop: int) -> float:
    """The like of `largest_bf16`."""
    return float_of_half(_largest16(logits, start, stop))


@expand
def largest_fp32(logits: Pointer, start: int, stop: int) -> float:
    """The like of `largest_bf16`."""
    top = i32(-0x80000000)
    for i in range(start, stop):
        pattern = bits(load_fp32(logits, i))
        top = max(top, i32(pattern ^ i32(i32(pattern >> 31) & i32(0x7FFFFFFF))))
    return float_of(i32(top ^ i32(i32(top >> 31) & i32(0x7FFFFFFF))))


@inline
def store_bf16(gradient: Pointer, i: int, value: float) -> None:
    """The nearest, ties to even, of a number that is not a NaN."""
    pattern = bits(value)
    even = i32(i32(pattern >> 16) & i32(1))
    gradient[i] = i16(i32(i32(pattern + i32(0x7FFF)) + even) >> 16)


@inline
def store_fp16(gradient: Pointer, i: int, value: float) -> None:
    """The nearest, ties to even."""
    gradient[i] = half_bits(value)


@inline
def store_fp32(gradient: Pointer, i: int, value: float) -> None:
    """As it is."""
    gradient[i] = value


@expand
def _largest16(logits: Pointer, start: int, stop: int) -> int:
    top = i16(-0x8000)
    for i in range(start, stop):
        pattern = i16(logits[i])
        top = max(top, i16(pattern ^ i16(i16(pattern >> 15) & i16(0x7FFF))))
    return i16(top ^ i16(i16(top >> 15) & i16(0x7FFF)))
