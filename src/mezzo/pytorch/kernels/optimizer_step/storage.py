"""How an optimizer stores masters and moments, as PyTorch operations on any device: the specification of its kernels.

**Masters in parts** (split): a bf16 weight and the bits that it lacks. `bits` is the int32 with a master's
pattern; every shift copies the sign. A sum of a pattern and a small number carries from the mantissa into the
exponent, and so moves to the neighbouring value by itself, up to and including infinity; NaN is always apart.

**Moments** (states) are FP32, bf16, or 8-bit floats with one scale for 64 elements. Both small forms are rounded
stochastically: a moving average adds to itself a part far smaller than its own ulp, which rounding to nearest
would drop for ever. The 8-bit codes are floats and not integers, so a small element beside a large one keeps its
relative precision. Signed: 4 bits of exponent, 3 of mantissa, with subnormals, so that a moving average crosses
zero evenly. Unsigned: 5 and 3 without subnormals, because what is divided by its root must never become zero. A
code's value is found by shifting its bits to where FP32 has them, the other way round by adding noise below the
last kept bit and cutting. A scale is a power of two and a bf16: it costs 2 bytes for 64 elements, and dividing by
it is exact.

**Noise**, the random bits for stochastic rounding, is a hash of step, parameter, purpose and element. There is no
generator and no state: the same step draws the same bits on every device, for any number of threads and in any
order. PyTorch's own generators are never touched. One word of 32 bits serves both states and an 8-bit remainder.
The states need 20 bits each, and share 8: the second's last ones, which decide in one of 4096 cases, are the
first's upper ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_NAN = 0x7FC0  # the one pattern that a NaN is stored as: bf16's, and FP32's upper half
_SIGNED_BIAS = 112 << 3  # code 8, the first normal one, is 2**-14
_UNSIGNED_BIAS = 96 << 3  # code 0 is zero, code 8 is 2**-30

GROUP = 64
"""Consecutive elements, in memory order, that share one scale."""

FORMATS = ("fp32", "bf16", "int8")
"""The ways of storing a state."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor of an optimizer's state.

    Args:
        name: its key in the optimizer's state, as PyTorch's own optimizers call it.
        signed: False for a second moment, which is never negative and needs the range instead of the sign.
    """

    name: str
    signed: bool


def groups(numel: int) -> int:
    """How many scales a state of that many elements has; the last group may be short.

    >>> groups(0), groups(64), groups(65)
    (0, 1, 2)
    """
    return -(-numel // GROUP)


# Noise.

STEP = 0
"""Stream of an optimizer's states and of a weight with an 8-bit remainder: one word for all three."""

WEIGHT = 1
"""Stream of a weight without a remainder."""

NEAREST = 1 << 19
"""In place of a state's 20 random bits: half of them, which rounds to nearest."""

_MASK = 0xFFFFFFFF


def mix(x: int) -> int:
    """Scramble 32 bits so that every bit of the input moves every bit of the result; a bijection.

    The constants are those of C. Wellons, "hash-prospector", lowbias32.
    """
    x = noise_word(x)
    return x ^ x >> 16


def noise_word(x: int) -> int:
    """`mix` without its last line, for the inputs of neighbours: even but for its lowest bits.

    Those repeat a little over some distances, so they decide nothing by themselves.
    """
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    return x * 0x846CA68B & _MASK


def noise_key(step: int, ordinal: int, stream: int) -> int:
    """The key of one stream of one parameter's bits in one step.

    Args:
        step: the number of this move of the parameter: 1, 2, ...
        ordinal: the parameter's index in the optimizer.
        stream: `STEP` or `WEIGHT`.

    Returns:
        32 bits, to be combined with an element's position in memory: `noise_word(index * 0x9E3779B1 + key)`.
    """
    words = step * 0x9E3779B9 + ordinal * 0x85EBCA6B + stream * 0xC2B2AE35 + 0x27D4EB2F
    return mix(words & _MASK)


def noise_bits(key: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Random bits of the elements at `start`, ..., `start + count - 1` in memory order.

    Equals ``[noise_word(index * 0x9E3779B1 + key) for index in range(start, start + count)]``, in 32 bits.

    Returns:
        ``(count,)`` int32, whose patterns they are.
    """
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    return _word((index * 0x9E3779B1 + key).to(torch.int32))


def first_noise(noise: Tensor) -> Tensor:
    """What the first state is rounded with: the low 20 bits."""
    return noise & 0xFFFFF


def second_noise(noise: Tensor) -> Tensor:
    """What the second state is rounded with: the high 20 bits, whose own low 8 are the first's high ones."""
    return (noise >> 12) & 0xFFFFF


def remainder_noise(noise: Tensor) -> Tensor:
    """What a weight with an 8-bit remainder is rounded with: the low 8 bits, and others to scramble them."""
    return (noise ^ (noise >> 12)) & 0xFF


def weight_noise(noise: Tensor) -> Tensor:
    """What a weight without a remainder is rounded with: the high 16 bits of a word of its own stream."""
    return (noise >> 16) & 0xFFFF


def _word(x: Tensor) -> Tensor:
    # int32 products wrap, as unsigned ones do; >> copies the sign, which the masks take away again.
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _signed(0x7FEB352D)
    x = x ^ ((x >> 15) & 0x1FFFF)
    return x * _signed(0x846CA68B)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


# Masters in parts.


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


# Moments.


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


def load_state(storage: Tensor, scales: Tensor | None, *, signed: bool) -> Tensor:
    """A block of a state as FP32, from whichever form it is stored in."""
    if scales is not None:
        return decode_int8(storage, scales, signed=signed)
    return storage.to(torch.float32)


def store_state(
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
    return second_noise(noise) if state else first_noise(noise)


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
