"""Codes of stretches of elements, each with a scale: one that is given, or the one that the stretch itself asks for.

A template: `specialise` writes it out with other functions in the lines marked as bound.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.fp8.cpu_elements import finite_magnitude, scale_of
from mezzo.pytorch.kernels.fp8.cpu_elements import narrow_e4m3fn as narrow  # bound
from mezzo.pytorch.kernels.layer_norm.cpu_elements import no as by_column  # bound
from mezzo.pytorch.kernels.layer_norm.cpu_elements import no as finds_scales  # bound
from mezzo.pytorch.kernels.layer_norm.cpu_elements import no as keeps_largest  # bound
from mezzo.pytorch.kernels.native import (
    Pointer,
    f32,
    float32_at,
    float_of,
    i32,
    inline,
    loop,
    take,
    u8,
    uint8_at,
)
from mezzo.pytorch.kernels.native import float32_at as x_at  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_grads import load_fp32 as load_x  # bound

# What `main` is given: stretches of LENGTH elements, of which the last of TOTAL may be short, and AT_ONCE are taken at
# once. A stretch's scale is SCALE_STEP places after its predecessor's, or each element has its column's. TOP and
# MARGIN are `scale_of`'s; LARGEST is where each stretch's largest finite magnitude goes.
COUNTER, AT_ONCE, LENGTH, TOTAL, X, SCALES, SCALE_STEP, CODES, LARGEST, TOP, MARGIN, JOB_WORDS = range(12)


@inline
def largest_of(x: Pointer, start: int, stop: int) -> int:
    """The largest finite magnitude's pattern."""
    largest = i32(0)
    for i in range(start, stop):
        largest = i32(max(largest, finite_magnitude(load_x(x, i))))
    return largest


@loop
def stretches(
    x: Pointer,
    scales: Pointer,
    codes: Pointer,
    largest: Pointer,
    start: int,
    stop: int,
    length: int,
    total: int,
    scale_step: int,
    top: int,
    margin: int,
) -> None:
    """Cast some stretches."""
    for stretch in range(start, stop):
        first, last = stretch * length, min((stretch + 1) * length, total)
        if by_column():
            for i in range(last - first):
                codes[first + i] = u8(narrow(load_x(x, first + i), f32(scales[i])))
        elif keeps_largest():
            scale = f32(scales[stretch * scale_step])
            most = i32(0)
            for i in range(first, last):
                value = load_x(x, i)
                most = i32(max(most, finite_magnitude(value)))
                codes[i] = u8(narrow(value, scale))
            largest[stretch] = float_of(most)
        else:
            if finds_scales():
                scales[stretch] = float_of(scale_of(largest_of(x, first, last), top, margin))
            scale = f32(scales[stretch * scale_step])
            for i in range(first, last):
                codes[i] = u8(narrow(load_x(x, i), scale))


@inline
def share(job: Pointer) -> None:
    """Take stretches until none is left."""
    count = -(-job[TOTAL] // job[LENGTH])
    while True:
        start = take(job) * job[AT_ONCE]
        if start >= count:
            break
        stretches(
            x_at(job[X]),
            float32_at(job[SCALES]),
            uint8_at(job[CODES]),
            float32_at(job[LARGEST]),
            start,
            min(start + job[AT_ONCE], count),
            job[LENGTH],
            job[TOTAL],
            job[SCALE_STEP],
            i32(job[TOP]),
            i32(job[MARGIN]),
        )


def main(job: Pointer) -> None:
    """Take stretches until none is left."""
    share(job)
