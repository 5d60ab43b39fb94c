"""Losses and gradients of rows in Triton: one program per row for the loss, one per block for the gradient.

Exponentials are FP32; a row's sum, its logarithm and the target's gradient, where ``p - 1`` cancels, are FP64.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.pytorch.dtypes import FLOATS
from mezzo.pytorch.kernels import block
from mezzo.pytorch.kernels.cross_entropy.reference import Rows, check_targets

BLOCK = 4096  # classes that a program holds at once

OPTIONS: Mapping[str, Any] = MappingProxyType({"num_warps": 8, "enable_fp_fusion": True})
"""How the kernels are compiled."""


def rows_loss(given: Rows) -> tuple[Tensor, Tensor]:
    """The loss of each row in FP32, and its log-sum-exp in FP64; see `reference`."""
    check_targets(given)
    logits, target, weight, ignore_index, label_smoothing = given
    n, classes = logits.shape
    loss = logits.new_empty(n, dtype=torch.float32)
    lse = logits.new_empty(n, dtype=torch.float64)
    tensors = (_patterns(logits), target.contiguous(), loss if weight is None else weight, loss, lse)
    numbers = (classes, logits.stride(0), ignore_index, float(label_smoothing))
    if n:
        with torch.cuda.device_of(logits):
            losses_kernel[(n,)](*tensors, *numbers, **_constants(given))
    return loss, lse


def rows_gradient(given: Rows, lse: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write each row's gradient times its scale into `out`; see `reference`."""
    logits, target, weight, ignore_index, label_smoothing = given
    n, classes = logits.shape
    if not n:
        return
    weights = lse if weight is None else weight
    tensors = (_patterns(logits), target.contiguous(), lse.contiguous(), scale, weights, _patterns(out))
    strides = (logits.stride(0), out.stride(0), scale.stride(0))
    numbers = (classes, *strides, ignore_index, float(label_smoothing))
    with torch.cuda.device_of(logits):
        gradients_kernel[(n, triton.cdiv(classes, _block(classes)))](*tensors, *numbers, **_constants(given))


def _constants(given: Rows) -> dict[str, Any]:
    """What the kernels are compiled for."""
    logits, _, weight, _, label_smoothing = given
    made = {"DTYPE": FLOATS.index(logits.dtype), "BLOCK": _block(logits.shape[1])}
    return {**made, "SMOOTHED": label_smoothing > 0, "WEIGHTED": weight is not None, **OPTIONS}


def _patterns(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


def _block(classes: int) -> int:
    return min(BLOCK, int(triton.next_power_of_2(classes)))


@triton.jit(do_not_specialize=["ignored"])
def losses_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    weights: tl.tensor,
    losses: tl.tensor,
    lses: tl.tensor,
    classes: int,
    stride: int,
    ignored: int,
    smoothing: float,
    DTYPE: tl.constexpr,
    SMOOTHED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row's loss and log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    index = tl.arange(0, BLOCK)
    top = -float("inf")
    exponentials, every = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    for start in range(0, classes, BLOCK):
        is_class = index < classes - start
        x = block.decode_float(tl.load(logits + start + index, mask=is_class, other=0), DTYPE)
        here = tl.maximum(top, tl.max(tl.where(is_class, x, -float("inf")), axis=0))
        at = tl.where(here == -float("inf"), 0.0, here)  # -inf - -inf is a NaN
        old = tl.where(here == top, 0.0, top - at)  # likewise inf - inf; the sum is a NaN then anyway
        x -= at
        part = tl.sum(tl.where(is_class, tl.exp(x), 0.0), axis=0)
        exponentials = exponentials * tl.exp(old).to(tl.float64) + part
        top = here
        if SMOOTHED:
            count = tl.minimum(BLOCK, classes - start).to(tl.float64)
            every += tl.sum(tl.where(is_class, x, 0.0), axis=0).to(tl.float64) + count * at.to(tl.float64)
    peak = tl.where(top - top == 0, top, float("nan")).to(tl.float64)
    log_sum = tl.log(exponentials)
    tl.store(lses + row, peak + log_sum)
    target = tl.load(targets + row)
    counts = (target != ignored) & (target >= 0) & (target < classes)
    correct = block.decode_float(tl.load(logits + target, mask=counts, other=0), DTYPE).to(tl.float64)
    loss = log_sum - (correct - peak)
    if WEIGHTED:
        loss *= tl.load(weights + target, mask=counts, other=0).to(tl.float64)
    if SMOOTHED:
        of_all = classes * log_sum - (every - classes * peak)
        loss = (1 - smoothing) * loss + smoothing / classes * of_all
    tl.store(losses + row, tl.where(counts, loss, 0.0).to(tl.float32))


@triton.jit(do_not_specialize=["ignored"])
def gradients_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    lses: tl.tensor,
    scales: tl.tensor,
    weights: tl.tensor,
    gradients: tl.tensor,
    classes: int,
    stride: int,
    gradient_stride: int,
    scale_stride: int,
    ignored: int,
    smoothing: float,
    DTYPE: tl.constexpr,
    SMOOTHED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A block of one row's gradient. It reads only the logits at its own places, so it may replace them."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_class = column < classes
    target = tl.load(targets + row)
    counts = (target != ignored) & (target >= 0) & (target < classes)
    lse = tl.load(lses + row)
    scale = tl.load(scales + row * scale_stride).to(tl.float64)
    at_target = scale
    if SMOOTHED:
        at_target *= 1 - smoothing
    if WEIGHTED:
        at_target *= tl.load(weights + target, mask=counts, other=0).to(tl.float64)
    factor = at_target
    if SMOOTHED:
        factor += scale * smoothing
        shift = (-scale * smoothing / classes).to(tl.float32)
    lse = tl.where(lse - lse == 0, lse, float("nan"))
    high = lse.to(tl.float32)
    exact = (factor * tl.exp(high.to(tl.float64) - lse)).to(tl.float32)
    x = block.decode_float(tl.load(logits + row * stride + column, mask=is_class, other=0), DTYPE)
    value = tl.exp(x - high) * exact
    is_target = column == target
    own = tl.sum(tl.where(is_target, x, 0.0), axis=0).to(tl.float64)
    correct = tl.exp(own - lse) * factor - at_target
    value = tl.where(is_target, correct.to(tl.float32), value)
    if SMOOTHED:
        value += shift
    value = tl.where(counts, value, 0.0)
    to = gradients + row * gradient_stride + column
    if gradients.dtype.element_ty == tl.int16:
        tl.store(to, _bf16_pattern(value), mask=is_class)
    else:
        tl.store(to, value.to(gradients.dtype.element_ty), mask=is_class)


@triton.jit
def _bf16_pattern(value: tl.tensor) -> tl.tensor:
    """The nearest bf16's, ties to even: the interpreter's own conversion cuts."""
    pattern = value.to(tl.int32, bitcast=True)
    rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
    return tl.where(value != value, 0x7FC0, rounded).to(tl.int16)
