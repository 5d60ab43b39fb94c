"""The storage of masters and moments, one element at a time: `storage`, without its blocks, and with its noise.

A weight and its master are a pair: `load_weight_X(weight, master, i)`, and `store_weight_X(weight, master, i,
value, noise)`, which tells whether the stored weight is infinite. FP32, bf16 and absent states are a pair too:
`load_state_X(state, i)`, and `store_state_X(state, i, value, noise)` with noise from 0 to 2**20 - 1. 8-bit states
need their group's largest value first; `group_scale` and `group_inverse` tell what it makes of the group, and
`needs_cut` whether its values must go through `cut` before they are stored. The noise is in 32 bits that wrap by
themselves.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.cpu import (
    Pointer,
    bits,
    f32,
    float_of,
    float_of_half,
    fma,
    half_bits,
    i8,
    i16,
    i32,
    inline,
    u8,
    u32,
)

_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_NAN = 0x7FC00000
_SIGNED_BIAS = 112 << 3
_UNSIGNED_BIAS = 96 << 3
_SMALLEST = 2.0**-14  # normal value of signed codes
_SIGN = -(1 << 31)
_LARGEST = (253 << 23) + 0x700000  # the pattern of the largest code's value beside the largest scale
_STRIDE = 0x9E3779B1


# Masters in parts.


@inline
def load_weight_split(weight: Pointer, master: Pointer, i: int) -> float:
    """A bf16 weight and an int16 remainder."""
    high = i32(i32(weight[i]) << 16)
    return _unless_nan(i32(high + i32(master[i])), high)


@inline
def store_weight_split(weight: Pointer, master: Pointer, i: int, value: float, noise: int) -> bool:
    """A bf16 weight and an int16 remainder, exactly."""
    pattern = canonical(value)
    weight[i] = i16(i32(pattern + 0x8000) >> 16)
    master[i] = i16(pattern)
    return is_infinite(i32(pattern + 0x8000) & ~0xFFFF)


@inline
def load_weight_split8(weight: Pointer, master: Pointer, i: int) -> float:
    """A bf16 weight and an int8 remainder."""
    high = i32(i32(weight[i]) << 16)
    return _unless_nan(i32(high + i32(i32(master[i]) << 8)), high)


@inline
def store_weight_split8(weight: Pointer, master: Pointer, i: int, value: float, noise: int) -> bool:
    """A bf16 weight and an int8 remainder, rounded stochastically."""
    pattern = i32(canonical(value) + noise)
    weight[i] = i16(i32(pattern + 0x8000) >> 16)
    master[i] = i8(pattern >> 8)
    return is_infinite(i32(pattern + 0x8000) & ~0xFFFF)


@inline
def load_weight_none(weight: Pointer, master: Pointer, i: int) -> float:
    """A bf16 weight alone."""
    return float_of(i32(i32(weight[i]) << 16))


@inline
def store_weight_none(weight: Pointer, master: Pointer, i: int, value: float, noise: int) -> bool:
    """A bf16 weight alone, rounded stochastically."""
    pattern = i32(canonical(value) + noise)
    weight[i] = i16(pattern >> 16)
    return is_infinite(pattern & ~0xFFFF)


@inline
def load_weight_own(weight: Pointer, master: Pointer, i: int) -> float:
    """An FP32 weight."""
    return f32(weight[i])


@inline
def store_weight_own(weight: Pointer, master: Pointer, i: int, value: float, noise: int) -> bool:
    """An FP32 weight."""
    weight[i] = value
    return False


@inline
def load_weight_bf16(weight: Pointer, master: Pointer, i: int) -> float:
    """A separate FP32 master; the bf16 weight, where it was edited."""
    value, stored = f32(master[i]), i32(weight[i])
    expected = i32(i16(i32(canonical(value) + 0x8000) >> 16))
    return value if stored == expected else float_of(i32(stored << 16))


@inline
def store_weight_bf16(weight: Pointer, master: Pointer, i: int, value: float, noise: int) -> bool:
    """A separate FP32 master, and the bf16 weight half away from it."""
    pattern = canonical(value)
    weight[i] = i16(i32(pattern + 0x8000) >> 16)
    master[i] = value
    return is_infinite(i32(pattern + 0x8000) & ~0xFFFF)


@inline
def load_weight_fp16(weight: Pointer, master: Pointer, i: int) -> float:
    """A separate FP32 master; the fp16 weight, where it was edited."""
    value, stored = f32(master[i]), i16(weight[i])
    return value if i32(stored) == i32(half_bits(value)) else float_of_half(stored)


@inline
def store_weight_fp16(weight: Pointer, master: Pointer, i: int, value: float, noise: int) -> bool:
    """A separate FP32 master, and the fp16 weight nearest to it, ties to even."""
    half = half_bits(value)
    weight[i] = half
    master[i] = value
    return i32(i32(half) & 0x7FFF) == i32(0x7C00)


@inline
def bf16_at_infinity(weight: Pointer, i: int) -> bool:
    """Whether a bf16 weight in memory is an infinity."""
    return i16(weight[i] & i16(0x7FFF)) == i16(0x7F80)


@inline
def fp16_at_infinity(weight: Pointer, i: int) -> bool:
    """Whether an fp16 weight in memory is an infinity."""
    return i16(weight[i] & i16(0x7FFF)) == i16(0x7C00)


@inline
def fp32_at_infinity(weight: Pointer, i: int) -> bool:
    """Never: what an FP32 weight is told of is only what 16 bits can't hold."""
    return False


