"""Primitives of the kernels that Numba compiles: words and pointers, elements in memory, sums in lanes, exp.

Numba computes with 64-bit integers by default: `i32` and `u32` cut each result, and LLVM then computes in 32 bits.
FP32 arithmetic is IEEE, in the order written, with no contraction except `fma`. None can be called from Python.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba.core.cgutils
import numba.core.compiler
import numba.extending
from llvmlite import ir

F = TypeVar("F", bound=Callable[..., Any])
Pointer = Any  # to elements of one type, indexed as in C

_numba: Any = numba  # its annotations cover a part of it, and another part in each release
types, njit, intrinsic = _numba.types, _numba.njit, _numba.extending.intrinsic
_FLOAT, _WORD = ir.FloatType(), ir.IntType(32)

i16: Callable[[int], int] = types.int16
i32: Callable[[float], int] = types.int32
u8: Callable[[int], int] = types.uint8
u32: Callable[[int], int] = types.uint32
f32: Callable[[float], float] = types.float32
f64: Callable[[float], float] = types.float64


def inline(function: F) -> F:
    """Mark a function that is inlined into the loop that calls it."""
    compiled: F = njit(forceinline=True, error_model="numpy")(function)
    return compiled


def expand(function: F) -> F:
    """Mark a function with loops that is inlined before LLVM sees it, so that its counts and pointers are known."""
    compiled: F = njit(inline="always", error_model="numpy")(function)
    return compiled


class _Distinct(_numba.core.compiler.Compiler):  # type: ignore[misc]  # a class without a type
    """Numba's compiler, with pointer arguments that never alias (C's `restrict`)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state.flags.noalias = True


def loop(function: F) -> F:
    """Mark a function whose pointers never alias, so that its loops are vectorized without checks."""
    compiled: F = njit(pipeline_class=_Distinct, error_model="numpy")(function)
    return compiled


def _instruction(result: Any, *operands: Any) -> Callable[[Callable[..., Any]], Callable[..., int]]:
    """Make ``build(builder, *values)``, which emits LLVM instructions, a function of these types for Numba."""

    def decorate(build: Callable[..., Any]) -> Callable[..., int]:
        def typed(typing: Any, *given: Any) -> Any:
            return result(*operands), lambda context, builder, signature, values: build(builder, *values)

        names = ["typing", *(f"operand{i}" for i in range(len(operands)))]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # Numba reads it
        made: Callable[..., int] = intrinsic(functools.update_wrapper(typed, build, updated=()))
        return made

    return decorate


def _pointer(element: Any, in_memory: ir.Type) -> Callable[[int], Pointer]:
    def pointer(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, in_memory.as_pointer())

    return _instruction(types.CPointer(element), types.int64)(pointer)


# An address as a pointer to its elements.
uint8_at, int8_at = (_pointer(element, ir.IntType(8)) for element in (types.uint8, types.int8))
int16_at, int64_at = _pointer(types.int16, ir.IntType(16)), _pointer(types.int64, ir.IntType(64))
float32_at, float64_at = _pointer(types.float32, _FLOAT), _pointer(types.float64, ir.DoubleType())


@_instruction(types.int32, types.float32)
def bits(builder: Any, value: Any) -> Any:
    """The int32 with an FP32's pattern."""
    return builder.bitcast(value, _WORD)


@_instruction(types.float32, types.int32)
def float_of(builder: Any, pattern: Any) -> Any:
    """The FP32 of an int32 pattern."""
    return builder.bitcast(pattern, _FLOAT)


@_instruction(types.int16, types.float32)
def half_bits(builder: Any, value: Any) -> Any:
    """The int16 with the pattern of an FP32 in fp16, ties to even."""
    return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))


@_instruction(types.float32, types.int16)
def float_of_half(builder: Any, pattern: Any) -> Any:
    """The FP32 of an fp16's int16 pattern."""
    return builder.fpext(builder.bitcast(pattern, ir.HalfType()), _FLOAT)


