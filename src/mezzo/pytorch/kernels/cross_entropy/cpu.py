"""Losses and gradients of rows on a CPU, each row by one thread, in a `jit` template.

A loss is one pass in blocks: exponentials relative to the largest logit so far are summed in 64 FP32 lanes, these in
FP64. A gradient is ``exp(x - lse) * factor + shift``; the target's is FP64, because ``p - 1`` cancels near p = 1.
"""

from __future__ import annotations

import functools
import math
import sys
from array import array

import torch
from torch import Tensor

from mezzo.pytorch.kernels import cpu, jit
from mezzo.pytorch.kernels.cpu import Constants, Pointer, expand, f32, f64, float32_at, inline, int64_at, loop
from mezzo.pytorch.kernels.cross_entropy.reference import Rows, check_targets

logit_at = cpu.int16_at  # bound
largest = cpu.largest_bf16  # bound
load_logit = cpu.load_quiet_bf16  # bound
IS_SMOOTHED = False  # bound
store = cpu.store_bf16  # bound
store_number = cpu.store_number_bf16  # bound

# The words of a job. SMOOTHING: address of an FP64. WEIGHTS: address of FP32s, or 0 for ones.
(
    COUNTER, ROWS, CLASSES, STRIDE, ROWS_AT_ONCE, LOGITS, TARGETS, IGNORED, SMOOTHING, WEIGHTS,
    LSES, LOSSES, IS_WRONG, SCALES, SCALE_STRIDE, GRADIENTS, GRADIENT_STRIDE, JOB_WORDS,
) = range(18)  # fmt: skip

BLOCK = 1024
LANES = cpu.LANES

_AT_ONCE = 1 << 13  # elements of the rows that a thread takes
_ALONE = 1 << 14  # elements below which one thread is as fast
_LARGEST, _SMALLEST = 2.0**40, 2.0**-60  # of the factors that `exp`'s bias leaves exact
_UNBIAS = 2.0**-cpu.EXP_BIAS
_LEAST = f32(-math.inf)
_ZERO = f32(0.0)
_NAN = f32(math.nan)


def rows_loss(given: Rows) -> tuple[Tensor, Tensor]:
    """The loss of each row in FP32, and its log-sum-exp in FP64; see `reference`."""
    logits = given.logits
    loss = logits.new_empty(len(logits), dtype=torch.float32)
    lse = logits.new_empty(len(logits), dtype=torch.float64)
    is_wrong = array("q", (0,))
    more = {LOSSES: loss.data_ptr(), LSES: lse.data_ptr(), IS_WRONG: is_wrong.buffer_info()[0]}
    _run("loss_of_row", given, more)
    if is_wrong[0]:
        check_targets(given)
    return loss, lse