@inline
def canonical(value: float) -> int:
    """An FP32's pattern; the one pattern that NaN is stored as."""
    return i32(_NAN) if value != value else bits(value)


@inline
def is_infinite(pattern: int) -> bool:
    """Whether this is an infinity."""
    return i32(pattern & _MAGNITUDE) == i32(_INFINITY)


@inline
def _unless_nan(pattern: int, otherwise: int) -> float:
    value = float_of(pattern)
    return float_of(otherwise) if value != value else value


# Moments.


@inline
def load_state_fp32(state: Pointer, i: int) -> float:
    """As it is."""
    return f32(state[i])


@inline
def store_state_fp32(state: Pointer, i: int, value: float, noise: int) -> None:
    """As it is."""
    state[i] = value


@inline
def load_state_bf16(state: Pointer, i: int) -> float:
    """A bf16."""
    return float_of(i32(i32(state[i]) << 16))


@inline
def store_state_bf16(state: Pointer, i: int, value: float, noise: int) -> None:
    """A bf16, rounded stochastically."""
    state[i] = i16(i32(canonical(value) + i32(noise >> 4)) >> 16)


@inline
def load_state_absent(state: Pointer, i: int) -> float:
    """No state."""
    return f32(0)


@inline
def store_state_absent(state: Pointer, i: int, value: float, noise: int) -> None:
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


# Noise.


@inline
def word(x: int) -> int:
    """Scramble 32 bits, all but the last line."""
    x = u32(x ^ (x >> 16))
    x = u32(x * u32(0x7FEB352D))
    x = u32(x ^ (x >> 15))
    return u32(x * u32(0x846CA68B))


@inline
def key(step: int, ordinal: int, stream: int) -> int:
    """The key of one stream of one parameter's bits in one step."""
    words = u32(step) * u32(0x9E3779B9) + u32(ordinal) * u32(0x85EBCA6B)
    x = word(u32(words + u32(stream) * u32(0xC2B2AE35) + u32(0x27D4EB2F)))
    return u32(x ^ (x >> 16))


@inline
def place(index: int) -> int:
    """Where the element at `index` in memory order stands among the inputs of `noise`."""
    return u32(u32(index) * u32(_STRIDE))


@inline
def following(place: int) -> int:
    """The next element's place: an addition, where `place` of a 64-bit index costs a vector two."""
    return u32(place + u32(_STRIDE))


@inline
def noise(key: int, place: int) -> int:
    """The 32 random bits of the element at a place."""
    return word(u32(place + key))


@inline
def first(noise: int) -> int:
    """What the first state is rounded with, from 0 to 2**20 - 1."""
    return i32(noise & u32(0xFFFFF))


@inline
def second(noise: int) -> int:
    """What the second state is rounded with, from 0 to 2**20 - 1."""
    return i32(noise >> 12)


@inline
def same(noise: int, key: int, place: int) -> int:
    """What a weight with an 8-bit remainder is rounded with, out of the states' word."""
    return i32(u32(noise ^ u32(noise >> 12)) & u32(0xFF))


@inline
def apart(bits: int, key: int, place: int) -> int:
    """What a weight without a remainder is rounded with, of a word of its own."""
    return i32(noise(key, place) >> 16)
