"""Words and pointers for kernels that Numba compiles: what C has and Python lacks.

Numba computes with 64-bit integers unless told otherwise, and that halves a vector twice over. So `i32` and `u32`
cut an expression back to 32 bits, and LLVM then computes all of it in 32. Everything here is a name that a
compiled function may use; nothing can be called from Python. FP32 arithmetic is IEEE and in the order written:
no fast math, no contraction; what is fused says so (`fma`).
"""

from __future__ import annotations

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

i8: Callable[[int], int] = types.int8
i16: Callable[[int], int] = types.int16
i32: Callable[[float], int] = types.int32
u8: Callable[[int], int] = types.uint8
u32: Callable[[int], int] = types.uint32
f32: Callable[[float], float] = types.float32
f64: Callable[[float], float] = types.float64


def inline(function: F) -> F:
    """Mark a function that becomes part of the loop that calls it."""
    compiled: F = njit(forceinline=True, error_model="numpy")(function)
    return compiled


def expand(function: F) -> F:
    """Mark a function with loops in it that becomes part of another: LLVM sees them only there.

    What is `inline` is optimised on its own first, when neither its counts nor what its pointers lead to is known.
    """
    compiled: F = njit(inline="always", error_model="numpy")(function)
    return compiled


class _Distinct(_numba.core.compiler.Compiler):  # type: ignore[misc]  # a class without a type
    """Numba's compiler, promised that pointers among a function's arguments never meet (C's `restrict`)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state.flags.noalias = True


def loop(function: F) -> F:
    """Mark a function whose pointers lead to distinct memory, so that its loops are vectorised unguarded."""
    compiled: F = njit(pipeline_class=_Distinct, error_model="numpy")(function)
    return compiled


def entry(main: Callable[[Pointer], None]) -> Any:
    """Compile ``void main(int64_t *job)``, or load it from the cache beside its source; Numba's object for it."""
    signature = types.void(types.CPointer(types.int64))
    return _numba.cfunc(signature, cache=True, error_model="numpy")(main)


def _pointer(element: Any) -> Callable[[int], Pointer]:
    def pointer(typing: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), build

    made: Callable[[int], Pointer] = intrinsic(pointer)
    return made


# An address as a pointer to its elements.
uint8_at = _pointer(types.uint8)
int8_at = _pointer(types.int8)
int16_at = _pointer(types.int16)
int32_at = _pointer(types.int32)
int64_at = _pointer(types.int64)
float32_at = _pointer(types.float32)
float64_at = _pointer(types.float64)


def _bits(typing: Any, value: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), build


def _float_of(typing: Any, pattern: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), build


def _half_bits(typing: Any, value: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), build


def _float_of_half(typing: Any, pattern: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), build


def _fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), build


def _take(typing: Any, counter: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), build


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


bits: Callable[[float], int] = intrinsic(_bits)
"""The int32 with an FP32's pattern."""

float_of: Callable[[int], float] = intrinsic(_float_of)
"""The FP32 of an int32 pattern."""

half_bits: Callable[[float], int] = intrinsic(_half_bits)
"""The int16 with the pattern of an FP32 in fp16, ties to even."""

float_of_half: Callable[[int], float] = intrinsic(_float_of_half)
"""The FP32 of an fp16's int16 pattern."""

fma: Callable[[float, float, float], float] = intrinsic(_fma)
"""``a * b + c`` of FP32s with one rounding: an instruction, or the C library's function where a CPU has none."""

take: Callable[[Pointer], int] = intrinsic(_take)
"""The counter's value, which is one more for whoever asks next, on any thread."""

# So many elements on the stack (a literal number), for as long as the function runs.
float32_scratch = _scratch(types.float32)
float64_scratch = _scratch(types.float64)
uint32_scratch = _scratch(types.uint32)
