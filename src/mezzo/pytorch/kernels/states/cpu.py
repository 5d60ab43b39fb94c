"""The storage of optimizer states, one element at a time: `states.reference`, without its blocks.

FP32, bf16 and absent states are a pair: `load_X(state, i)`, and `store_X(state, i, value, noise)` with noise from
0 to 65,535. 8-bit states need their group's largest value first; `group_scale`, `group_inverse` and
`group_cap` tell what it makes of the group.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.native import Pointer, bits, f32, float_of, i16, i32, inline, u8
from mezzo.pytorch.kernels.split.cpu import canonical

_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_SIGNED_BIAS = 112 << 3
_UNSIGNED_BIAS = 96 << 3
_SMALLEST = 2.0**-14  # normal value of signed codes
_SMALLEST_NORMAL = 113 << 23  # its pattern
_SIGN = -(1 << 31)
_TO_CODE = 2.0**17
_FROM_CODE = 2.0**-17
_FROM_NOISE = 2.0**-16


@inline
def load_fp32(state: Pointer, i: int) -> float:
    """As it is."""
    return f32(state[i])


@inline
def store_fp32(state: Pointer, i: int, value: float, noise: int) -> None:
    """As it is."""
    state[i] = value


@inline
def load_bf16(state: Pointer, i: int) -> float:
    """A bf16."""
    return float_of(i32(i32(state[i]) << 16))


@inline
def store_bf16(state: Pointer, i: int, value: float, noise: int) -> None:
    """A bf16, rounded stochastically."""
    state[i] = i16(i32(canonical(value) + noise) >> 16)


@inline
def load_absent(state: Pointer, i: int) -> float:
    """No state."""
    return f32(0)


@inline
def store_absent(state: Pointer, i: int, value: float, noise: int) -> None:
    """No state."""


@inline
def magnitude(value: float) -> int:
    """The pattern of ``|value|``: in the order of the values, infinity and then NaN above all."""
    return i32(bits(value) & _MAGNITUDE)


@inline
def group_scale(largest: int) -> int:
    """The bf16 pattern of the scale of a group whose largest `magnitude` is given."""
    if largest >= _INFINITY:
        return i32(0x7FC0)
    return i32(0) if largest == 0 else i32(_field(largest) << 7)


@inline
def group_inverse(largest: int) -> float:
    """What brings the group's values to its codes' range."""
    return float_of(i32(i32(254 - _field(largest)) << 23))


@inline
def group_cap(largest: int) -> int:
    """What a magnitude in the group is cut to: the largest code's value, which noise never lifts.

    Larger values exist beside the largest of scales alone. Without a finite scale, it is the smallest of subnormals,
    which that scale's inverse makes 0 (a 0 here would become a branch for every vector).
    """
    return i32(i32(_field(largest) << 23) + 0x700000) if largest < _INFINITY else i32(1)


@inline
def load_signed(state: Pointer, i: int, scale: float) -> float:
    """A code of 1 sign, 4 exponent and 3 mantissa bits with subnormals, times its group's scale.

    A subnormal is what 2**-14 with its mantissa has above 2**-14.
    """
    byte = i32(state[i])
    shifted = i32(i32(byte << 20) & 0x07F00000)
    normal = float_of(i32(shifted | _SIGNED_BIAS << 20))
    subnormal = float_of(i32(shifted | _SMALLEST_NORMAL)) - f32(_SMALLEST)
    value = subnormal if i32(byte & 0x78) == 0 else normal
    return float_of(i32(bits(value) | i32(i32(byte << 24) & _SIGN))) * scale


@inline
def store_signed(state: Pointer, i: int, value: float, inverse: float, cap: int, noise: int) -> None:
    """The code of a value, rounded stochastically."""
    y = float_of(i32(min(magnitude(value), cap))) * inverse
    normal = i32(i32(i32(bits(y) + i32(noise << 4)) >> 20) - _SIGNED_BIAS)
    subnormal = i32(y * f32(_TO_CODE) + f32(noise) * f32(_FROM_NOISE))
    code = normal if y >= f32(_SMALLEST) else subnormal
    state[i] = u8(code | 0x80) if bits(value) < 0 and code > 0 else u8(code)


@inline
def load_unsigned(state: Pointer, i: int, scale: float) -> float:
    """A code of 5 exponent and 3 mantissa bits without subnormals, times its group's scale."""
    code = i32(state[i])
    value = float_of(i32(i32(code + _UNSIGNED_BIAS) << 20)) if code > 0 else f32(0)
    return value * scale


@inline
def store_unsigned(state: Pointer, i: int, value: float, inverse: float, cap: int, noise: int) -> None:
    """The code of a value, rounded stochastically; 1 where that underflows, 0 for 0 alone."""
    pattern = i32(min(bits(value), cap))  # a NaN with a sign stays below the cap, and is stored as 0
    y = float_of(pattern) * inverse
    code = i32(i32(i32(bits(y) + i32(noise << 4)) >> 20) - _UNSIGNED_BIAS)
    nothing = i32(1) if cap == 1 else i32(0)  # the largest pattern that is stored as 0
    state[i] = u8(i32(max(code, i32(1))) if pattern > nothing else i32(0))


@inline
def load_nothing(state: Pointer, i: int, scale: float) -> float:
    """No state, where the others are in groups."""
    return f32(0)


@inline
def store_nothing(state: Pointer, i: int, value: float, inverse: float, cap: int, noise: int) -> None:
    """No state, where the others are in groups."""


@inline
def load_scale(scales: Pointer, group: int) -> float:
    """A group's scale."""
    return float_of(i32(i32(scales[group]) << 16))


@inline
def store_scale(scales: Pointer, group: int, pattern: int) -> None:
    """A group's scale."""
    scales[group] = i16(pattern)


@inline
def load_no_scale(scales: Pointer, group: int) -> float:
    """The scale of no state."""
    return f32(0)


@inline
def store_no_scale(scales: Pointer, group: int, pattern: int) -> None:
    """The scale of no state."""


@inline
def _field(largest: int) -> int:
    finite = i32(min(largest, i32(_INFINITY)))  # some NaN's pattern would leave 32 bits
    return i32(max(min(i32(i32(finite + 0x100000) >> 23), i32(253)), i32(1)))