@_instruction(types.float32, types.float32, types.float32, types.float32)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` with one rounding: an instruction, or the C library's function where a CPU has none."""
    return builder.fma(a, b, c)


@_instruction(types.int64, types.CPointer(types.int64))
def take(builder: Any, counter: Any) -> Any:
    """Increment a counter atomically and return its previous value."""
    return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")


@inline
def share(job: Pointer, pieces: int, at_once: int, work: Callable[[Pointer, int], None]) -> None:
    """Call ``work(job, piece)``: threads take pieces by the counter in the job's first word until none is left."""
    while True:
        start = take(job) * at_once
        if start >= pieces:
            break
        for piece in range(start, min(start + at_once, pieces)):
            work(job, piece)


@_instruction(types.int32, types.int32)
def held(builder: Any, pattern: Any) -> Any:
    """The same int32, which the optimizer treats as unknown."""
    return builder.asm(ir.FunctionType(_WORD, [_WORD]), "", "=r,0", [pattern], side_effect=True)


def _scratch(element: Any) -> Callable[[int], Pointer]:
    def scratch(typing: Any, count: Any) -> Any:
        if not isinstance(count, types.IntegerLiteral):
            return None  # Numba asks again with the literal
        size = count.literal_value

        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _numba.core.cgutils.alloca_once(builder, context.get_value_type(element), size=size)

        return types.CPointer(element)(count), build

    made: Callable[[int], Pointer] = intrinsic(scratch)
    return made


# An array on the stack, of a literal number of elements.
float32_scratch = _scratch(types.float32)
float64_scratch = _scratch(types.float64)
uint32_scratch = _scratch(types.uint32)


# Elements of tensors, in FP32.

_NAN = 0x7FC00000


@inline
def load_fp32(x: Pointer, i: int) -> float:
    """As it is."""
    return f32(x[i])


@inline
def load_bf16(x: Pointer, i: int) -> float:
    """The upper half of an FP32's pattern."""
    return float_of(i32(i32(x[i]) << 16))


@inline
def load_fp16(x: Pointer, i: int) -> float:
    """Exactly, subnormals too."""
    return float_of_half(x[i])


@inline
def load_quiet_fp32(x: Pointer, i: int) -> float:
    """As it is, but one pattern for NaN: `exp` relies on low bits that are 0, as those of 16-bit NaNs are."""
    value = f32(x[i])
    return float_of(i32(_NAN)) if value != value else value


load_quiet_bf16, load_quiet_fp16 = load_bf16, load_fp16


@inline
def store_bf16(out: Pointer, i: int, value: float) -> None:
    """Ties to even; one pattern for NaN, because a carry could turn another into an infinity."""
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
def store_number_bf16(out: Pointer, i: int, value: float) -> None:
    """The nearest, ties to even, of a number that is not a NaN."""
    pattern = bits(value)
    even = i32(i32(pattern >> 16) & i32(1))
    out[i] = i16(i32(i32(pattern + i32(0x7FFF)) + even) >> 16)


store_number_fp16, store_number_fp32 = store_fp16, store_fp32


# The largest element. As integers, with the magnitude's bits flipped where the sign is set, patterns are ordered as
# their numbers, and 32 of 16 bits are compared at once. NaNs are beyond the infinities on either side.


@expand
def largest_bf16(x: Pointer, start: int, stop: int) -> float:
    """The largest of the elements from `start` to `stop`, or a NaN among them, or -inf although there is a NaN."""
    return float_of(i32(i32(_largest16(x, start, stop)) << 16))


@expand
def largest_fp16(x: Pointer, start: int, stop: int) -> float:
    """See `largest_bf16`."""
    return float_of_half(_largest16(x, start, stop))


@expand
def largest_fp32(x: Pointer, start: int, stop: int) -> float:
    """See `largest_bf16`."""
    top = i32(-0x80000000)
    for i in range(start, stop):
        pattern = bits(load_quiet_fp32(x, i))
        top = max(top, i32(pattern ^ i32(i32(pattern >> 31) & i32(0x7FFFFFFF))))
    return float_of(i32(top ^ i32(i32(top >> 31) & i32(0x7FFFFFFF))))


@expand
def _largest16(x: Pointer, start: int, stop: int) -> int:
    top = i16(-0x8000)
    for i in range(start, stop):
        pattern = i16(x[i])
        top = max(top, i16(pattern ^ i16(i16(pattern >> 15) & i16(0x7FFF))))
    return i16(top ^ i16(i16(top >> 15) & i16(0x7FFF)))


# A sum over a row is kept in 64 lanes, element i in lane i mod 64, and the lanes are halved until one is left. The
# order depends only on the row's length, not on vectors or threads, and the error grows with the length over 64.

LANES = 64  # four AVX-512 registers of FP32


@expand
def clear(lanes: Pointer) -> None:
    """All lanes to 0."""
    for lane in range(LANES):
        lanes[lane] = f32(0.0)


@_instruction(types.CPointer(types.float32))
def lanes_scratch(builder: Any) -> Any:
    """64 FP32s on the stack, aligned so that no vector crosses a cache line (twice as slow where one does)."""
    with builder.goto_entry_block():
        made = builder.alloca(_FLOAT, size=LANES)
    made.align = 64
    return made


@_instruction(types.float32, types.CPointer(types.float32))
def total(builder: Any, address: Any) -> Any:
    """The lanes' sum: upper half onto lower half, six times. (Written as loops it became 63 scalar additions.)"""
    first = builder.bitcast(address, ir.VectorType(_FLOAT, 16).as_pointer())
    places = [builder.gep(first, [ir.Constant(ir.IntType(64), i)]) for i in range(LANES // 16)]
    a, b, c, d = (builder.load(place, align=64) for place in places)
    lanes = builder.fadd(builder.fadd(a, c), builder.fadd(b, d))
    for half in (8, 4, 2, 1):
        kinds = ir.VectorType(_WORD, half)
        lower, upper = (
            builder.shuffle_vector(lanes, lanes, ir.Constant(kinds, list(range(start, start + half))))
            for start in (0, half)
        )
        lanes = builder.fadd(lower, upper)
    return builder.extract_element(lanes, ir.Constant(_WORD, 0))


# exp in FP32 without branches: ``exp(x) = 2**n * exp(r)`` with ``n`` the nearest integer to ``x / log(2)``. Adding
# 1.5 * 2**23 rounds to an integer in the sum's lowest bits; shifted by 23 they are an exponent. The polynomial of
# degree 6 has the least relative error for ``|r| <= log(2) / 2``, 3e-9 (Lawson). Measured: 1.3 ulp from -16 to 0, 4.5
# at -87. `constants` are passed once per row: LLVM would load visible ones again in each round, half as long again.

EXP_BIAS = 64  # the exponential times 2**64 is far from subnormal wherever its final scaled value is not zero

Constants = tuple[float, ...]

_ROUND = f32(1.5 * 2**23)
_ROUND_BIASED = f32(1.5 * 2**23 + EXP_BIAS)
_LEAST = f32(-126 * math.log(2))
_LEAST_BIASED = f32(-(126 + EXP_BIAS) * math.log(2))
_PER_LOG2 = f32(1 / math.log(2))
_LOG2 = f32(-math.log(2))
_C6, _C5, _C4 = f32(0.0013814540579915047), f32(0.00836874540614519), f32(0.04166838899254799)
_C3, _C2, _ONE = f32(0.1666652113199234), f32(0.4999999403953552), f32(1.0)


@inline
def hold(value: float) -> float:
    """The same FP32, which the optimizer treats as unknown."""
    return float_of(held(bits(value)))


@inline
def _shared_constants() -> Constants:
    return hold(_PER_LOG2), hold(_LOG2), hold(_C6), hold(_C5), hold(_C4), hold(_C3), hold(_C2), hold(_ONE)


@inline
def constants() -> Constants:
    """For `exp`, up to 88. Of less than -87.3, where it would be subnormal, it is 2**-126 or less."""
    return hold(_LEAST), hold(_ROUND), *_shared_constants()


@inline
def biased_constants() -> Constants:
    """For 2**64 times the exponential, up to 44. Of less than -131.7 it is 2**-126 or less."""
    return hold(_LEAST_BIASED), hold(_ROUND_BIASED), *_shared_constants()


@inline
def exp(x: float, given: Constants) -> float:
    """exp, or its scaled form by the constants; NaN for a NaN whose lowest 9 bits are 0."""
    least, rounding, per_log2, log2, c6, c5, c4, c3, c2, one = given
    x = least if x < least else x  # in this order a NaN is kept
    t = fma(x, per_log2, rounding)
    r = fma(f32(t - rounding), log2, x)
    p = fma(c6, r, c5)
    p = fma(p, r, c4)
    p = fma(p, r, c3)
    p = fma(p, r, c2)
    p = fma(p, r, one)
    p = fma(p, r, one)
    return float_of(i32(bits(p) + i32(bits(t) << 23)))
