"""What normalisation's loops do with single elements and with lanes of partial sums, in FP32.

A sum over a row is kept in 64 lanes, element i in lane i mod 64, and the lanes are halved until one is left. So its
order depends on the row's length alone, not on vectors or threads, and its error grows with the length over 64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from mezzo.pytorch.kernels.native import (
    Pointer,
    bits,
    expand,
    f32,
    half_bits,
    i16,
    i32,
    inline,
    intrinsic,
    types,
)

LANES = 64  # four AVX-512 registers


@inline
def store_bf16(out: Pointer, i: int, value: float) -> None:
    """Ties to even; every NaN as one pattern, since a carry out of the cut bits could make another an infinity."""
    pattern = bits(value)
    rounded = i32(pattern + i32(0x7FFF) + (i32(pattern >> 16) & i32(1)))
    out[i] = i16(i32(0x7FC0) if value != value else i32(rounded >> 16))


@inline
def store_fp16(out: Pointer, i: int, value: float) -> None:
    """Ties to even; from 65520 an infinity."""
    out[i] = half_bits(value)


@inline
def store_fp32(out: Pointer, i: int, value: float) -> None:
    """As it is."""
    out[i] = value


@inline
def load_one(weight: Pointer, i: int) -> float:
    """The weight that isn't there."""
    return f32(1.0)


@inline
def load_zero(bias: Pointer, i: int) -> float:
    """The bias that isn't there: minus zero, which added to anything changes nothing."""
    return f32(-0.0)


@inline
def yes() -> bool:
    """The mean is subtracted: layer_norm."""
    return True


@inline
def no() -> bool:
    """It is not: rms_norm."""
    return False


@expand
def clear(lanes: Pointer) -> None:
    """All lanes to 0."""
    for lane in range(LANES):
        lanes[lane] = f32(0.0)


def _lanes(typing: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with builder.goto_entry_block():
            made = builder.alloca(ir.FloatType(), size=LANES)
        made.align = 64
        return made

    return types.CPointer(types.float32)(), build


lanes_scratch: Callable[[], Pointer] = intrinsic(_lanes)
"""64 FP32s on the stack, where no vector of them crosses a cache line (twice as slow where they do)."""


def _total(typing: Any, lanes: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sixteen = ir.VectorType(ir.FloatType(), 16)
        first = builder.bitcast(args[0], sixteen.as_pointer())
        places = [builder.gep(first, [ir.Constant(ir.IntType(64), i)]) for i in range(LANES // 16)]
        a, b, c, d = (builder.load(place, align=64) for place in places)
        lanes = builder.fadd(builder.fadd(a, c), builder.fadd(b, d))
        for half in (8, 4, 2, 1):
            kinds = ir.VectorType(ir.IntType(32), half)
            lower, upper = (
                builder.shuffle_vector(lanes, lanes, ir.Constant(kinds, list(range(start, start + half))))
                for start in (0, half)
            )
            lanes = builder.fadd(lower, upper)
        return builder.extract_element(lanes, ir.Constant(ir.IntType(32), 0))

    return types.float32(types.CPointer(types.float32)), build


total: Callable[[Pointer], float] = intrinsic(_total)
"""The lanes' sum: upper half onto lower half, six times. (Written as loops it became 63 scalar additions.)"""
