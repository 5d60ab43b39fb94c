"""The storage of optimizer states in Triton: the functions of `reference.py` on a block, in the same order.

A block is ``(rows, 64)``: a row is a group with one scale. Codes are uint8 in memory and int32 here, scales are
bf16 patterns, int16 in memory and int32 here.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from mezzo.pytorch.kernels import block
from mezzo.pytorch.kernels.split import triton as split

_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_NAN = tl.constexpr(0x7FC0)
_SIGNED_BIAS = tl.constexpr(112 << 3)
_UNSIGNED_BIAS = tl.constexpr(96 << 3)

_CODE_ULP = tl.constexpr(2.0**-17)  # of the subnormal codes
_HALF_SMALLEST = tl.constexpr(2.0**-15)  # of the normal codes
_BF16, _INT8 = tl.constexpr(1), tl.constexpr(2)  # 0: FP32; the index in `states.FORMATS`


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
def load(
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
def decode(stored: tl.tuple, signed: tl.constexpr, STATE: tl.constexpr) -> tl.tensor:
    """The FP32 values of what `load` gave."""
    value, scale = stored
    if STATE == _INT8:
        return decode_int8(value.to(tl.int32), scale.to(tl.int32), signed)
    elif STATE == _BF16:
        return split.decode_bf16(value.to(tl.int32))
    else:
        return value


@triton.jit
def store(
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
        block.store(address, split.encode_stochastic(value, noise_bits >> 4), here, tl.int16, PLAIN)
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
