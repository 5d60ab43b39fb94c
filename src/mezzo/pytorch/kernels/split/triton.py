"""Masters in parts, in Triton: the functions of `reference.py` on a block's bit patterns, in the same order.

A 16-bit weight is int16 in memory and int32 here, its pattern; a master is FP32; noise is int32.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_NAN = tl.constexpr(0x7FC0)


@triton.jit
def encode_split(master: tl.tensor) -> tl.tuple:
    """A master's bf16 pattern, rounded half away from zero, and its 16-bit remainder."""
    bits = master.to(tl.int32, bitcast=True)
    low = (bits << 16) >> 16
    high = (bits >> 16) + (low < 0).to(tl.int32)
    return _stored(bits, high, low)


@triton.jit
def decode_split(high: tl.tensor, low: tl.tensor) -> tl.tensor:
    """The master of a bf16 pattern and a 16-bit remainder."""
    return _decoded(high, low, (high << 16) + low)


@triton.jit
def encode_split8(master: tl.tensor, noise: tl.tensor) -> tl.tuple:
    """A master's bf16 pattern and its 8-bit remainder, rounded with noise from 0 to 255."""
    bits = master.to(tl.int32, bitcast=True)
    top = _rounded(bits, noise, 8)
    low = (top << 24) >> 24
    high = (top >> 8) + (low < 0).to(tl.int32)
    return _stored(bits, high, low)


@triton.jit
def decode_split8(high: tl.tensor, low: tl.tensor) -> tl.tensor:
    """The master of a bf16 pattern and an 8-bit remainder."""
    return _decoded(high, low, ((high << 8) + low) << 8)


@triton.jit
def encode_stochastic(master: tl.tensor, noise: tl.tensor) -> tl.tensor:
    """The bf16 pattern of FP32 values, rounded with noise from 0 to 65,535."""
    bits = master.to(tl.int32, bitcast=True)
    return tl.where(_is_nan(bits), _NAN, _rounded(bits, noise, 16))


@triton.jit
def decode_bf16(high: tl.tensor) -> tl.tensor:
    """The FP32 values of bf16 patterns."""
    return (high << 16).to(tl.float32, bitcast=True)


@triton.jit
def encode_nearest(master: tl.tensor, is_bf16: tl.constexpr) -> tl.tensor:
    """The pattern of the 16-bit weight beside a separate FP32 master: bf16, or fp16 with ties to even."""
    if is_bf16:
        high, _ = encode_split(master)
        return high
    else:
        return master.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def refreshed(master: tl.tensor, weight: tl.tensor, is_bf16: tl.constexpr) -> tl.tensor:
    """The separate FP32 master, but the weight's value where somebody edited the weight since."""
    if is_bf16:
        value = decode_bf16(weight)
    else:
        value = weight.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    edited = ((weight ^ encode_nearest(master, is_bf16)) & 0xFFFF) != 0
    return tl.where(edited & ~((value != value) & (master != master)), value, master)


@triton.jit
def is_infinite(weight: tl.tensor, is_bf16: tl.constexpr) -> tl.tensor:
    """Whether 16-bit patterns are infinities."""
    return (weight & 0x7FFF) == (0x7F80 if is_bf16 else 0x7C00)


@triton.jit
def _is_nan(bits: tl.tensor) -> tl.tensor:
    return (bits & _MAGNITUDE) > _INFINITY


@triton.jit
def _rounded(bits: tl.tensor, noise: tl.tensor, dropped: tl.constexpr) -> tl.tensor:
    return (bits + (noise & ((1 << dropped) - 1))) >> dropped


@triton.jit
def _stored(bits: tl.tensor, high: tl.tensor, low: tl.tensor) -> tl.tuple:
    is_nan = _is_nan(bits)
    return tl.where(is_nan, _NAN, high), tl.where(is_nan, 0, low)


@triton.jit
def _decoded(high: tl.tensor, low: tl.tensor, bits: tl.tensor) -> tl.tensor:
    magnitude = high & 0x7FFF
    alone = ((magnitude == 0) & (low < 0)) | ((magnitude == 0x7F80) & (low > 0))
    bits = tl.where(alone, high << 16, bits)
    return tl.where(magnitude > 0x7F80, _NAN << 16, bits).to(tl.float32, bitcast=True)
