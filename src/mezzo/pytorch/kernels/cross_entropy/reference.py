"""Losses and gradients of rows of logits: PyTorch's FP32 operations on chunks of a bounded size, the specification.

With ``p = softmax(x)``, class weights ``w`` (default 1), label smoothing ``s``, target ``t`` and ``C`` classes::

    lse  = log(sum_c(exp(x_c)))
    loss = (1 - s) * w_t * (lse - x_t) + s / C * sum_c(w_c * (lse - x_c))
    dx_c = ((1 - s) * w_t + s / C * sum(w)) * p_c - (1 - s) * w_t * (c == t) - s / C * w_c

The log-sum-exp is FP64: near fp16's largest logit one ulp of an FP32 `lse` is 2**-7.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1 << 20  # elements that are FP32 at once


class Rows(NamedTuple):
    """Logits [n, classes] with adjacent classes, int64 targets [n], FP32 class weights [classes] or None for ones.

    Rows whose target is `ignore_index` have a loss and a gradient of 0; `label_smoothing` is from 0 to 1.
    """

    logits: Tensor
    target: Tensor
    weight: Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0


@torch.no_grad()
def rows_loss(given: Rows) -> tuple[Tensor, Tensor]:
    """The loss of each row, FP32 [n], and its log-sum-exp, FP64 [n]; IndexError for a target that is not a class."""
    check_targets(given)
    logits = given.logits
    loss = logits.new_empty(len(logits), dtype=torch.float32)
    lse = logits.new_empty(len(logits), dtype=torch.float64)
    for rows in _chunks(logits):
        x = logits[rows].float()
        loss[rows] = _losses(x, given, rows)
        peak = x.amax(1, keepdim=True)
        lse[rows] = peak[:, 0].double() + (x - peak).exp().sum(1, dtype=torch.float64).log()
    return loss, lse


@torch.no_grad()
def rows_gradient(given: Rows, lse: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write ``scale[i] * d loss[i] / d logits[i]`` into row i of `out`, which may be the logits: FP32, rounded once."""
    for rows in _chunks(given.logits):
        with torch.enable_grad():
            x = given.logits[rows].float().requires_grad_()
            losses = _losses(x, given, rows)
        (gradient,) = torch.autograd.grad(losses, x, scale[rows])
        is_ignored = given.target[rows] == given.ignore_index
        out[rows] = gradient.masked_fill_(is_ignored[:, None], 0.0).to(out.dtype)


def check_targets(given: Rows) -> None:
    """Raise PyTorch's IndexError where a target is neither a class nor ignored; without a host sync on a GPU."""
    target = given.target
    is_wrong = ((target < 0) | (target >= given.logits.shape[1])) & (target != given.ignore_index)
    if target.device.type != "cpu":
        torch._assert_async(~is_wrong.any(), "cross_entropy: a target is out of bounds")
    elif bool(is_wrong.any()):
        raise IndexError(f"Target {int(target[is_wrong][0])} is out of bounds.")


def _losses(x: Tensor, given: Rows, rows: slice) -> Tensor:
    _, target, weight, ignore_index, label_smoothing = given
    return F.cross_entropy(
        x, target[rows], weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of rows that together have at most `CHUNK` elements, or one row."""
    step = max(1, CHUNK // max(1, logits.shape[1]))
    for start in range(0, len(logits), step):
        yield slice(start, start + step)
