"""The arithmetic of a step, stated once: update rules, the storage of masters and moments, and noise.

The primitives here take PyTorch tensors: the specification. `over` compiles the same functions for Numba and Triton to
the same bits: each operation rounds once, in the order written; `fma` is where torch's own optimizers have one.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

Value = Any  # FP32: a tensor, an element, a block
Pattern = Any  # int32 likewise; a 16- or 8-bit pattern is sign-extended
Bits = Any  # 32 random bits: uint32, in tensors int32
Numbers = Any  # seven numbers, which a rule is given

GROUP = 64  # consecutive elements, in memory order, that share one scale
STEP, WEIGHT = 0, 1  # streams of noise: for states and an 8-bit remainder; for a weight without a remainder
NEAREST = 1 << 19  # instead of a state's 20 random bits: rounds to nearest
INFINITY = 0x7F800000
NAN = 0x7FC00000  # the one pattern that a NaN is stored as
MAGNITUDE = 0x7FFFFFFF
SIGN = -(1 << 31)
SIGNED_BIAS = 112 << 3  # code 8, the first normal one, is 2**-14
UNSIGNED_BIAS = 96 << 3  # code 0 is zero, code 8 is 2**-30
LARGEST = (253 << 23) + 0x700000  # pattern of the largest code with the largest scale
SMALLEST = 2.0**-14  # normal value of signed codes
HALF_SMALLEST = 2.0**-15
HALF, ZERO, ONE, TWO = 0.5, 0.0, 1.0, 2.0


# Primitives for PyTorch tensors.


def bits(x: Tensor) -> Tensor:
    """The int32 pattern of FP32."""
    return x.view(torch.int32)


def float_of(pattern: Tensor) -> Tensor:
    """The FP32 of an int32 pattern."""
    return pattern.view(torch.float32)


def half_bits(x: Tensor) -> Tensor:
    """The pattern of FP32 in fp16, ties to even."""
    return x.to(torch.float16).view(torch.int16).to(torch.int32)


def float_of_half(pattern: Tensor) -> Tensor:
    """The FP32 of an fp16 pattern."""
    return pattern.to(torch.int16).view(torch.float16).to(torch.float32)


def i32(x: Any) -> Any:
    """Cut to 32 bits, signed."""
    return x.to(torch.int32) if isinstance(x, Tensor) else x


def u32(x: Any) -> Any:
    """Cut to 32 bits, unsigned; PyTorch's int32 wraps likewise."""
    return x.to(torch.int32) if isinstance(x, Tensor) else (x + (1 << 31)) % (1 << 32) - (1 << 31)


def shifted(x: Any, count: int) -> Any:
    """An unsigned word's upper bits, zeros before them."""
    return (x >> count) & (0xFFFFFFFF >> count)


def where(condition: Any, a: Any, b: Any) -> Any:
    """`a` where the condition holds, else `b`."""
    return (a if condition else b) if isinstance(condition, bool) else torch.where(condition, a, b)


def least(a: Tensor, b: Any) -> Tensor:
    """The smaller one."""
    return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)


def most(a: Tensor, b: Any) -> Tensor:
    """The larger one."""
    return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)


def sqrt(x: Tensor) -> Tensor:
    """IEEE's root: through FP64, because PyTorch's FP32 root on a CPU is off by an ulp in one element of six."""
    return x.double().sqrt().float()