def rows_gradient(given: Rows, lse: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write each row's gradient times its scale into `out`; see `reference`."""
    lse = lse.contiguous()
    more = {
        LSES: lse.data_ptr(),
        SCALES: scale.data_ptr(),
        SCALE_STRIDE: scale.stride(0),
        GRADIENTS: out.data_ptr(),
        GRADIENT_STRIDE: out.stride(0) * out.element_size(),
    }
    _run("gradient_of_row", given, more)


def _run(work: str, given: Rows, more: dict[int, int]) -> None:
    """Run one of the functions below on each of these rows; the job has some more words."""
    logits, target, weight, ignore_index, label_smoothing = given
    target = target.contiguous()
    smoothing = array("d", (label_smoothing,))
    n, classes = logits.shape
    job = array("q", [0]) * JOB_WORDS
    job[ROWS], job[CLASSES] = n, classes
    job[STRIDE] = logits.stride(0) * logits.element_size()
    job[ROWS_AT_ONCE] = max(1, _AT_ONCE // max(1, classes))
    job[LOGITS], job[TARGETS] = logits.data_ptr(), target.data_ptr()
    job[IGNORED], job[SMOOTHING] = ignore_index, smoothing.buffer_info()[0]
    job[WEIGHTS] = 0 if weight is None else weight.data_ptr()
    for word, value in more.items():
        job[word] = value
    call = jit.alone if logits.numel() <= _ALONE else jit.parallel
    call(_kernel(work, logits.dtype, label_smoothing > 0), job.buffer_info()[0])


@functools.cache
def _kernel(work: str, dtype: torch.dtype, is_smoothed: bool) -> int:
    same = {name: name for name in ("largest", "store", "store_number")}
    bindings = jit.elements(dtype, at="logit_at", load_quiet="load_logit", **same)
    bindings |= {"IS_SMOOTHED": str(is_smoothed), "work": work}
    return jit.kernel(sys.modules[__name__], bindings).address


@expand
def add(
    logits: Pointer, lanes: Pointer, sums: Pointer, start: int, count: int, top: float, given: Constants
) -> None:
    """Add `count` exponentials to as many lanes, and for smoothing the logits to other lanes."""
    for lane in range(count):
        x = f32(load_logit(logits, start + lane) - top)
        lanes[lane] = lanes[lane] + cpu.exp(x, given)
        if IS_SMOOTHED:
            sums[lane] = sums[lane] + x


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
def sums_of_row(logits: Pointer, classes: int) -> tuple[float, float, float]:
    """The largest logit, the sum of the exponentials relative to it, and for smoothing the sum of the logits."""
    lanes, sums = cpu.float32_scratch(LANES), cpu.float32_scratch(LANES)
    for lane in range(LANES):
        lanes[lane], sums[lane] = _ZERO, _ZERO
    given = cpu.constants()
    top, exponentials, every = _LEAST, f64(0), f64(0)
    for start in range(0, classes, BLOCK):
        stop = min(start + BLOCK, classes)
        here = largest(logits, start, stop)
        if not here <= top:  # or a NaN, which then is in the sum for good
            if start > 0:
                exponentials *= math.exp(f64(top) - f64(here))
            top = here
        at = _ZERO if top == _LEAST else top  # -inf - -inf is a NaN
        whole = stop - (stop - start) % LANES
        for i in range(start, whole, LANES):
            add(logits, lanes, sums, i, LANES, at, given)
        add(logits, lanes, sums, whole, stop - whole, at, given)
        exponentials += total(lanes)
        if IS_SMOOTHED:
            every += total(sums) + (stop - start) * f64(at)
    return f64(top), exponentials, every


@inline
def weight_of(job: Pointer, target: int) -> float:
    """The target's class weight."""
    return f64(float32_at(job[WEIGHTS])[target]) if job[WEIGHTS] != 0 else f64(1.0)


@inline
def loss_of_row(job: Pointer, i: int) -> None:
    """Store one row's loss and log-sum-exp."""
    target, classes = int64_at(job[TARGETS])[i], job[CLASSES]
    logits = logit_at(job[LOGITS] + i * job[STRIDE])
    top, exponentials, every = sums_of_row(logits, classes)
    out, lses = float32_at(job[LOSSES]), cpu.float64_at(job[LSES])
    log_sum = math.log(exponentials) + (top - top)  # the infinite is a NaN
    lses[i] = top + log_sum
    out[i] = _ZERO
    if target == job[IGNORED]:
        return
    if target < 0 or target >= classes:
        int64_at(job[IS_WRONG])[0] = 1
        return
    loss = weight_of(job, target) * (log_sum - (f64(load_logit(logits, target)) - top))
    if IS_SMOOTHED:
        smoothing = cpu.float64_at(job[SMOOTHING])[0]
        of_all = classes * log_sum - (every - classes * top)
        loss = (1 - smoothing) * loss + smoothing / classes * of_all
    out[i] = f32(loss)


@inline
def fill(out: Pointer, classes: int, value: float) -> None:
    """A row of one number."""
    for i in range(classes):
        store(out, i, value)


@loop
def usual(logits: Pointer, out: Pointer, classes: int, lse: float, factor: float, shift: float) -> None:
    """A row whose factors are of a usual size. The pointers may be equal: each element is read before it is written."""
    given = cpu.biased_constants()
    for i in range(classes):
        store_number(out, i, cpu.fma(cpu.exp(f32(load_logit(logits, i) - lse), given), factor, shift))


@inline
def extreme(logits: Pointer, out: Pointer, classes: int, lse: float, factor: float, shift: float) -> None:
    """A row whose factor is NaN, infinite, very large or tiny: in FP64, slowly."""
    for i in range(classes):
        store(out, i, f32(math.exp(f64(load_logit(logits, i)) - lse) * factor + shift))


@inline
def gradient_of_row(job: Pointer, i: int) -> None:
    """One row."""
    classes, target = job[CLASSES], int64_at(job[TARGETS])[i]
    logits = logit_at(job[LOGITS] + i * job[STRIDE])
    out = logit_at(job[GRADIENTS] + i * job[GRADIENT_STRIDE])
    if target == job[IGNORED] or target < 0 or target >= classes:
        fill(out, classes, _ZERO)
        return
    lse, scale = cpu.float64_at(job[LSES])[i], f64(float32_at(job[SCALES])[i * job[SCALE_STRIDE]])
    if not math.isfinite(lse):
        fill(out, classes, _NAN)
        return
    smoothing = cpu.float64_at(job[SMOOTHING])[0]
    at_target = (1 - smoothing) * weight_of(job, target)
    shift = -scale * smoothing / classes if IS_SMOOTHED else 0.0
    factor = scale * (at_target + smoothing)
    x = f64(load_logit(logits, target))  # before it may be written
    correct = f32(math.exp(x - lse) * factor - scale * at_target + shift)
    high = f32(lse)
    exact = factor * math.exp(f64(high) - lse) * _UNBIAS
    size = abs(factor)
    if (_SMALLEST <= size <= _LARGEST or size == 0) and math.isfinite(shift):
        usual(logits, out, classes, high, f32(exact), f32(shift))
    else:
        extreme(logits, out, classes, lse, factor, shift)
    store(out, target, correct)


work = loss_of_row  # bound


def main(job: Pointer) -> None:
    """Take rows until none is left."""
    cpu.share(job, job[ROWS], job[ROWS_AT_ONCE], work)
