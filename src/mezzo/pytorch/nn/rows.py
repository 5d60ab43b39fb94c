"""Loss and gradient of a chunk of logits: class indices by the kernels, the rest by PyTorch operations.

The rest is FP64, which only tests and small models use, and targets that are probabilities, which are as large as
the logits themselves. With ``q = w * ((1 - s) * p + s / C)`` for targets `p`, class weights `w`, label smoothing
`s` and `C` classes, a row's loss is ``sum(q) * lse - sum(q * x)`` and its gradient ``sum(q) * softmax(x) - q``: an
index is a `p` with a single 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo.pytorch.kernels.cross_entropy import rows_gradient, rows_loss
from mezzo.pytorch.kernels.cross_entropy.reference import check_targets
from mezzo.pytorch.nn.options import Options

_PIECE = 1 << 20
"""Logits that are in FP32, with some temporaries of their size, at one time."""


def loss(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """The loss of each row and its log-sum-exp, FP32 (FP64 for FP64), [n] both.

    Args:
        logits: [n, classes], contiguous.
        target: int64 [n], or floating [n, classes].
        class_weight: [classes], in the format of the result.
        options: the reduction is not looked at.
    """
    if _is_kernels(logits, target):
        return rows_loss(logits, target, class_weight, options.ignore_index, options.label_smoothing)
    losses, lse = (logits.new_empty(len(logits), dtype=_wide(logits)) for _ in range(2))
    for rows in _pieces(logits):
        x = logits[rows].to(losses.dtype)
        q = _mass(target[rows], x, class_weight, options)
        lse[rows] = x.logsumexp(1)
        each = (lse[rows, None] - x).mul_(q)
        losses[rows] = each.masked_fill_(q == 0, 0.0).sum(1)  # what has no mass may be impossible
    return losses, lse


def gradient(
    logits: Tensor, target: Tensor, lse: Tensor, scale: Tensor, class_weight: Tensor | None, options: Options
) -> None:
    """Overwrite each row of logits by the gradient of its loss times its scale, which is of `lse`'s format."""
    if _is_kernels(logits, target):
        index, smoothing = options.ignore_index, options.label_smoothing
        rows_gradient(logits, target, lse, scale, class_weight, index, smoothing, logits)
        return
    for rows in _pieces(logits):
        x = logits[rows].to(lse.dtype)
        q = _mass(target[rows], x, class_weight, options)
        slope = (x - lse[rows, None]).exp_().mul_(q.sum(1, keepdim=True)).sub_(q).mul_(scale[rows, None])
        if not target.is_floating_point():
            slope.masked_fill_((target[rows] == options.ignore_index)[:, None], 0.0)
        logits[rows] = slope.to(logits.dtype)


def _is_kernels(logits: Tensor, target: Tensor) -> bool:
    return logits.dtype is not torch.float64 and not target.is_floating_point()


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


def _mass(target: Tensor, x: Tensor, class_weight: Tensor | None, options: Options) -> Tensor:
    """`q` of the module's docstring, in x's format; rows of zeros for ignored targets."""
    classes, smoothing = x.shape[1], options.label_smoothing
    if target.is_floating_point():
        mass = target.to(x.dtype)
    else:
        check_targets(target, classes, options.ignore_index)
        ignored = target == options.ignore_index
        mass = F.one_hot(target.masked_fill(ignored, 0), classes).to(x.dtype)
    if smoothing:
        mass = mass * (1.0 - smoothing) + smoothing / classes
    if class_weight is not None:
        mass = mass * class_weight
    return mass if target.is_floating_point() else mass.masked_fill(ignored[:, None], 0.0)


def _pieces(logits: Tensor) -> Iterator[slice]:
    step = max(1, _PIECE // max(1, logits.shape[1]))
    for start in range(0, len(logits), step):
        yield slice(start, start + step)
