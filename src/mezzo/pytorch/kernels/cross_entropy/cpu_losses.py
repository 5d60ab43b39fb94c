"""Rows' losses: one pass over the logits, block by block, each block's largest first while it is in the nearest cache.

Exponentials are summed in FP32 in 64 lanes of at most 16 numbers, relative to the largest logit so far, and the lanes
in FP64. A template: `specialise` writes it out with other functions in the lines marked as bound.
"""

from __future__ import annotations

import math

from mezzo.pytorch.kernels.cross_entropy.cpu_exp import Constants, constants, exp
from mezzo.pytorch.kernels.cross_entropy.cpu_formats import largest_bf16 as largest  # bound
from mezzo.pytorch.kernels.cross_entropy.cpu_formats import load_bf16 as load_logit  # bound
from mezzo.pytorch.kernels.native import (
    Pointer,
    expand,
    f32,
    f64,
    float32_at,
    float32_scratch,
    float64_at,
    fma,
    inline,
    int64_at,
    loop,
    take,
)
from mezzo.pytorch.kernels.native import int16_at as logit_at  # bound

# What `main` is given. The smoothing is the address of one FP64; weights are FP32, with FP64 sums of each `BLOCK`.
(
    COUNTER,
    ROWS,
    CLASSES,
    STRIDE,
    ROWS_AT_ONCE,
    LOGITS,
    TARGETS,
    IGNORED,
    SMOOTHING,
    WEIGHTS,
    WEIGHT_SUMS,
    LOSSES,
    LSES,
    IS_WRONG,
    JOB_WORDS,
) = range(15)

BLOCK = 1024
LANES = 64  # four AVX-512 registers

_LEAST = f32(-math.inf)
_ZERO = f32(0.0)


@expand
def add(logits: Pointer, lanes: Pointer, start: int, count: int, top: float, given: Constants) -> None:
    """Add `count` exponentials to as many lanes."""
    for lane in range(count):
        lanes[lane] = lanes[lane] + exp(f32(load_logit(logits, start + lane) - top), given)


@expand
def add_all(
    logits: Pointer, lanes: Pointer, sums: Pointer, start: int, count: int, top: float, given: Constants
) -> None:
    """The like, and add the logits themselves to others."""
    for lane in range(count):
        x = f32(load_logit(logits, start + lane) - top)
        lanes[lane] = lanes[lane] + exp(x, given)
        sums[lane] = sums[lane] + x


@expand
def add_weighted(
    logits: Pointer,
    weights: Pointer,
    lanes: Pointer,
    sums: Pointer,
    start: int,
    count: int,
    top: float,
    given: Constants,
) -> None:
    """The like, and add the weighted logits to others."""
    for lane in range(count):
        x = f32(load_logit(logits, start + lane) - top)
        lanes[lane] = lanes[lane] + exp(x, given)
        sums[lane] = fma(x, f32(weights[start + lane]), sums[lane])


@inline
def total(lanes: Pointer) -> float:
    """The lanes' sum in order, and the lanes are 0 again."""
    for lane in range(LANES // 2):
        lanes[lane] += lanes[lane + LANES // 2]
    for lane in range(LANES // 4):
        lanes[lane] += lanes[lane + LANES // 4]
    result = f64(0)
    for lane in range(LANES // 4):
        result += f64(lanes[lane])
    for lane in range(LANES):
        lanes[lane] = _ZERO
    return result


@loop
def row(
    logits: Pointer, classes: int, smoothed: int, weights: Pointer, weight_sums: Pointer
) -> tuple[float, float, float]:
    """The largest logit, the sum of the exponentials relative to it, and the weighted sum of the logits.

    Args:
        logits: of the row.
        classes: how many.
        smoothed: 0 if the last sum is not wanted, 1 if all weights are 1, 2 if there are weights.
        weights: of the classes.
        weight_sums: of each block of them.
    """
    lanes, sums = float32_scratch(LANES), float32_scratch(LANES)
    for lane in range(LANES):
        lanes[lane], sums[lane] = _ZERO, _ZERO
    given = constants()
    top, exponentials, weighted = _LEAST, f64(0), f64(0)
    for start in range(0, classes, BLOCK):
        stop = min(start + BLOCK, classes)
        here = largest(logits, start, stop)
        if not here <= top:  # or a NaN, which then is in the sum for good
            if start > 0:
                exponentials *= math.exp(f64(top) - f64(here))
            top = here
        at = _ZERO if top == _LEAST else top  # -inf - -inf is a NaN
        whole = stop - (stop - start) % LANES
        if smoothed == 0:
            for i in range(start, whole, LANES):
                add(logits, lanes, i, LANES, at, given)
            add(logits, lanes, whole, stop - whole, at, given)
        elif smoothed == 1:
            for i in range(start, whole, LANES):
                add_all(logits, lanes, sums, i, LANES, at, given)
            add_all(logits, lanes, sums, whole, stop - whole, at, given)
            weighted += total(sums) + f64(stop - start) * f64(at)
        else:
            for i in range(start, whole, LANES):
                add_weighted(logits, weights, lanes, sums, i, LANES, at, given)
            add_weighted(logits, weights, lanes, sums, whole, stop - whole, at, given)
            weighted += total(sums) + weight_sums[start // BLOCK] * f64(at)
        exponentials += total(lanes)
    return f64(top), exponentials, weighted


@inline
def finish(job: Pointer, i: int, logits: Pointer, top: float, exponentials: float, weighted: float) -> None:
    """Store one row's loss and log-sum-exp."""
    target, classes = int64_at(job[TARGETS])[i], job[CLASSES]
    losses, lses = float32_at(job[LOSSES]), float64_at(job[LSES])
    weights, smoothing = float32_at(job[WEIGHTS]), float64_at(job[SMOOTHING])[0]
    log_sum = math.log(exponentials) + (top - top)  # the infinite is a NaN
    lses[i] = top + log_sum
    losses[i] = _ZERO
    if target == job[IGNORED]:
        return
    if target < 0 or target >= classes:
        int64_at(job[IS_WRONG])[0] = 1
        return
    loss = log_sum - (f64(load_logit(logits, target)) - top)
    every = f64(classes)
    if job[WEIGHTS]:
        loss *= f64(weights[target])
        sums = float64_at(job[WEIGHT_SUMS])
        every = f64(0)
        for block in range((classes + BLOCK - 1) // BLOCK):
            every += sums[block]
    if smoothing > 0:
        loss = (1 - smoothing) * loss + smoothing / classes * (every * log_sum - (weighted - every * top))
    losses[i] = f32(loss)


def main(job: Pointer) -> None:
    """Take rows until none is left."""
    classes, smoothed = job[CLASSES], 0
    if float64_at(job[SMOOTHING])[0] > 0:
        smoothed = 2 if job[WEIGHTS] else 1
    while True:
        start = take(job) * job[ROWS_AT_ONCE]
        if start >= job[ROWS]:
            break
        for i in range(start, min(start + job[ROWS_AT_ONCE], job[ROWS])):
            logits = logit_at(job[LOGITS] + i * job[STRIDE])
            top, exponentials, weighted = row(
                logits, classes, smoothed, float32_at(job[WEIGHTS]), float64_at(job[WEIGHT_SUMS])
            )
            finish(job, i, logits, top, exponentials, weighted)
