"""TF32's rounding of a stretch of FP32s, as `reference` does it. A template for `specialise`, with nothing bound."""

from __future__ import annotations

from mezzo.pytorch.kernels.native import Pointer, bits, f32, float32_at, float_of, i32, inline, loop, take

# What `main` is given: stretches of LENGTH elements, the last of TOTAL may be short.
COUNTER, LENGTH, TOTAL, X, OUT, JOB_WORDS = range(6)

_MAGNITUDE = 0x7FFFFFFF
_SIGN = -(1 << 31)
_INFINITY = 0x7F800000
_QUIET = 0x7FC00000


@inline
def rounded(value: float) -> float:
    """The nearest TF32, ties to even."""
    pattern = bits(value)
    is_odd = i32(i32(pattern >> 13) & 1)
    near = i32(i32(i32(pattern + 0xFFF) + is_odd) & -(1 << 13))
    is_nan = i32(pattern & _MAGNITUDE) > i32(_INFINITY)
    return float_of(i32(i32(pattern & _SIGN) | _QUIET) if is_nan else near)


@loop
def stretch(x: Pointer, out: Pointer, start: int, stop: int) -> None:
    """Round some elements."""
    for i in range(start, stop):
        out[i] = rounded(f32(x[i]))


@inline
def share(job: Pointer) -> None:
    """Take stretches until none is left."""
    while True:
        start = take(job) * job[LENGTH]
        if start >= job[TOTAL]:
            break
        stretch(float32_at(job[X]), float32_at(job[OUT]), start, min(start + job[LENGTH], job[TOTAL]))


def main(job: Pointer) -> None:
    """Take stretches until none is left."""
    share(job)
