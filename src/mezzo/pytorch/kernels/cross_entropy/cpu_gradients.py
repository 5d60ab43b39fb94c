"""Rows' gradients: one pass that reads logits and writes gradients, from each row's log-sum-exp and scale.

With the row's own factors in FP64, an element is ``exp(x - lse) * factor + shift`` in FP32. The log-sum-exp's last
bits, which FP32 has no room for, are in the factor. The target's element is computed apart, in FP64: near
a probability of 1 what counts is ``p - 1``. A template: `specialise` writes it out with other functions in the lines
marked as bound.
"""

from __future__ import annotations

import math

from mezzo.pytorch.kernels.cross_entropy.cpu_exp import BIAS, biased_constants, exp
from mezzo.pytorch.kernels.cross_entropy.cpu_formats import load_bf16 as load_logit  # bound
from mezzo.pytorch.kernels.cross_entropy.cpu_formats import store_bf16 as store_gradient  # bound
from mezzo.pytorch.kernels.native import (
    Pointer,
    f32,
    f64,
    float32_at,
    float64_at,
    fma,
    inline,
    int64_at,
    loop,
    take,
)
from mezzo.pytorch.kernels.native import int16_at as gradient_at  # bound
from mezzo.pytorch.kernels.native import int16_at as logit_at  # bound

# What `main` is given. The numbers are the address of FP64s: the smoothing, and the sum of all weights.
(
    COUNTER,
    ROWS,
    CLASSES,
    STRIDE,
    ROWS_AT_ONCE,
    LOGITS,
    TARGETS,
    IGNORED,
    NUMBERS,
    WEIGHTS,
    LSES,
    SCALES,
    SCALE_STRIDE,
    GRADIENTS,
    GRADIENT_STRIDE,
    NAN,
    JOB_WORDS,
) = range(17)

_LARGEST, _SMALLEST = 2.0**40, 2.0**-60  # of the factors that `exp`'s bias leaves exact
_UNBIAS = 2.0**-BIAS
_ZERO = f32(0.0)


@loop
def plain(logits: Pointer, gradients: Pointer, classes: int, lse: float, factor: float, shift: float) -> None:
    """A row where each class has the same shift.

    The pointers may be one: each element is read before it is written, and no other is.
    """
    given = biased_constants()
    for i in range(classes):
        store_gradient(gradients, i, fma(exp(f32(load_logit(logits, i) - lse), given), factor, shift))


@loop
def weighted(
    logits: Pointer,
    gradients: Pointer,
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
        store_gradient(gradients, i, fma(exp(f32(load_logit(logits, i) - lse), given), factor, off))


@inline
def fill(gradients: Pointer, classes: int, value: float) -> None:
    """A row of one element; the pattern of a NaN comes from outside, for `store_gradient` may not round one."""
    for i in range(classes):
        gradients[i] = value


@inline
def extreme(
    logits: Pointer,
    gradients: Pointer,
    weights: Pointer,
    has_weights: bool,
    nan: float,
    classes: int,
    lse: float,
    factor: float,
    shift: float,
) -> None:
    """A row whose factor is a NaN, infinite, vast or tiny: in FP64, slowly."""
    for i in range(classes):
        off = shift * f64(weights[i]) if has_weights else shift
        value = f32(math.exp(f64(load_logit(logits, i)) - lse) * factor + off)
        if value != value:
            gradients[i] = nan
        else:
            store_gradient(gradients, i, value)


@inline
def row(job: Pointer, i: int) -> None:
    """One row."""
    classes, target = job[CLASSES], int64_at(job[TARGETS])[i]
    logits = logit_at(job[LOGITS] + i * job[STRIDE])
    gradients = gradient_at(job[GRADIENTS] + i * job[GRADIENT_STRIDE])
    weights, nan = float32_at(job[WEIGHTS]), gradient_at(job[NAN])[0]
    if target == job[IGNORED] or target < 0 or target >= classes:
        fill(gradients, classes, 0)
        return
    lse, scale = float64_at(job[LSES])[i], f64(float32_at(job[SCALES])[i * job[SCALE_STRIDE]])
    if not math.isfinite(lse):
        fill(gradients, classes, nan)
        return
    smoothing, every = float64_at(job[NUMBERS])[0], float64_at(job[NUMBERS])[1]
    at_target = (1 - smoothing) * (f64(weights[target]) if job[WEIGHTS] else 1.0)
    shift = -scale * smoothing / classes if smoothing > 0 else 0.0
    factor = scale * (at_target + smoothing * every / classes)
    off = shift * f64(weights[target]) if job[WEIGHTS] else shift
    x = f64(load_logit(logits, target))  # before it may be written
    correct = f32(math.exp(x - lse) * factor - scale * at_target + off)
    high = f32(lse)
    exact = factor * math.exp(f64(high) - lse) * _UNBIAS
    size = abs(factor)
    if not (_SMALLEST <= size <= _LARGEST or size == 0) or not math.isfinite(shift):
        has_weights = job[WEIGHTS] != 0 and smoothing > 0
        extreme(logits, gradients, weights, has_weights, nan, classes, lse, factor, shift)
    elif job[WEIGHTS] and smoothing > 0:
        weighted(logits, gradients, weights, classes, high, f32(exact), f32(shift))
    else:
        plain(logits, gradients, classes, high, f32(exact), f32(shift))
    if correct != correct:
        gradients[target] = nan
    else:
        store_gradient(gradients, target, correct)


def main(job: Pointer) -> None:
    """Take rows until none is left."""
    while True:
        start = take(job) * job[ROWS_AT_ONCE]
        if start >= job[ROWS]:
            break
        for i in range(start, min(start + job[ROWS_AT_ONCE], job[ROWS])):
            row(job, i)
