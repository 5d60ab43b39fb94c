"""Losses and gradients of rows of logits, without autograd: what the loss, and a layer that ends in it, are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels import backend

_LOGITS = (torch.bfloat16, torch.float16, torch.float32)


def rows_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The loss of each row, and its log-sum-exp.

    Naive code::

        loss = F.cross_entropy(
            logits.float(), target, weight, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing
        )
        lse = logits.float().logsumexp(1)

    Args:
        logits: [n, classes], bf16, fp16 or FP32; classes next to each other in memory.
        target: int64 [n], each a class or `ignore_index`.
        weight: [classes], or None.
        ignore_index: rows with this target have a loss of 0.
        label_smoothing: from 0 to 1.

    Returns:
        FP32 [n], FP32 [n]. The log-sum-exp of a row with a NaN, with +inf or with -inf alone is NaN, and its loss too;
        a single -inf is a class of probability 0.

    Raises:
        IndexError: a target is neither; on a GPU it is an assertion of the device's, and nothing waits for it.
    """
    _check(logits)
    kernel = backend.load(__package__, logits.device.type)
    loss, lse = kernel.rows_loss(logits, target, wide(weight), ignore_index, label_smoothing)
    return loss, lse.float()


def rows_gradient(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    out: Tensor,
) -> None:
    """Write ``scale[i] * d loss[i] / d logits[i]`` into row i of `out`: FP32 arithmetic, rounded once.

    Args:
        logits: what `rows_loss` was given, and the same for `target`, `weight`, `ignore_index`, `label_smoothing`.
        target: likewise.
        lse: what `rows_loss` gave, [n].
        scale: FP32 [n].
        weight: likewise.
        ignore_index: rows with this target get zeros, whatever their scale.
        label_smoothing: likewise.
        out: [n, classes], bf16, fp16 or FP32; it may be `logits` itself. What is too large becomes infinite.
    """
    _check(logits)
    _check(out)
    kernel = backend.load(__package__, logits.device.type)
    kernel.rows_gradient(
        logits, target, lse.double(), scale, wide(weight), ignore_index, label_smoothing, out
    )


def wide(weight: Tensor | None) -> Tensor | None:
    """Class weights as the kernels take them: FP32, one after the other."""
    return None if weight is None else weight.detach().float().contiguous()


def _check(matrix: Tensor) -> None:
    if matrix.dim() != 2 or matrix.dtype not in _LOGITS or (matrix.shape[1] > 1 and matrix.stride(1) != 1):
        raise UsageError(
            f"rows of logits: {matrix.dtype} {tuple(matrix.shape)} with strides {matrix.stride()}. Give a matrix "
            "[n, classes] of bf16, fp16 or FP32 whose classes are next to each other; contiguous() makes one."
        )
