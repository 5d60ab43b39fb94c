"""Gradients, one element at a time, in FP32."""

from __future__ import annotations

from mezzo.pytorch.kernels.native import Pointer, f32, float_of, float_of_half, i32, inline


@inline
def load_fp32(grad: Pointer, i: int) -> float:
    """As it is."""
    return f32(grad[i])


@inline
def load_bf16(grad: Pointer, i: int) -> float:
    """The upper half of an FP32's pattern."""
    return float_of(i32(i32(grad[i]) << 16))


@inline
def load_fp16(grad: Pointer, i: int) -> float:
    """Exactly, subnormals too."""
    return float_of_half(grad[i])
