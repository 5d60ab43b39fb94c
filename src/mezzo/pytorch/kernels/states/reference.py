"""The storage of optimizer states as PyTorch operations, on flat tensors in memory order, on any device.

An 8-bit state is a small float times its group's scale. Signed: 4 bits of exponent, 3 of mantissa, with
subnormals, so that a moving average crosses zero evenly. Unsigned: 5 and 3 without subnormals, because what is
divided by its root must never become zero. A code's value is found by shifting its bits to where FP32 has
them, the other way round by adding noise below the last kept bit and cutting.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.pytorch.kernels.noise import reference as noise_bits
from mezzo.pytorch.kernels.split.reference import encode_stochastic
from mezzo.pytorch.kernels.states import GROUP

_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_SIGNED_BIAS = 112 << 3  # code 8, the first normal one, is 2**-14
_UNSIGNED_BIAS = 96 << 3  # code 0 is zero, code 8 is 2**-30


def encode_bf16(value: Tensor, noise: Tensor) -> Tensor:
    """FP32 in bf16, rounded stochastically with noise from 0 to ``2**20 - 1`` (int32), of which 16 bits count."""
    return encode_stochastic(value, noise >> 4)


def encode_int8(value: Tensor, noise: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of an FP32 tensor, rounded stochastically.

    Args:
        value: ``(n,)`` FP32; the last group of 64 may be short. Not negative where `signed` is False.
        noise: ``(n,)`` int32, from 0 to ``2**20 - 1``.
        signed: which of the two code tables.

    Returns:
        ``(n,)`` uint8 codes, and ``(groups(n),)`` bf16 scales: powers of two, of which the group's largest value
        is 0.9375 to 1.875; 0 for a group of zeros, NaN for one with a NaN or an infinity in it. Beyond 1.6e38
        values saturate.
    """
    bits = value.view(torch.int32) & _MAGNITUDE
    largest = _by_group(bits).amax(1)
    field = ((largest + 0x100000) >> 23).clamp(1, 253)
    is_finite = largest < _INFINITY
    scale = torch.where(largest == 0, 0, torch.where(is_finite, field << 7, 0x7FC0))
    inverse = torch.where(is_finite, (254 - field) << 23, 0).view(torch.float32)
    magnitude = bits.view(torch.float32) * _per_element(inverse, value.numel())
    if signed:
        codes = _encode_signed(magnitude, noise)
        codes = torch.where(value.view(torch.int32) < 0, codes | 0x80, codes)
    else:
        codes = torch.where(bits == 0, 0, _encode_unsigned(magnitude, noise))
    codes = torch.where(_per_element(is_finite, value.numel()), codes, 0)
    return codes.to(torch.uint8), scale.to(torch.int16).view(torch.bfloat16)


def decode_int8(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The FP32 values of ``(n,)`` codes with their scales; NaN in the whole group of a NaN scale."""
    codes = codes.to(torch.int32)
    scale = _per_element(scales.to(torch.float32), codes.numel())
    if not signed:
        value = ((codes + _UNSIGNED_BIAS) << 20).view(torch.float32) * scale
        return torch.where(codes == 0, 0.0 * scale, value)
    code = codes & 0x7F
    normal = ((code + _SIGNED_BIAS) << 20).view(torch.float32)
    value = torch.where(code >= 8, normal, code.to(torch.float32) * 2.0**-17) * scale
    return torch.where(codes >= 0x80, -value, value)


def load(storage: Tensor, scales: Tensor | None, *, signed: bool) -> Tensor:
    """A block of a state as FP32, from whichever form it is stored in."""
    if scales is not None:
        return decode_int8(storage, scales, signed=signed)
    return storage.to(torch.float32)


def store(
    value: Tensor, storage: Tensor, scales: Tensor | None, noise: Tensor | None, *, signed: bool
) -> None:
    """Write a block of FP32 values into a state, in whichever form it is stored; FP32 needs no noise."""
    if noise is None:
        storage.copy_(value)
    elif scales is None:
        storage.copy_(encode_bf16(value, noise))
    else:
        codes, scale = encode_int8(value, noise, signed=signed)
        storage.copy_(codes)
        scales.copy_(scale)


def noise_of(state: int, noise: Tensor | None) -> Tensor | None:
    """What a word of noise gives to an element's first (0) or second (1) state."""
    if noise is None:
        return None
    return noise_bits.second(noise) if state else noise_bits.first(noise)


def _encode_signed(magnitude: Tensor, noise: Tensor) -> Tensor:
    # From 2**-14 up the number itself is the larger. Below, the sum's mantissa counts in the subnormals' steps, rounded
    # to a unit of the noise.
    even = torch.maximum(magnitude, magnitude * 0.5 + 2.0**-15).view(torch.int32)
    return (((even + noise) >> 20) - _SIGNED_BIAS).clamp(max=127)


def _encode_unsigned(magnitude: Tensor, noise: Tensor) -> Tensor:
    code = ((magnitude.view(torch.int32) + noise) >> 20) - _UNSIGNED_BIAS
    return code.clamp(1, 255)  # 1 for what underflowed: it isn't zero


def _by_group(flat: Tensor) -> Tensor:
    short = -flat.numel() % GROUP
    return torch.nn.functional.pad(flat, (0, short)).view(-1, GROUP)


def _per_element(by_group: Tensor, numel: int) -> Tensor:
    return by_group.repeat_interleave(GROUP)[:numel]
