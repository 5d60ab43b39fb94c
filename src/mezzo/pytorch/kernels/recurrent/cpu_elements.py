"""How a recurrent step's kernel reads and writes one element: what its loops are bound to."""

from __future__ import annotations

from mezzo.pytorch.kernels.native import Pointer, bits, f32, float_of, float_of_half, half_bits, i32, inline


@inline
def keep(x: float) -> float:
    """A state that is carried in FP32."""
    return x


@inline
def round_fp16(x: float) -> float:
    """The nearest fp16, ties to even, from 65520 an infinity."""
    return float_of_half(half_bits(x))


@inline
def round_bf16(x: float) -> float:
    """The nearest bf16, ties to even; every NaN as one pattern."""
    pattern = bits(x)
    rounded = i32(i32(pattern + i32(0x7FFF) + (i32(pattern >> 16) & i32(1))) & i32(-0x10000))
    return float_of(i32(i32(0x7FC00000) if x != x else rounded))


@inline
def store_round_fp16(out: Pointer, i: int, x: float) -> None:
    """A factor of an FP32 product that stands for one of fp16s."""
    out[i] = round_fp16(x)


@inline
def store_round_bf16(out: Pointer, i: int, x: float) -> None:
    """A factor of an FP32 product that stands for one of bf16s."""
    out[i] = round_bf16(x)


@inline
def tanh_slope(h: float) -> float:
    """The derivative of tanh by its value."""
    return f32(f32(1.0) - f32(h * h))


@inline
def relu_slope(h: float) -> float:
    """The derivative of relu by its value; a NaN is not cut off."""
    return f32(0.0) if h <= f32(0.0) else f32(1.0)


@inline
def two() -> int:
    """Bytes of a 16-bit element."""
    return 2


@inline
def four() -> int:
    """Bytes of an FP32."""
    return 4
