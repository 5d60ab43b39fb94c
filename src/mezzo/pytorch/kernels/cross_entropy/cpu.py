"""Rows' losses and gradients on a CPU: compiled loops on PyTorch's threads, a row by one of them.

A loss is one pass over the logits, block by block, each block's largest first while it is in the nearest cache.
Exponentials are summed in FP32 in 64 lanes of at most 16 numbers, relative to the largest logit so far, and the lanes
in FP64. A gradient is one pass that reads logits and writes gradients, from the row's log-sum-exp and scale: with the
row's own factors in FP64, an element is ``exp(x - lse) * factor + shift`` in FP32. The log-sum-exp's last bits, which
FP32 has no room for, are in the factor. The target's element is computed apart, in FP64: near a probability of 1 what
counts is ``p - 1``.

The loops are a template: `jit` writes this file out with other functions in the lines marked as bound.
"""

from __future__ import annotations

import functools
import math
import sys
from array import array

import numpy as np
import torch
from torch import Tensor

from mezzo.pytorch.kernels import jit
from mezzo.pytorch.kernels.cpu import (
    EXP_BIAS,
    LANES,
    Constants,
    Pointer,
    biased_constants,
    constants,
    exp,
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
from mezzo.pytorch.kernels.cpu import int16_at as gradient_at  # bound
from mezzo.pytorch.kernels.cpu import int16_at as logit_at  # bound
from mezzo.pytorch.kernels.cpu import largest_bf16 as largest  # bound
from mezzo.pytorch.kernels.cpu import load_bf16 as load_logit  # bound
from mezzo.pytorch.kernels.cpu import store_number_bf16 as store_gradient  # bound
from mezzo.pytorch.kernels.cross_entropy.reference import Rows, check_targets

# What the loops are given. NUMBERS: address of FP64s, the smoothing and the sum of all weights. WEIGHTS are FP32,
# with FP64 sums of each `BLOCK`. SMOOTHED: 0 for no smoothing, 1 where all weights are 1, 2 where they are not.
(
    COUNTER, ROWS, CLASSES, STRIDE, ROWS_AT_ONCE, LOGITS, TARGETS, IGNORED, NUMBERS, WEIGHTS, WEIGHT_SUMS, SMOOTHED,
    LSES, LOSSES, IS_WRONG, SCALES, SCALE_STRIDE, GRADIENTS, GRADIENT_STRIDE, NAN, JOB_WORDS,
) = range(21)  # fmt: skip

BLOCK = 1024

_AT_ONCE = 1 << 13  # elements of the rows that a thread takes
_ALONE = 1 << 14  # elements below which one thread is as fast
_LARGEST, _SMALLEST = 2.0**40, 2.0**-60  # of the factors that `exp`'s bias leaves exact
_UNBIAS = 2.0**-EXP_BIAS
_LEAST = f32(-math.inf)
_ZERO = f32(0.0)


def rows_loss(given: Rows) -> tuple[Tensor, Tensor]:
    """The loss of each row in FP32, and its log-sum-exp in FP64; see `reference`."""
    logits = given.logits
    loss = logits.new_empty(len(logits), dtype=torch.float32)
    lse = logits.new_empty(len(logits), dtype=torch.float64)
    is_wrong = array("q", (0,))
    job, _alive = _job(given)
    job[LOSSES], job[LSES] = loss.data_ptr(), lse.data_ptr()
    job[IS_WRONG] = is_wrong.buffer_info()[0]
    _run(_losses(logits.dtype), job, logits)
    if is_wrong[0]:
        check_targets(given)
    return loss, lse


def rows_gradient(given: Rows, lse: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write each row's gradient times its scale into `out`; see `reference`."""
    lse = lse.contiguous()
    job, _alive = _job(given)
    job[LSES], job[SCALES] = lse.data_ptr(), scale.data_ptr()
    job[SCALE_STRIDE] = scale.stride(0)
    job[GRADIENTS], job[NAN] = out.data_ptr(), _nan(out.dtype).data_ptr()
    job[GRADIENT_STRIDE] = out.stride(0) * out.element_size()
    _run(_gradients(given.logits.dtype, out.dtype), job, given.logits)


def _job(given: Rows) -> tuple[array[int], object]:
    """What both loops are given, and what must live as long as they run."""
    logits, target, weight, ignore_index, smoothing = given
    n, classes = logits.shape
    target = target.contiguous()
    if weight is None:
        weights, sums = _ones(classes)
        address, every = weights.buffer_info()[0], float(classes)
    else:
        sums = _sums(weight)
        address, every = weight.data_ptr(), sum(sums)
    numbers = array("d", (smoothing, every))
    job = array("q", [0]) * JOB_WORDS
    job[ROWS], job[CLASSES] = n, classes
    job[STRIDE] = logits.stride(0) * logits.element_size()
    job[ROWS_AT_ONCE] = max(1, _AT_ONCE // max(1, classes))
    job[LOGITS], job[TARGETS] = logits.data_ptr(), target.data_ptr()
    job[IGNORED] = ignore_index
    job[NUMBERS] = numbers.buffer_info()[0]
    job[WEIGHTS], job[WEIGHT_SUMS] = address, sums.buffer_info()[0]
    job[SMOOTHED] = 0 if smoothing <= 0 else 1 if weight is None else 2
    return job, (target, numbers, sums)


def _sums(weight: Tensor) -> array[float]:
    """The sum of each block of class weights."""
    starts = np.arange(0, len(weight), BLOCK)
    return array("d", np.add.reduceat(weight.double().numpy(), starts))


@functools.lru_cache(maxsize=4)
def _ones(classes: int) -> tuple[array[float], array[float]]:
    """Weights of 1, and the sum of each block of them."""
    sizes = (min(BLOCK, classes - start) for start in range(0, classes, BLOCK))
    return array("f", (1.0,)) * classes, array("d", sizes)


def _run(kernel: jit.Kernel, job: array[int], logits: Tensor) -> None:
    call = jit.alone if logits.numel() <= _ALONE else jit.parallel
    call(kernel.address, job.buffer_info()[0])


@functools.cache
def _nan(dtype: torch.dtype) -> Tensor:
    """One NaN, for those who need its pattern."""
    return torch.full((1,), torch.nan, dtype=dtype, device="cpu")


@functools.cache
def _losses(dtype: torch.dtype) -> jit.Kernel:
    bindings = {**_logits(dtype), **jit.elements(dtype, largest="largest")}
    return jit.kernel(sys.modules[__name__], bindings, "losses")


@functools.cache
def _gradients(dtype: torch.dtype, out: torch.dtype) -> jit.Kernel:
    bindings = {**_logits(dtype), **jit.elements(out, store="store_gradient", at="gradient_at")}
    if out is torch.bfloat16:
        bindings["store_gradient"] = f"{jit.CPU}:store_number_bf16"
    return jit.kernel(sys.modules[__name__], bindings, "gradients")


def _logits(dtype: torch.dtype) -> dict[str, str]:
    bindings = jit.elements(dtype, load="load_logit", at="logit_at")
    if dtype is torch.float32:
        bindings["load_logit"] = f"{jit.CPU}:load_quiet_fp32"
    return bindings


@expand
def add(logits: Pointer, lanes: Pointer, start: int, count: int, top: float, given: Constants) -> None:
    """Add `count` exponentials to as many lanes."""
    for lane in range(count):
        lanes[lane] = lanes[lane] + exp(f32(load_logit(logits, start + lane) - top), given)


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
    """The like, and add the weighted logits to other lanes."""
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
def sums_of_row(
    logits: Pointer, classes: int, smoothed: int, weights: Pointer, weight_sums: Pointer
) -> tuple[float, float, float]:
    """The largest logit, the sum of the exponentials relative to it, and the weighted sum of the logits.

    Args:
        logits: of the row.
        classes: how many.
        smoothed: 0 if the last sum is not wanted.
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
        else:
            for i in range(start, whole, LANES):
                add_weighted(logits, weights, lanes, sums, i, LANES, at, given)
            add_weighted(logits, weights, lanes, sums, whole, stop - whole, at, given)
            weighted += total(sums) + weight_sums[start // BLOCK] * f64(at)
        exponentials += total(lanes)
    return f64(top), exponentials, weighted


@inline
def store_loss(
    job: Pointer, i: int, logits: Pointer, top: float, exponentials: float, weighted: float
) -> None:
    """Store one row's loss and log-sum-exp."""
    target, classes = int64_at(job[TARGETS])[i], job[CLASSES]
    out, lses = float32_at(job[LOSSES]), float64_at(job[LSES])
    weights, smoothing = float32_at(job[WEIGHTS]), float64_at(job[NUMBERS])[0]
    log_sum = math.log(exponentials) + (top - top)  # the infinite is a NaN
    lses[i] = top + log_sum
    out[i] = _ZERO
    if target == job[IGNORED]:
        return
    if target < 0 or target >= classes:
        int64_at(job[IS_WRONG])[0] = 1
        return
    loss = f64(weights[target]) * (log_sum - (f64(load_logit(logits, target)) - top))
    if smoothing > 0:
        every = float64_at(job[NUMBERS])[1]
        loss = (1 - smoothing) * loss + smoothing / classes * (every * log_sum - (weighted - every * top))
    out[i] = f32(loss)


def losses(job: Pointer) -> None:
    """Take rows until none is left."""
    classes, smoothed = job[CLASSES], job[SMOOTHED]
    while True:
        start = take(job) * job[ROWS_AT_ONCE]
        if start >= job[ROWS]:
            break
        for i in range(start, min(start + job[ROWS_AT_ONCE], job[ROWS])):
            logits = logit_at(job[LOGITS] + i * job[STRIDE])
            top, exponentials, weighted = sums_of_row(
                logits, classes, smoothed, float32_at(job[WEIGHTS]), float64_at(job[WEIGHT_SUMS])
            )
            store_loss(job, i, logits, top, exponentials, weighted)


@loop
def plain(logits: Pointer, out: Pointer, classes: int, lse: float, factor: float, shift: float) -> None:
    """A row where each class has the same shift.

    The pointers may be one: each element is read before it is written, and no other is.
    """
    given = biased_constants()
    for i in range(classes):
        store_gradient(out, i, fma(exp(f32(load_logit(logits, i) - lse), given), factor, shift))


@loop
def weighted(
    logits: Pointer,
    out: Pointer,
    weights: Pointer,
    classes: int,
    lse: float,
    factor: float,
    shift: float,
) -> None:
    """A row where the shift goes with the class's weight."""
    given = biased_constants()
    for i in range(classes):
        off = f32(shift * f32(weights[i]))
        store_gradient(out, i, fma(exp(f32(load_logit(logits, i) - lse), given), factor, off))


@inline
def fill(out: Pointer, classes: int, value: float) -> None:
    """A row of one element; the pattern of a NaN comes from outside, for `store_gradient` may not round one."""
    for i in range(classes):
        out[i] = value


@inline
def extreme(
    logits: Pointer,
    out: Pointer,
    weights: Pointer,
    nan: float,
    classes: int,
    lse: float,
    factor: float,
    shift: float,
) -> None:
    """A row whose factor is a NaN, infinite, vast or tiny: in FP64, slowly."""
    for i in range(classes):
        value = f32(math.exp(f64(load_logit(logits, i)) - lse) * factor + shift * f64(weights[i]))
        if value != value:
            out[i] = nan
        else:
            store_gradient(out, i, value)


@inline
def gradient_of_row(job: Pointer, i: int) -> None:
    """One row."""
    classes, target = job[CLASSES], int64_at(job[TARGETS])[i]
    logits = logit_at(job[LOGITS] + i * job[STRIDE])
    out = gradient_at(job[GRADIENTS] + i * job[GRADIENT_STRIDE])
    weights, nan = float32_at(job[WEIGHTS]), gradient_at(job[NAN])[0]
    if target == job[IGNORED] or target < 0 or target >= classes:
        fill(out, classes, 0)
        return
    lse, scale = float64_at(job[LSES])[i], f64(float32_at(job[SCALES])[i * job[SCALE_STRIDE]])
    if not math.isfinite(lse):
        fill(out, classes, nan)
        return
    smoothing, every = float64_at(job[NUMBERS])[0], float64_at(job[NUMBERS])[1]
    at_target = (1 - smoothing) * f64(weights[target])
    shift = -scale * smoothing / classes if smoothing > 0 else 0.0
    factor = scale * (at_target + smoothing * every / classes)
    off = shift * f64(weights[target])
    x = f64(load_logit(logits, target))  # before it may be written
    correct = f32(math.exp(x - lse) * factor - scale * at_target + off)
    high = f32(lse)
    exact = factor * math.exp(f64(high) - lse) * _UNBIAS
    size = abs(factor)
    if not (_SMALLEST <= size <= _LARGEST or size == 0) or not math.isfinite(shift):
        extreme(logits, out, weights, nan, classes, lse, factor, shift)
    elif job[SMOOTHED] == 2:
        weighted(logits, out, weights, classes, high, f32(exact), f32(shift))
    else:
        plain(logits, out, classes, high, f32(exact), f32(shift))
    if correct != correct:
        out[target] = nan
    else:
        store_gradient(out, target, correct)


def gradients(job: Pointer) -> None:
    """Take rows until none is left."""
    while True:
        start = take(job) * job[ROWS_AT_ONCE]
        if start >= job[ROWS]:
            break
        for i in range(start, min(start + job[ROWS_AT_ONCE], job[ROWS])):
            gradient_of_row(job, i)
