"""Masters in parts, as PyTorch operations on bit patterns. FP32 in and out, tensors of any shape, any device.

`bits` below is the int32 with a master's pattern; every shift copies the sign. A sum of a pattern and a small
number carries from the mantissa into the exponent, and so moves to the neighbouring value by itself, up to and
including infinity; NaN is always apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_NAN = 0x7FC0  # the one pattern that a NaN is stored as: bf16's, and FP32's upper half


def encode_split(master: Tensor) -> tuple[Tensor, Tensor]:
    """A master's bf16 weight and int16 remainder: what rounding half away gives, and the pattern's lower half.

    Masters from 0x7F7F8000 (3.39e38) up become an infinite weight, and are still decoded exactly. NaN becomes
    (0x7FC0, 0).
    """
    bits = master.view(torch.int32)
    low = (bits << 16) >> 16
    high = (bits >> 16) + (low < 0)
    return _stored(bits, high, low, torch.int16)


def decode_split(weight: Tensor, remainder: Tensor) -> Tensor:
    """The master of a bf16 weight and an int16 remainder, to the bit unless the weight was edited since.

    An edited weight gives a master within one bf16 ulp of it; infinity gives no NaN, and NaN gives NaN. Zero gives
    zero, or beside a positive remainder a subnormal below 2^-133, which is again encoded as a zero.
    """
    high, low = weight.view(torch.int16).to(torch.int32), remainder.to(torch.int32)
    return _decoded(high, low, (high << 16) + low)


def encode_split8(master: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """A master's bf16 weight and int8 remainder, together its upper 24 bits, rounded stochastically.

    Args:
        master: FP32.
        noise: int32 of its shape, of which the low 8 bits are used. Infinity stays, NaN becomes (0x7FC0, 0).
    """
    top = _rounded(master.view(torch.int32), noise, 8)
    low = (top << 24) >> 24
    high = (top >> 8) + (low < 0)
    return _stored(master.view(torch.int32), high, low, torch.int8)


def decode_split8(weight: Tensor, remainder: Tensor) -> Tensor:
    """The master of a bf16 weight and an int8 remainder. An edited weight does what it does in `decode_split`."""
    high, low = weight.view(torch.int16).to(torch.int32), remainder.to(torch.int32)
    return _decoded(high, low, ((high << 8) + low) << 8)


def encode_stochastic(master: Tensor, noise: Tensor) -> Tensor:
    """An FP32 tensor in bf16, each value one of its two neighbours, and its own on average.

    Args:
        master: FP32.
        noise: int32 of its shape, of which the low 16 bits are used. Infinity stays, NaN becomes 0x7FC0.
    """
    bits = master.view(torch.int32)
    top = torch.where(_is_nan(bits), _NAN, _rounded(bits, noise, 16))
    return top.to(torch.int16).view(torch.bfloat16)


def encode_nearest(master: Tensor, dtype: torch.dtype) -> Tensor:
    """The 16-bit weight beside a separate FP32 master: bf16 as `encode_split` gives it, fp16 with ties to even."""
    return encode_split(master)[0] if dtype is torch.bfloat16 else master.to(dtype)


def refreshed(master: Tensor, weight: Tensor) -> Tensor:
    """The separate FP32 master, but the weight's value where somebody edited the weight since.

    Edited is what has another pattern than the one that its master is encoded to; two NaNs count as equal.
    """
    expected = encode_nearest(master, weight.dtype)
    edited = weight.view(torch.int16) != expected.view(torch.int16)
    return torch.where(edited & ~(weight.isnan() & master.isnan()), weight.to(torch.float32), master)


def _is_nan(bits: Tensor) -> Tensor:
    return (bits & _MAGNITUDE) > _INFINITY


def _rounded(bits: Tensor, noise: Tensor, dropped: int) -> Tensor:
    """The upper bits of patterns, rounded with noise; an infinity's low bits are 0, and so it stays."""
    return (bits + (noise & ((1 << dropped) - 1))) >> dropped


def _stored(bits: Tensor, high: Tensor, low: Tensor, remainder: torch.dtype) -> tuple[Tensor, Tensor]:
    is_nan = _is_nan(bits)
    weight = torch.where(is_nan, _NAN, high).to(torch.int16).view(torch.bfloat16)
    return weight, torch.where(is_nan, 0, low).to(remainder)


def _decoded(high: Tensor, low: Tensor, bits: Tensor) -> Tensor:
    magnitude = high & 0x7FFF
    # Below zero and beyond infinity the sum would leave the format: then the weight alone counts.
    alone = ((magnitude == 0) & (low < 0)) | ((magnitude == 0x7F80) & (low > 0))
    bits = torch.where(alone, high << 16, bits)
    return torch.where(magnitude > 0x7F80, _NAN << 16, bits).view(torch.float32)
