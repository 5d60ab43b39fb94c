"""The gradients of rows: dx from two sums over a row, the parameters' from sums over each block of rows, in one pass.

With h = (x - mean) * rstd and g = dy * weight::

    dx      = rstd * (g - mean(g) - h * mean(g * h))       (rms_norm: h = x * rstd, and no mean(g))
    dweight = sum over rows of dy * h
    dbias   = sum over rows of dy

Each block has its own sums in FP32, which are then added up: the result does not depend on the number of threads.
A template: `specialise` writes it out with other functions in the lines marked as bound.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.layer_norm.cpu_elements import LANES, clear, lanes_scratch, total
from mezzo.pytorch.kernels.layer_norm.cpu_elements import store_bf16 as store_dx  # bound
from mezzo.pytorch.kernels.layer_norm.cpu_elements import yes as has_sums  # bound
from mezzo.pytorch.kernels.layer_norm.cpu_elements import yes as is_centred  # bound
from mezzo.pytorch.kernels.native import (
    Pointer,
    expand,
    f32,
    float32_at,
    fma,
    inline,
    int16_at,
    loop,
    take,
)
from mezzo.pytorch.kernels.native import float32_at as weight_at  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_grads import load_bf16 as load_x  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_grads import load_fp32 as load_weight  # bound

# What `main` is given. DX is 0 where it isn't wanted. SUMS: FP32 [2, blocks, columns], the weight's and the bias's.
COUNTER, TAKEN, BLOCKS, BLOCK_ROWS, ROWS, COLUMNS, DY, X, WEIGHT, MEANS, RSTDS, DX, SUMS, JOB_WORDS = range(
    14
)


@expand
def add_products(
    dy: Pointer,
    x: Pointer,
    weight: Pointer,
    first: int,
    start: int,
    count: int,
    mean: float,
    rstd: float,
    g_lanes: Pointer,
    gh_lanes: Pointer,
    weight_sums: Pointer,
    bias_sums: Pointer,
) -> None:
    """Add g and g * h of as many elements to as many lanes, and their parts to the parameters' sums."""
    for lane in range(count):
        i = start + lane
        gradient = load_x(dy, first + i)
        h = (load_x(x, first + i) - mean) * rstd
        g = gradient * load_weight(weight, i)
        if is_centred():
            g_lanes[lane] = g_lanes[lane] + g
        gh_lanes[lane] = fma(g, h, gh_lanes[lane])
        if has_sums():
            weight_sums[i] = fma(gradient, h, weight_sums[i])
            if is_centred():
                bias_sums[i] = bias_sums[i] + gradient


@loop
def rows(
    dy: Pointer,
    x: Pointer,
    weight: Pointer,
    means: Pointer,
    rstds: Pointer,
    dx: Pointer,
    weight_sums: Pointer,
    bias_sums: Pointer,
    start: int,
    stop: int,
    columns: int,
    wants_dx: bool,
) -> None:
    """The gradients of some rows; their parts of the parameters' gradients are added to a block's sums."""
    g_lanes, gh_lanes = lanes_scratch(), lanes_scratch()
    whole = columns - columns % LANES
    count = f32(columns)
    if has_sums():
        for i in range(columns):
            weight_sums[i] = f32(0.0)
            if is_centred():
                bias_sums[i] = f32(0.0)
    for row in range(start, stop):
        first = row * columns
        mean, rstd = f32(0.0), rstds[row]
        if is_centred():
            mean = means[row]
            clear(g_lanes)
        clear(gh_lanes)
        for i in range(0, whole, LANES):
            add_products(
                dy, x, weight, first, i, LANES, mean, rstd, g_lanes, gh_lanes, weight_sums, bias_sums
            )
        rest = columns - whole
        add_products(dy, x, weight, first, whole, rest, mean, rstd, g_lanes, gh_lanes, weight_sums, bias_sums)
        if wants_dx:
            g_mean = total(g_lanes) / count if is_centred() else f32(0.0)
            gh_mean = total(gh_lanes) / count
            for i in range(columns):
                g = load_x(dy, first + i) * load_weight(weight, i)
                h = (load_x(x, first + i) - mean) * rstd
                store_dx(dx, first + i, rstd * (g - g_mean - h * gh_mean))


@inline
def block(job: Pointer, number: int) -> None:
    """The gradients of a block of rows."""
    columns = job[COLUMNS]
    start = number * job[BLOCK_ROWS]
    rows(
        int16_at(job[DY]),
        int16_at(job[X]),
        weight_at(job[WEIGHT]),
        float32_at(job[MEANS]),
        float32_at(job[RSTDS]),
        int16_at(job[DX]),
        float32_at(job[SUMS] + number * columns * 4),
        float32_at(job[SUMS] + (job[BLOCKS] + number) * columns * 4),
        start,
        min(start + job[BLOCK_ROWS], job[ROWS]),
        columns,
        job[DX] != 0,
    )


@inline
def share(job: Pointer) -> None:
    """Take some blocks until none is left."""
    while True:
        first = take(job) * job[TAKEN]
        if first >= job[BLOCKS]:
            break
        for number in range(first, min(first + job[TAKEN], job[BLOCKS])):
            block(job, number)


def main(job: Pointer) -> None:
    """Take some blocks until none is left."""
    share(job)