def multiply_add(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` where one rounding and two give the same."""
    return a * b + c


def fma(a: float | Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` in exact arithmetic, rounded once, ties to even; NaN, infinities and signs of zero as in IEEE 754.

    The exact FP64 product plus a third number is rounded *to odd*: an inexact sum becomes the FP64 neighbor whose last
    bit is 1, never a tie of FP32 (Boldo and Melquiond 2008, IEEE Trans. Computers 57(4); error of a sum: Knuth 4.2.2).
    """
    if not isinstance(a, Tensor):
        a = torch.tensor(a, dtype=torch.float32, device=b.device)
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)  # exact, or NaN where the total isn't finite
    pattern = total.view(torch.int64)
    away = (error > 0) == (total > 0)  # from zero: a larger pattern for either sign
    is_even = ((pattern & 1) == 0) & (error.abs() > 0)
    odd = pattern + torch.where(is_even, torch.where(away, 1, -1), 0)
    return odd.view(torch.float64).float()


divide = operator.truediv
power = operator.pow  # of a number in FP64
root = math.sqrt  # likewise


def over(
    words: Mapping[str, Any], inline: Callable[[Any], Any], name: str, number: Callable[[Any], Any]
) -> Any:
    """Make module `name`, which Numba looks for, of these formulas: other `words`, `inline` functions, `number`s."""
    if name in sys.modules:
        return sys.modules[name]
    made = sys.modules[name] = ModuleType(name)
    space = vars(made)
    for key, value in globals().items():
        if key in words:
            continue
        if isinstance(value, FunctionType) and value.__module__ == __name__ and key != "over":
            space[key] = inline(FunctionType(value.__code__, space, key))
        elif key.isupper():
            space[key] = number(value)
    space.update(words)
    return made


# Update rules: a master, its gradient, two states and seven numbers in FP32 -> the new master and states. States that
# a rule does not have are passed through.


def coupled(w: Value, g: Value, l2: Value) -> Value:
    """The gradient with an L2 term."""
    return fma(l2, w, g)


def uncoupled(w: Value, g: Value, l2: Value) -> Value:
    """The gradient alone."""
    return g


def adam_constants(numbers: Numbers, step: Any) -> Numbers:
    """The constants of step number `step` (1, 2, ...) in FP64, to be rounded to FP32 once."""
    decay, one_minus_beta1, beta2, one_minus_beta2, lr, beta1, eps = numbers
    step_size = lr / (1.0 - power(beta1, step))
    inv_bc2 = 1.0 / root(1.0 - power(beta2, step))
    return decay, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_bc2, eps


def adamw(w: Value, g: Value, m: Value, v: Value, c: Numbers) -> tuple[Value, Value, Value]:
    """Adam (Kingma and Ba, 2015; `decay` is 1) and AdamW (Loshchilov and Hutter, "Decoupled Weight Decay", 2019)."""
    decay, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_bc2, eps = c
    w = w * decay
    m = m + one_minus_beta1 * (g - m)
    v = beta2 * v + (one_minus_beta2 * g) * g
    return w - divide(step_size * m, sqrt(v) * inv_bc2 + eps), m, v


def sgd_constants(numbers: Numbers, step: Any) -> Numbers:
    """As `adam_constants`, for all other rules. The buffer starts as the first gradient, undampened."""
    minus_lr, momentum, one_minus_dampening, is_first, decay, b, c = numbers
    is_first = step == 1
    return minus_lr, momentum, one_minus_dampening, is_first, decay, b, c


def plain(w: Value, g: Value, a: Value, b: Value, c: Numbers) -> tuple[Value, Value, Value]:
    """SGD without momentum, as `torch.optim.SGD` has it (`decay` is 1), and the last part of Muon's step."""
    minus_lr, _, _, _, decay, _, _ = c
    return fma(minus_lr, g, w * decay), a, b


def momentum(w: Value, g: Value, buffer: Value, b: Value, c: Numbers) -> tuple[Value, Value, Value]:
    """SGD with momentum."""
    minus_lr, decay, one_minus_dampening, is_first, _, _, _ = c
    buffer = where(is_first != 0, g, fma(one_minus_dampening, g, decay * buffer))
    return fma(minus_lr, buffer, w), buffer, b


def nesterov(w: Value, g: Value, buffer: Value, b: Value, c: Numbers) -> tuple[Value, Value, Value]:
    """SGD with Nesterov's momentum."""
    minus_lr, decay, one_minus_dampening, is_first, _, _, _ = c
    buffer = where(is_first != 0, g, fma(one_minus_dampening, g, decay * buffer))
    return fma(minus_lr, fma(decay, buffer, g), w), buffer, b


def average(w: Value, g: Value, m: Value, b: Value, c: Numbers) -> tuple[Value, Value, Value]:
    """The first part of Muon's step: the average `m` of the gradients; in place of a weight, what is orthogonalized.

    ``lerp(start, end, t)`` is ``start + t * (end - start)``, and for t from 0.5 up ``end + (t - 1) * (end - start)``.
    """
    t, from_m, ahead, _, from_g, is_nesterov, _ = c
    m = fma(t, g - m, where(from_m != 0, m, g))
    nesterov = fma(ahead, m - g, where(from_g != 0, g, m))
    return where(is_nesterov != 0, nesterov, m), m, b


constants_of = {
    "adamw": adam_constants,
    **dict.fromkeys(("plain", "momentum", "nesterov", "average"), sgd_constants),
}
RULES = tuple(constants_of)


# Masters: a weight's pattern and what is kept with it, decoded to FP32, and encoded with noise below the last bit.
# The sum of a bit pattern and a small remainder carries from the mantissa into the exponent, and so moves to the
# neighboring value, up to infinity. Masters from 0x7F7F8000 (3.39e38) up are infinite weights, still decoded exactly.


def canonical(x: Value) -> Pattern:
    """An FP32's pattern; the same for every NaN."""
    return where(x != x, i32(NAN), bits(x))


def nearest_bf16(x: Value) -> Pattern:
    """The bf16 pattern, rounded half away from zero."""
    return i32(i32(canonical(x) + 0x8000) >> 16)


def joined(high: Pattern, low: Pattern) -> Value:
    """The sum of two parts; the upper one alone if an edited weight and an older remainder make a NaN."""
    value = float_of(i32(high + low))
    return where(value != value, float_of(high), value)


def decode_own(weight: Value, kept: Any) -> Value:
    """An FP32 weight."""
    return weight


def encode_own(value: Value, noise: Pattern) -> tuple[Value, Any]:
    """An FP32 weight."""
    return value, value


def decode_bf16(weight: Pattern, kept: Value) -> Value:
    """A separate FP32 master; the bf16 weight if it was edited."""
    weight = i32(weight)
    return where(weight == nearest_bf16(kept), kept, float_of(i32(weight << 16)))


def encode_bf16(value: Value, noise: Pattern) -> tuple[Pattern, Value]:
    """A separate FP32 master, and the bf16 weight, rounded half away from zero."""
    return nearest_bf16(value), value


def decode_fp16(weight: Pattern, kept: Value) -> Value:
    """A separate FP32 master; the fp16 weight if it was edited."""
    weight = i32(weight)
    return where(weight == i32(half_bits(kept)), kept, float_of_half(weight))


def encode_fp16(value: Value, noise: Pattern) -> tuple[Pattern, Value]:
    """A separate FP32 master, and the fp16 weight nearest to it, ties to even."""
    return i32(half_bits(value)), value


def decode_split(weight: Pattern, kept: Pattern) -> Value:
    """A bf16 weight and an int16 remainder."""
    high, low = i32(weight), i32(kept)
    return joined(i32(high << 16), low)


def encode_split(value: Value, noise: Pattern) -> tuple[Pattern, Pattern]:
    """A bf16 weight half away, and the pattern's lower 16 bits: together exact."""
    pattern = canonical(value)
    return i32(i32(pattern + 0x8000) >> 16), pattern


def decode_split8(weight: Pattern, kept: Pattern) -> Value:
    """A bf16 weight and an int8 remainder."""
    high, low = i32(weight), i32(kept)
    return joined(i32(high << 16), i32(low << 8))


def encode_split8(value: Value, noise: Pattern) -> tuple[Pattern, Pattern]:
    """The upper 24 bits, rounded with noise from 0 to 255."""
    pattern = i32(canonical(value) + noise)
    return i32(i32(pattern + 0x8000) >> 16), i32(pattern >> 8)


def decode_none(weight: Pattern, kept: Any) -> Value:
    """A bf16 weight alone."""
    return float_of(i32(i32(weight) << 16))


def encode_none(value: Value, noise: Pattern) -> tuple[Pattern, Pattern]:
    """A bf16 weight alone, rounded with noise from 0 to 65,535."""
    pattern = i32(i32(canonical(value) + noise) >> 16)
    return pattern, pattern


# Form of storage -> the type in memory of what is kept with the weight (FP32 or a 16-bit pattern), "" for nothing.
kept_types = {"own": "", "bf16": "float32", "fp16": "float32", "split": "int16", "split8": "int8", "none": ""}
FORMS = tuple(kept_types)


# States: one code per element, by itself or with one scale (a power of two) per `GROUP`. A codec is
# `value_CODEC(code, scale)` and `code_CODEC(value, inverse of the scale, noise from 0 to 2**20 - 1)`; rounding is
# stochastic, because a moving average adds less than its own ulp. A new format needs them, and rows in the tables below
# and in `core.masters`.


class StateFormat(NamedTuple):
    """How a state is stored: codes with a scale per group or without, in a dtype that no other format has."""

    dtype: torch.dtype
    is_scaled: bool
    signed: str  # the codec, one of `codecs`
    unsigned: str  # the codec of a second moment, which is never negative


state_formats = {
    "fp32": StateFormat(torch.float32, False, "fp32", "fp32"),
    "bf16": StateFormat(torch.bfloat16, False, "bf16", "bf16"),
    "int8": StateFormat(torch.uint8, True, "e4m3", "e5m3"),
}
codecs = {"fp32": "float32", "bf16": "int16", "e4m3": "int8", "e5m3": "uint8"}  # -> a code's type in memory


value_fp32, value_bf16 = decode_own, decode_none


def code_fp32(value: Value, inverse: Value, noise: Pattern) -> Value:
    """FP32 as it is."""
    return value


def code_bf16(value: Value, inverse: Value, noise: Pattern) -> Pattern:
    """A bf16 pattern, rounded stochastically."""
    pattern, _ = encode_none(value, i32(noise >> 4))
    return pattern


def magnitude(value: Value) -> Pattern:
    """The pattern of ``|value|``: in the order of the values, infinity and then NaN above all."""
    return i32(bits(value) & MAGNITUDE)


def scale_field(largest: Pattern) -> Pattern:
    """The exponent field of the scale of a group, by its largest `magnitude`."""
    finite = i32(least(largest, i32(INFINITY)))  # some NaN's pattern would leave 32 bits
    return i32(most(i32(least(i32(i32(finite + 0x100000) >> 23), i32(253))), i32(1)))


def group_scale(largest: Pattern) -> Pattern:
    """The bf16 pattern of a group's scale: 0 for zeros alone, NaN for a NaN or an infinity in it."""
    finite = where(largest == 0, i32(0), i32(scale_field(largest) << 7))
    return i32(where(largest >= INFINITY, i32(0x7FC0), finite))


def group_inverse(largest: Pattern) -> Value:
    """The inverse of a group's scale."""
    return float_of(i32(i32(254 - scale_field(largest)) << 23))


def needs_cut(largest: Pattern) -> Any:
    """Whether a group may have values beyond the largest code, or without a code."""
    return largest > LARGEST


def cut(value: Value, largest: Pattern) -> Value:
    """The value, at most the largest code's, which noise never raises; 0 if the group has no finite scale."""
    pattern = i32(least(magnitude(value), i32(LARGEST)))
    return where(largest < INFINITY, float_of(i32(pattern | i32(bits(value) & SIGN))), ZERO)


def value_e4m3(code: Pattern, scale: Value) -> Value:
    """1 sign, 4 exponent and 3 mantissa bits with subnormals, because an average crosses zero. Of a pattern read as a
    normal number and as a subnormal, the smaller one is right.
    """
    shifted_code = i32(i32(code) << 20)
    normal = i32(i32(shifted_code & 0x07F00000) | i32(SIGNED_BIAS << 20))
    subnormal = bits(multiply_add(float_of(normal), TWO, -SMALLEST))
    value = i32(least(normal, subnormal))
    return float_of(i32(value | i32(shifted_code & SIGN))) * scale


def code_e4m3(value: Value, inverse: Value, noise: Pattern) -> Pattern:
    """The code of a value within the range, rounded stochastically. From 2**-14 up the number itself is the larger one;
    below, the sum's mantissa has the subnormals' steps.
    """
    y = float_of(magnitude(value)) * inverse
    even = i32(most(bits(y), bits(multiply_add(y, HALF, HALF_SMALLEST))))
    return i32(i32(i32(i32(even + noise) >> 20) & 0x7F) | i32(i32(bits(value) >> 24) & 0x80))


def value_e5m3(code: Pattern, scale: Value) -> Value:
    """5 exponent and 3 mantissa bits without subnormals, because a second moment's root is a divisor."""
    value = where(code > 0, float_of(i32(i32(i32(code) + UNSIGNED_BIAS) << 20)), ZERO)
    return value * scale


def code_e5m3(value: Value, inverse: Value, noise: Pattern) -> Pattern:
    """The code of a value, rounded stochastically; 1 where that underflows, 0 for 0 alone."""
    biased = i32(i32(bits(value * inverse) + noise) >> 20)
    return i32(where(bits(value) != 0, i32(most(biased, i32(UNSIGNED_BIAS + 1))), i32(0)))


# Noise: a hash of step, parameter, purpose and element, the same on every device and for any number of threads. One
# word of 32 bits serves both states and an 8-bit remainder; the states need 20 bits each and share 8.


def scrambled(x: Bits) -> Bits:
    """C. Wellons' lowbias32 without its last line: the lowest bits correlate, and decide nothing by themselves."""
    x = u32(x ^ shifted(x, 16))
    x = u32(x * u32(0x7FEB352D))
    x = u32(x ^ shifted(x, 15))
    return u32(x * u32(0x846CA68B))


def noise_key(step: Any, ordinal: Any, stream: int) -> Bits:
    """The key of a stream (`STEP` or `WEIGHT`) of the parameter with this ordinal in step number `step`, from 1."""
    words = u32(step) * u32(0x9E3779B9) + u32(ordinal) * u32(0x85EBCA6B)
    x = scrambled(u32(words + u32(stream) * u32(0xC2B2AE35) + u32(0x27D4EB2F)))
    return u32(x ^ shifted(x, 16))


def key_from(key: Bits, offset: Any) -> Bits:
    """A key for places counted from `offset`: a shard's elements get the noise that they get in the whole parameter."""
    return u32(key + place(offset))


def place(index: Any) -> Bits:
    """The input of `noise` for the element at `index` in memory order."""
    return u32(u32(index) * u32(0x9E3779B1))


def following(at: Bits) -> Bits:
    """The next element's place."""
    return u32(at + u32(0x9E3779B1))


def noise(key: Bits, at: Bits) -> Bits:
    """The random bits of the element at a `place`."""
    return scrambled(u32(at + key))


def first_noise(word: Bits) -> Pattern:
    """For the first state: the low 20 bits."""
    return i32(word & u32(0xFFFFF))


def second_noise(word: Bits) -> Pattern:
    """For the second state: the high 20 bits."""
    return i32(shifted(word, 12))


def remainder_noise(word: Bits) -> Pattern:
    """For a weight with an 8-bit remainder: the low 8 bits, scrambled with others."""
    return i32(u32(word ^ shifted(word, 12)) & u32(0xFF))


def weight_noise(word: Bits) -> Pattern:
    """For a weight without a remainder: the high 16 bits of a word of the stream `WEIGHT`."""
    return i32(shifted(word, 16))
