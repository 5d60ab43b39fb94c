"""The formulas compiled by Numba, and how an element is read from memory and written to it, for `cpu_loops`.

A 16-bit tensor's elements are loaded as bit patterns. For an absent tensor there is `nothing`.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from mezzo.pytorch.kernels import cpu
from mezzo.pytorch.kernels.cpu import Pointer, f32, i8, i16, i32, inline, intrinsic, types, u8, u32
from mezzo.pytorch.kernels.optimizer_step import formulas


def _where(typing: Any, condition: Any, a: Any, b: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(*args)

    kind = typing.unify_types(types.unliteral(a), types.unliteral(b))
    return kind(types.boolean, kind, kind), build


@inline
def _shifted(x: int, count: int) -> int:
    return u32(u32(x) >> count)


@inline
def _float_of_half(pattern: int) -> float:
    return cpu.float_of_half(i16(pattern))


_formulas = formulas.over(
    {
        "bits": cpu.bits,
        "float_of": cpu.float_of,
        "half_bits": cpu.half_bits,
        "float_of_half": _float_of_half,
        "i32": i32,
        "u32": u32,
        "shifted": _shifted,
        "where": intrinsic(_where),
        "least": min,
        "most": max,
        "sqrt": math.sqrt,
        "divide": operator.truediv,
        "fma": cpu.fma,
        "multiply_add": cpu.fma,
    },
    inline,
    f"{__name__}.formulas",
    lambda number: f32(number) if isinstance(number, float) else number,
)


def __getattr__(name: str) -> Any:
    """A formula, under its name in `formulas`."""
    return getattr(_formulas, name)


# Weights and masters.


@inline
def load_pattern(x: Pointer, i: int) -> int:
    """An integer of any width."""
    return i32(x[i])


@inline
def nothing(*arguments: Any) -> float:
    """Load or store an element of an absent tensor."""
    return f32(0)


@inline
def store_16(x: Pointer, i: int, pattern: int) -> None:
    """The low 16 bits."""
    x[i] = i16(pattern)


@inline
def store_8(x: Pointer, i: int, pattern: int) -> None:
    """The low 8 bits."""
    x[i] = i8(pattern)


@inline
def infinite_bf16(weight: Pointer, i: int) -> bool:
    """Whether a bf16 weight in memory is an infinity."""
    return i16(weight[i] & i16(0x7FFF)) == i16(0x7F80)


@inline
def infinite_fp16(weight: Pointer, i: int) -> bool:
    """Whether an fp16 weight in memory is an infinity."""
    return i16(weight[i] & i16(0x7FFF)) == i16(0x7C00)


@inline
def noise_same(word: int, key: int, at: int) -> Any:
    """For a weight with an 8-bit remainder, from the states' word."""
    return _formulas.remainder_noise(word)


@inline
def noise_apart(word: int, key: int, at: int) -> Any:
    """For a weight without a remainder, from a word of its own."""
    return _formulas.weight_noise(_formulas.noise(key, at))


@inline
def store_moment_fp32(x: Pointer, i: int, value: float, noise: int) -> None:
    """Unrounded."""
    x[i] = value


@inline
def store_moment_bf16(x: Pointer, i: int, value: float, noise: int) -> None:
    """Rounded stochastically."""
    x[i] = i16(_formulas.encode_moment(value, noise))


@inline
def load_signed(state: Pointer, i: int, scale: float) -> Any:
    """Of a group with this scale."""
    return _formulas.decode_signed(i32(i8(state[i])), scale)


@inline
def store_signed(state: Pointer, i: int, value: float, inverse: float, noise: int) -> None:
    """In a group with this scale's inverse."""
    state[i] = u8(_formulas.encode_signed(value, inverse, noise))


@inline
def load_unsigned(state: Pointer, i: int, scale: float) -> Any:
    """Of a group with this scale."""
    return _formulas.decode_unsigned(i32(state[i]), scale)


@inline
def store_unsigned(state: Pointer, i: int, value: float, inverse: float, noise: int) -> None:
    """In a group with this scale's inverse."""
    state[i] = u8(_formulas.encode_unsigned(value, inverse, noise))
