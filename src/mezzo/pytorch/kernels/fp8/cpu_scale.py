"""The last line of a search for largest magnitudes: parts' results become one, and that a scale.

A template for `specialise`, with nothing bound: no work for more than one thread.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.fp8.cpu_elements import LARGEST as LARGEST_FINITE
from mezzo.pytorch.kernels.fp8.cpu_elements import MAGNITUDE, scale_of
from mezzo.pytorch.kernels.native import Pointer, bits, f32, float32_at, float_of, i32, inline, loop

# What `main` is given: ROWS of COLUMNS parts, FP32; where each column's largest goes, and its scale (or 0: nowhere).
# TOP and MARGIN are `scale_of`'s.
PARTS, ROWS, COLUMNS, LARGEST, SCALES, TOP, MARGIN, JOB_WORDS = range(8)


@loop
def finish(
    parts: Pointer,
    largest: Pointer,
    scales: Pointer,
    rows: int,
    columns: int,
    has_scales: bool,
    top: int,
    margin: int,
) -> None:
    """The largest of each column, and its scale."""
    for i in range(columns):
        largest[i] = f32(parts[i])
    for row in range(1, rows):
        for i in range(columns):
            largest[i] = float_of(i32(max(bits(f32(largest[i])), bits(f32(parts[row * columns + i])))))
    if has_scales:
        for i in range(columns):
            pattern = i32(min(i32(bits(f32(largest[i])) & MAGNITUDE), i32(LARGEST_FINITE)))
            scales[i] = float_of(scale_of(pattern, top, margin))


@inline
def whole(job: Pointer) -> None:
    """All columns."""
    finish(
        float32_at(job[PARTS]),
        float32_at(job[LARGEST]),
        float32_at(job[SCALES]),
        job[ROWS],
        job[COLUMNS],
        job[SCALES] != 0,
        i32(job[TOP]),
        i32(job[MARGIN]),
    )


def main(job: Pointer) -> None:
    """All columns."""
    whole(job)
