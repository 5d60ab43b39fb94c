"""The storage of masters and moments in Triton: the functions of `storage.py` on a block, in the same order.

A 16-bit weight is int16 in memory and int32 here, its pattern; a master is FP32; noise is uint32 and what is drawn
from it int32. A block of 8-bit states is ``(rows, 64)``: a row is a group with one scale. Codes are uint8 in
memory and int32 here, scales are bf16 patterns, int16 in memory and int32 here.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from mezzo.pytorch.kernels import block

_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_NAN = tl.constexpr(0x7FC0)
_SIGNED_BIAS = tl.constexpr(112 << 3)
_UNSIGNED_BIAS = tl.constexpr(96 << 3)
_CODE_ULP = tl.constexpr(2.0**-17)  # of the subnormal codes
_HALF_SMALLEST = tl.constexpr(2.0**-15)  # of the normal codes
_BF16, _INT8 = tl.constexpr(1), tl.constexpr(2)  # 0: FP32; the index in `storage.FORMATS`


# Masters in parts.


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


# Moments.


@triton.jit
def encode_int8(value: tl.tensor, noise: tl.tensor, signed: tl.constexpr) -> tl.tuple:
    """Codes, ``(rows, 64)``, and scale patterns, ``(rows,)``, of FP32 values; noise from 0 to 2**20 - 1."""
    bits = value.to(tl.int32, bitcast=True) & _MAGNITUDE
    largest = tl.max(bits, axis=1)
    field = tl.minimum(tl.maximum((largest + 0x100000) >> 23, 1), 253)
    is_finite = largest < _INFINITY
    scale = tl.where(largest == 0, 0, tl.where(is_finite, field << 7, _NAN))
    inverse = tl.where(is_finite, (254 - field) << 23, 0).to(tl.float32, bitcast=True)
    magnitude = bits.to(tl.float32, bitcast=True) * inverse[:, None]
    if signed:
        codes = _encode_signed(magnitude, noise)
        codes = tl.where(value.to(tl.int32, bitcast=True) < 0, codes | 0x80, codes)
    else:
        codes = tl.where(bits == 0, 0, _encode_unsigned(magnitude, noise))
    return tl.where(is_finite[:, None], codes, 0), scale


@triton.jit
def decode_int8(codes: tl.tensor, scales: tl.tensor, signed: tl.constexpr) -> tl.tensor:
    """The FP32 values of ``(rows, 64)`` codes with their ``(rows,)`` scale patterns."""
    scale = (scales << 16).to(tl.float32, bitcast=True)[:, None]
    if signed:
        code = codes & 0x7F
        normal = ((code + _SIGNED_BIAS) << 20).to(tl.float32, bitcast=True)
        value = tl.where(code >= 8, normal, code.to(tl.float32) * _CODE_ULP) * scale
        return tl.where(codes >= 0x80, value * -1.0, value)  # Triton's own minus turns 0 into +0
    else:
        value = ((codes + _UNSIGNED_BIAS) << 20).to(tl.float32, bitcast=True)
        return tl.where(codes == 0, 0.0, value) * scale


@triton.jit
def load_state(
    address: tl.tensor,
    scale: tl.tensor,
    here: tl.tuple,
    scales_here: tl.tuple,
    EXISTS: tl.constexpr,
    STATE: tl.constexpr,
    PLAIN: tl.constexpr,
) -> tl.tuple:
    """What is in memory, if anything: values, bf16 patterns, or codes with their scales' patterns."""
    if not EXISTS:
        return 0.0, 0
    elif STATE == _INT8:
        return block.load(address, here, tl.uint8, PLAIN), block.load(scale, scales_here, tl.int16, False)
    elif STATE == _BF16:
        return block.load(address, here, tl.int16, PLAIN), 0
    else:
        return block.load(address, here, tl.float32, PLAIN), 0


@triton.jit
def decode_state(stored: tl.tuple, signed: tl.constexpr, STATE: tl.constexpr) -> tl.tensor:
    """The FP32 values of what `load` gave."""
    value, scale = stored
    if STATE == _INT8:
        return decode_int8(value.to(tl.int32), scale.to(tl.int32), signed)
    elif STATE == _BF16:
        return decode_bf16(value.to(tl.int32))
    else:
        return value


@triton.jit
def store_state(
    value: tl.tensor,
    noise_bits: tl.tensor,
    address: tl.tensor,
    scale: tl.tensor,
    here: tl.tuple,
    scales_here: tl.tuple,
    signed: tl.constexpr,
    STATE: tl.constexpr,
    PLAIN: tl.constexpr,
) -> None:
    """Write FP32 values in the state's format; noise from 0 to 2**20 - 1, which FP32 does not use."""
    if STATE == _INT8:
        if not PLAIN:
            _, _, mask = here
            value = tl.where(mask, value, 0.0)  # elements beyond the end have no say in their group's scale
        codes, patterns = encode_int8(value, noise_bits, signed)
        block.store(address, codes, here, tl.uint8, PLAIN)
        block.store(scale, patterns, scales_here, tl.int16, False)
    elif STATE == _BF16:
        block.store(address, encode_stochastic(value, noise_bits >> 4), here, tl.int16, PLAIN)
    else:
        block.store(address, value, here, tl.float32, PLAIN)


@triton.jit
def _encode_signed(magnitude: tl.tensor, noise: tl.tensor) -> tl.tensor:
    even = tl.maximum(magnitude, magnitude * 0.5 + _HALF_SMALLEST).to(tl.int32, bitcast=True)
    return tl.minimum(((even + noise) >> 20) - _SIGNED_BIAS, 127)


@triton.jit
def _encode_unsigned(magnitude: tl.tensor, noise: tl.tensor) -> tl.tensor:
    code = ((magnitude.to(tl.int32, bitcast=True) + noise) >> 20) - _UNSIGNED_BIAS
    return tl.minimum(tl.maximum(code, 1), 255)


# Noise.


@triton.jit
def noise_key(step: tl.tensor, ordinal: tl.tensor, stream: tl.constexpr) -> tl.tensor:
    """The uint32 key of one stream; `step` and `ordinal` are integer scalars, see `storage.noise_key`."""
    words = step.to(tl.uint32) * 0x9E3779B9 + ordinal.to(tl.uint32) * 0x85EBCA6B
    x = _word(words + ((stream * 0xC2B2AE35 + 0x27D4EB2F) & 0xFFFFFFFF))
    return x ^ (x >> 16)


@triton.jit
def noise_bits(key: tl.tensor, index: tl.tensor) -> tl.tensor:
    """The random bits, uint32, of elements at these positions in memory order; see `storage.noise_bits`."""
    return _word(index.to(tl.uint32) * 0x9E3779B1 + key)


@triton.jit
def first_noise(noise: tl.tensor) -> tl.tensor:
    """What the first state is rounded with, int32; see `storage.first_noise`."""
    return (noise & 0xFFFFF).to(tl.int32)


@triton.jit
def second_noise(noise: tl.tensor) -> tl.tensor:
    """What the second state is rounded with, int32."""
    return (noise >> 12).to(tl.int32)


@triton.jit
def remainder_noise(noise: tl.tensor) -> tl.tensor:
    """What a weight with an 8-bit remainder is rounded with, int32; see `noise.reference.remainder`."""
    return ((noise ^ (noise >> 12)) & 0xFF).to(tl.int32)


@triton.jit
def weight_noise(noise: tl.tensor) -> tl.tensor:
    """What a weight without a remainder is rounded with, int32."""
    return (noise >> 16).to(tl.int32)


@triton.jit
def _word(x: tl.tensor) -> tl.tensor:
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    return x * 0x846CA68B
