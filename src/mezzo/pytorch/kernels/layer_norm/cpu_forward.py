"""Rows normalised: mean, then variance about it, then the output, a row at a time while it lies in the cache.

A template: `specialise` writes it out with other functions in the lines marked as bound.
"""

from __future__ import annotations

import math

from mezzo.pytorch.kernels.layer_norm.cpu_elements import LANES, clear, lanes_scratch, total
from mezzo.pytorch.kernels.layer_norm.cpu_elements import store_bf16 as store_out  # bound
from mezzo.pytorch.kernels.layer_norm.cpu_elements import yes as is_centred  # bound
from mezzo.pytorch.kernels.native import (
    Pointer,
    expand,
    f32,
    float32_at,
    float_of,
    fma,
    i32,
    inline,
    int16_at,
    loop,
    take,
)
from mezzo.pytorch.kernels.native import float32_at as bias_at  # bound
from mezzo.pytorch.kernels.native import float32_at as weight_at  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_grads import load_bf16 as load_x  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_grads import load_fp32 as load_bias  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_grads import load_fp32 as load_weight  # bound

# What `main` is given. Rows are shared out in blocks; epsilon is an FP32's pattern.
COUNTER, BLOCK_ROWS, ROWS, COLUMNS, X, WEIGHT, BIAS, OUT, MEANS, RSTDS, EPSILON, JOB_WORDS = range(12)


@expand
def add(x: Pointer, start: int, count: int, lanes: Pointer) -> None:
    """Add as many elements to as many lanes."""
    for lane in range(count):
        lanes[lane] = lanes[lane] + load_x(x, start + lane)


@expand
def add_squares(x: Pointer, start: int, count: int, mean: float, lanes: Pointer) -> None:
    """Add the squared distances of as many elements from the mean."""
    for lane in range(count):
        distance = load_x(x, start + lane) - mean
        lanes[lane] = fma(distance, distance, lanes[lane])


@loop
def rows(
    x: Pointer,
    weight: Pointer,
    bias: Pointer,
    out: Pointer,
    means: Pointer,
    rstds: Pointer,
    start: int,
    stop: int,
    columns: int,
    epsilon: float,
) -> None:
    """Normalise some rows."""
    lanes = lanes_scratch()
    whole = columns - columns % LANES
    count = f32(columns)
    for row in range(start, stop):
        first = row * columns
        mean = f32(0.0)
        if is_centred():
            clear(lanes)
            for i in range(0, whole, LANES):
                add(x, first + i, LANES, lanes)
            add(x, first + whole, columns - whole, lanes)
            mean = total(lanes) / count
            means[row] = mean
        clear(lanes)
        for i in range(0, whole, LANES):
            add_squares(x, first + i, LANES, mean, lanes)
        add_squares(x, first + whole, columns - whole, mean, lanes)
        rstd = f32(1.0) / f32(math.sqrt(total(lanes) / count + epsilon))
        rstds[row] = rstd
        for i in range(columns):
            normal = (load_x(x, first + i) - mean) * rstd
            store_out(out, first + i, fma(normal, load_weight(weight, i), load_bias(bias, i)))


@inline
def share(job: Pointer) -> None:
    """Take blocks of rows until none is left."""
    while True:
        start = take(job) * job[BLOCK_ROWS]
        if start >= job[ROWS]:
            break
        rows(
            int16_at(job[X]),
            weight_at(job[WEIGHT]),
            bias_at(job[BIAS]),
            int16_at(job[OUT]),
            float32_at(job[MEANS]),
            float32_at(job[RSTDS]),
            start,
            min(start + job[BLOCK_ROWS], job[ROWS]),
            job[COLUMNS],
            float_of(i32(job[EPSILON])),
        )


def main(job: Pointer) -> None:
    """Take blocks of rows until none is left."""
    share(job)
