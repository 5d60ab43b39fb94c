"""Cross entropy of rows of logits as PyTorch operations, in FP32 chunks of a bounded size: the specification.

With ``p = softmax(x)``, class weights ``w`` (1 where there are none), ``s`` the label smoothing, ``t`` the target and
``C`` classes, a row's loss and gradient are::

    lse  = log(sum_c(exp(x_c)))
    loss = (1 - s) * w_t * (lse - x_t) + s / C * sum_c(w_c * (lse - x_c))
    dx_c = ((1 - s) * w_t + s / C * sum(w)) * p_c - (1 - s) * w_t * (c == t) - s / C * w_c

The log-sum-exp is FP64, because a row whose logits are near fp16's largest would lose its loss in FP32's last bits:
there one ulp of `lse` is 2**-7.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 1 << 20
"""Elements that are FP32 at once."""


class Rows(NamedTuple):
    """Logits, and what makes losses of them.

    Args:
        logits: [n, classes], bf16, fp16 or FP32; classes next to each other in memory.
        target: int64 [n], each a class or `ignore_index`.
        weight: FP32 [classes], contiguous, or None for ones.
        ignore_index: rows with this target have a loss and a gradient of 0.
        label_smoothing: from 0 to 1.
    """

    logits: Tensor
    target: Tensor
    weight: Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0


@torch.no_grad()
def rows_loss(given: Rows) -> tuple[Tensor, Tensor]:
    """The loss of each row, FP32 [n], and its log-sum-exp, FP64 [n].

    The log-sum-exp of a row with a NaN, with +inf or with -inf alone is NaN, and its loss too; a single -inf is a class
    of probability 0.

    Raises:
        IndexError: a target is neither a class nor ignored (on a CPU; elsewhere the device's own assertion).
    """
    logits, target, weight, ignore_index, label_smoothing = given
    check_targets(given)
    loss = logits.new_empty(len(logits), dtype=torch.float32)
    lse = logits.new_empty(len(logits), dtype=torch.float64)
    for rows in chunks(*logits.shape):
        x = logits[rows].float()
        peak = x.amax(1, keepdim=True)
        x = x - peak  # exact enough: what is far below the peak hardly counts
        log_sum = x.exp().sum(1, dtype=torch.float64).log()
        lse[rows] = peak[:, 0].double() + log_sum
        index, is_ignored = _index(target[rows], ignore_index)
        of_target = log_sum - x.gather(1, index)[:, 0].double()
        if weight is not None:
            of_target = of_target * weight[index[:, 0]]
        if label_smoothing:
            if weight is None:
                of_all = x.shape[1] * log_sum - x.sum(1, dtype=torch.float64)
            else:
                of_all = weight.sum(dtype=torch.float64) * log_sum - (x * weight).sum(1, dtype=torch.float64)
            of_target = (1 - label_smoothing) * of_target + label_smoothing / x.shape[1] * of_all
        loss[rows] = of_target.masked_fill(is_ignored, 0.0).float()
    return loss, lse


@torch.no_grad()
def rows_gradient(given: Rows, lse: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write ``scale[i] * d loss[i] / d logits[i]`` into row i of `out`: FP32 arithmetic, rounded once.

    Args:
        given: as `rows_loss` had it.
        lse: what `rows_loss` gave, FP64 [n].
        scale: FP32 [n], of any stride.
        out: [n, classes], bf16, fp16 or FP32; it may be the logits themselves. What is too large becomes infinite.
    """
    logits, target, weight, ignore_index, label_smoothing = given
    classes = logits.shape[1]
    for rows in chunks(*logits.shape):
        p = _probabilities(logits[rows], lse[rows])
        index, is_ignored = _index(target[rows], ignore_index)
        at_target = torch.full_like(scale[rows], 1 - label_smoothing)
        if weight is not None:
            at_target *= weight[index[:, 0]]
        smooth = label_smoothing / classes
        every = at_target + smooth * (classes if weight is None else weight.sum())
        p *= every[:, None]
        p.scatter_add_(1, index, -at_target[:, None])
        if label_smoothing:
            p -= smooth if weight is None else smooth * weight
        p *= scale[rows, None]
        out[rows] = p.masked_fill_(is_ignored[:, None], 0.0).to(out.dtype)


def check_targets(given: Rows) -> None:
    """Raise PyTorch's IndexError where a target is neither a class nor ignored; without a host sync on a GPU."""
    target = given.target
    is_wrong = ((target < 0) | (target >= given.logits.shape[1])) & (target != given.ignore_index)
    if target.device.type != "cpu":
        torch._assert_async(~is_wrong.any(), "cross_entropy: a target is out of bounds")
    elif bool(is_wrong.any()):
        raise IndexError(f"Target {int(target[is_wrong][0])} is out of bounds.")


def chunks(rows: int, classes: int) -> Iterator[slice]:
    """Slices of rows that together have at most `CHUNK` elements, or one row."""
    step = max(1, CHUNK // max(1, classes))
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _probabilities(logits: Tensor, lse: Tensor) -> Tensor:
    """softmax in FP32; the log-sum-exp's own last bits are taken off first, where they are still exact."""
    high = lse.float()
    low = (lse - high).float()
    return (logits.float() - high[:, None]).sub_(low[:, None]).exp_()


def _index(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Targets as [n, 1] indices that exist, and which of them are ignored."""
    is_ignored = target == ignore_index
    return target.masked_fill(is_ignored, 0)[:, None], is_ignored
