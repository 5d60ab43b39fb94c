"""Single elements of the fp8 casts on a CPU: `reference` on one FP32 pattern, and on one code.

Each format is a pair: `narrow_X(value, scale)` gives the code of a product, and `load_X(codes, i)` the value of a code.
The constants are those of `reference.PLANS`, which the tests compare.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.native import Pointer, bits, f32, float_of, float_of_half, i16, i32, inline

MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
LARGEST = INFINITY - 1
_MANTISSA = 0x7FFFFF
_SMALLEST_NORMAL = 1 << 23

_E4M3FN_LARGEST = 135 << 23 | 0x600000  # 448
_E4M3FN_NORMAL = 121 << 23  # 2**-6
_E4M3FN_ANCHOR = 141 << 23  # 2**14, whose last place is 2**-9
_E5M2_LARGEST = 142 << 23 | 0x600000  # 57344
_E5M2_NORMAL = 113 << 23  # 2**-14
_E5M2_ANCHOR = 134 << 23  # 2**7, whose last place is 2**-16
_CARRY = 0x1FFFFF  # carries out of a mantissa above that of 1.75, which both largest numbers have


@inline
def finite_magnitude(value: float) -> int:
    """The pattern of ``|value|``, which is in the order of the values; 0 for infinities and NaN."""
    magnitude = i32(bits(value) & MAGNITUDE)
    return magnitude if magnitude < i32(INFINITY) else i32(0)


@inline
def narrow_e4m3fn(value: float, scale: float) -> int:
    """The e4m3fn code of ``value * scale``."""
    pattern = bits(value)
    magnitude = i32(min(i32(bits(value * scale) & MAGNITUDE), i32(_E4M3FN_LARGEST)))
    is_odd = i32(i32(magnitude >> 20) & 1)
    normal = i32(i32(i32(i32(magnitude + 0x7FFFF) + is_odd) >> 20) - (120 << 3))
    subnormal = i32(bits(float_of(magnitude) + float_of(i32(_E4M3FN_ANCHOR))) - _E4M3FN_ANCHOR)
    code = subnormal if magnitude < i32(_E4M3FN_NORMAL) else normal
    code = i32(0x7F) if i32(pattern & MAGNITUDE) >= i32(INFINITY) else code
    return i32(code | i32(i32(pattern >> 24) & 0x80))


@inline
def narrow_e5m2(value: float, scale: float) -> int:
    """The e5m2 code of ``value * scale``."""
    pattern = bits(value)
    original = i32(pattern & MAGNITUDE)
    magnitude = i32(min(i32(bits(value * scale) & MAGNITUDE), i32(_E5M2_LARGEST)))
    is_odd = i32(i32(magnitude >> 21) & 1)
    normal = i32(i32(i32(i32(magnitude + 0xFFFFF) + is_odd) >> 21) - (112 << 2))
    subnormal = i32(bits(float_of(magnitude) + float_of(i32(_E5M2_ANCHOR))) - _E5M2_ANCHOR)
    code = subnormal if magnitude < i32(_E5M2_NORMAL) else normal
    special = i32(0x7E) if original > i32(INFINITY) else i32(0x7C)
    code = special if original >= i32(INFINITY) else code
    return i32(code | i32(i32(pattern >> 24) & 0x80))


@inline
def load_e4m3fn(codes: Pointer, i: int) -> float:
    """The value of a code: one of fp16 with another bias, whose conversion no mode that flushes subnormals reaches."""
    code = i32(codes[i])
    magnitude = i32(code & 0x7F)
    half = i32(i32(magnitude << 7) | i32(i32(code & 0x80) << 8))
    value = float_of_half(i16(half)) * f32(256)
    return float_of(i32(0x7FC00000)) if magnitude == i32(0x7F) else value


@inline
def load_e5m2(codes: Pointer, i: int) -> float:
    """The value of a code: the upper half of an fp16."""
    return float_of_half(i16(i32(codes[i]) << 8))


@inline
def scale_of(largest: int, top: int, margin: int) -> int:
    """The pattern of the scale for a largest magnitude's pattern.

    Args:
        largest: not above FP32's largest number.
        top: the exponent field of the format's largest number.
        margin: binades that are left free.
    """
    counted = i32(bits(f32(largest)) + _CARRY)
    field = (
        i32(i32(counted >> 23) - 149) if largest < i32(_SMALLEST_NORMAL) else i32(i32(largest + _CARRY) >> 23)
    )
    exponent = i32(max(min(i32(i32(top - field) - margin), i32(126)), i32(-126)))
    return i32(127 << 23) if largest == i32(0) else i32(i32(exponent + 127) << 23)
