"""Quantization to the two 8-bit formats: the first half of quantize -> GEMM -> rescale.

A tensor is multiplied by a scale, a power of two taken from its largest finite magnitude, and rounded once to codes of
`torch.float8_e4m3fn` or `torch.float8_e5m2`. This file is the only place that knows how scales are found: another block
format is another granularity in `amax`, and `mezzo.pytorch.kernels.fp8.gemm` takes whatever scales broadcast.

PyTorch's own casts treat special values differently in the two formats: e4m3fn turns infinity into 448 and hides it,
e5m2 turns large finite values into infinity. `encode` treats both alike:

    finite values     the nearest of the format, ties to even; beyond the largest value: the largest (*saturate*)
    infinities        infinity in e5m2; NaN in e4m3fn, which has no infinity
    NaN               NaN
    zeros             keep their sign

Everything is PyTorch operations: it runs on any device, in a compiler and under `torch.func`. Nothing has a gradient.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from mezzo.pytorch.kernels.plain import is_plain

__all__ = ["Quantized", "amax", "decode", "encode", "inv_scale_of", "quantize"]

E4M3FN: Final = torch.float8_e4m3fn
_MANTISSA = (1 << 23) - 1  # of an FP32 pattern


class Quantized:
    """One factor of a product: 8-bit codes, and the scale that they were multiplied by.

    Args:
        codes: [R, C] `torch.float8_e4m3fn` or `torch.float8_e5m2`, contiguous.
        inv_scale: FP32 powers of two that broadcast to [R, C]: [], [R, 1] or [1, C].
    """

    __slots__ = ("_values", "codes", "inv_scale")

    def __init__(self, codes: Tensor, inv_scale: Tensor) -> None:
        self.codes, self.inv_scale = codes, inv_scale
        self._values: Tensor | None = None

    def values(self, dtype: torch.dtype) -> Tensor:
        """The numbers that the codes stand for, made once and kept for a second product of the same factor."""
        if self._values is None or self._values.dtype is not dtype:
            self._values = decode(self.codes).mul_(self.inv_scale).to(dtype)
        return self._values


def quantize(x: Tensor, dtype: torch.dtype, granularity: str = "tensorwise", dim: int = 1) -> Quantized:
    """Codes, and the inverse of the scale that the tensor's own magnitudes ask for.

    Naive code::

        inv_scale = 2.0 ** ceil(log2(amax(x, granularity, dim) / finfo(dtype).max))
        return (x.float() / inv_scale).to(dtype), inv_scale

    Args:
        x: [R, C], FP32, bf16 or fp16, not empty.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        granularity: ``tensorwise``, one scale; ``rowwise``, one for each line along `dim`.
        dim: the dimension that the product sums over: 1 gives [R, 1] scales, 0 gives [1, C]. Tensorwise ignores it.
    """
    wide = x.detach().to(torch.float32)
    if x.device.type == "cpu" and is_plain(x):
        # One look without a wait for a device: if all is finite, no special value needs care, in half the time.
        largest = _magnitude(wide, granularity, dim)
        if largest.isfinite().all():
            inv_scale = inv_scale_of(largest, dtype)
            return Quantized((wide / inv_scale).contiguous().to(dtype), inv_scale)
    inv_scale = inv_scale_of(amax(wide, granularity, dim), dtype)
    return Quantized(encode((wide / inv_scale).contiguous(), dtype), inv_scale)


def amax(x: Tensor, granularity: str, dim: int = 1) -> Tensor:
    """The largest finite magnitude of the elements that share a scale; 0 if there is none. No host sync.

    NaN and infinities are left out, since a scale that they decided would zero every other element.
    """
    return _magnitude(x.nan_to_num(0.0, 0.0, 0.0), granularity, dim)


def _magnitude(x: Tensor, granularity: str, dim: int) -> Tensor:
    """The largest magnitude of the elements that share a scale; NaN if one is NaN."""
    if granularity == "rowwise":
        return x.abs().amax(dim, keepdim=True)  # `aminmax` along a dimension takes ten times as long
    low, high = x.aminmax()
    return torch.maximum(-low, high)


def inv_scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest powers of two with ``amax / inv_scale <= finfo(dtype).max``.

    ``2 ** ceil(log2(amax / max))``, with the exponent taken from the bits of the quotient: the biased exponent, plus 1
    if the mantissa is not 0. It is kept within -126 to 126, so that a scale and its inverse are both normal numbers.

    Args:
        amax: FP32, finite, not negative, any shape.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
    """
    quotient = (amax / torch.finfo(dtype).max).view(torch.int32)
    return (((quotient + _MANTISSA) >> 23).clamp(1, 253) << 23).view(torch.float32)


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of FP32 values, rounded once; special values as in the table above."""
    largest = torch.finfo(dtype).max
    if dtype is E4M3FN:
        return x.nan_to_num(math.nan, math.nan, math.nan).clamp(-largest, largest).to(dtype)
    # Zero for what is finite, and minus infinity for infinity. Ten times as fast as `torch.where` of `isinf`.
    cut = x.nan_to_num(0.0).sub_(x)
    return x.clamp(-largest, largest).sub_(cut).to(dtype)


def decode(codes: Tensor) -> Tensor:
    """The FP32 values of codes: ``codes.float()``, exactly.

    PyTorch's conversion from e4m3fn takes 3 ms for a million elements on a CPU. fp16 has the same layout with one more
    exponent bit, and its conversion takes 0.1 ms, so the codes are moved to fp16's bits first. (Not while compiling:
    Inductor cannot have bf16 and fp16 in one kernel.)
    """
    if codes.device.type != "cpu" or torch.compiler.is_compiling():
        return codes.to(torch.float32)
    if codes.dtype is not E4M3FN:
        return (codes.view(torch.int8).to(torch.int16) << 8).view(torch.float16).to(torch.float32)
    bits = codes.view(torch.int8).to(torch.int16).mul_(1 << 7).bitwise_and_(~0x4000)  # drop the sign's copy
    bits.bitwise_or_((bits + 0x80).bitwise_and_(0x4000))  # only NaN, 0x7F, carries into this bit
    return (
        bits.view(torch.float16).to(torch.float32).mul_(256.0)
    )  # 2 ** (15 - 7), the difference of the biases
