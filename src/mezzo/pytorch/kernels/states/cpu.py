"""The storage of optimizer states, one element at a time: `states.reference`, without its blocks.

FP32, bf16 and absent states are a pair: `load_X(state, i)`, and `store_X(state, i, value, noise)` with noise from
0 to 2**20 - 1. 8-bit states need their group's largest value first; `group_scale` and `group_inverse` tell what it
makes of the group, and `needs_cut` whether its values must go through `cut` before they are stored.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.native import Pointer, bits, f32, float_of, fma, i8, i16, i32, inline, u8
from mezzo.pytorch.kernels.split.cpu import canonical

_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_SIGNED_BIAS = 112 << 3
_UNSIGNED_BIAS = 96 << 3
_SMALLEST = 2.0**-14  # normal value of signed codes
_SIGN = -(1 << 31)
_LARGEST = (253 << 23) + 0x700000  # the pattern of the largest code's value beside the largest scale


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
    state[i] = i16(i32(canonical(value) + i32(noise >> 4)) >> 16)


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
def needs_cut(largest: int) -> bool:
    """Whether values of the group may be beyond the largest code, or have none: beside the largest of scales alone."""
    return largest > _LARGEST


@inline
def cut(value: float, largest: int) -> float:
    """The value, or the largest code's, which noise never lifts; 0 where the group has no finite scale."""
    pattern = i32(min(magnitude(value), i32(_LARGEST)))
    return float_of(i32(pattern | i32(bits(value) & _SIGN))) if largest < _INFINITY else f32(0)


@inline
def load_signed(state: Pointer, i: int, scale: float) -> float:
    """A code of 1 sign, 4 exponent and 3 mantissa bits with subnormals, times its group's scale.

    A subnormal is what twice its pattern as a normal has above 2**-14, and of that and the pattern itself the smaller.
    """
    shifted = i32(i32(i8(state[i])) << 20)
    normal = i32(i32(shifted & 0x07F00000) | _SIGNED_BIAS << 20)
    subnormal = bits(fma(float_of(normal), f32(2), f32(-_SMALLEST)))
    value = i32(min(normal, subnormal))
    return float_of(i32(value | i32(shifted & _SIGN))) * scale


@inline
def store_signed(state: Pointer, i: int, value: float, inverse: float, noise: int) -> None:
    """The code of a value, rounded stochastically."""
    y = float_of(magnitude(value)) * inverse
    even = i32(max(bits(y), bits(fma(y, f32(0.5), f32(0.5 * _SMALLEST)))))
    state[i] = u8(i32(i32(i32(even + noise) >> 20) & 0x7F) | i32(i32(bits(value) >> 24) & 0x80))


@inline
def load_unsigned(state: Pointer, i: int, scale: float) -> float:
    """A code of 5 exponent and 3 mantissa bits without subnormals, times its group's scale."""
    code = i32(state[i])
    value = float_of(i32(i32(code + _UNSIGNED_BIAS) << 20)) if code > 0 else f32(0)
    return value * scale


@inline
def store_unsigned(state: Pointer, i: int, value: float, inverse: float, noise: int) -> None:
    """The code of a value, rounded stochastically; 1 where that underflows, 0 for 0 alone."""
    biased = i32(i32(bits(value * inverse) + noise) >> 20)
    state[i] = u8(i32(max(biased, i32(_UNSIGNED_BIAS + 1)))) if bits(value) != 0 else u8(0)


@inline
def load_nothing(state: Pointer, i: int, scale: float) -> float:
    """No state, where the others are in groups."""
    return f32(0)


@inline
def store_nothing(state: Pointer, i: int, value: float, inverse: float, noise: int) -> None:
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
