"""`cross_entropy_loss` on 16-bit logits, with ATen's signature: FP32 inside, and no FP32 copy of the logits.

Autocast makes an FP32 copy of the logits, an FP32 log-softmax that is saved for backward, its FP32 gradient, and that
gradient's 16-bit copy: 14 bytes a logit at the peak. Here the 16-bit logits themselves are saved with one number a row,
their log-sum-exp; backward computes the gradient from both, in FP32, and rounds it once into a new 16-bit tensor: 4
bytes a logit, logits included. The logits are never written.

PyTorch operations, in FP32, serve targets that are probabilities, a few thousand logits, `torch.func`, forward-mode
differentiation, compilers, tensor subclasses, a target or weight that needs a gradient, and second derivatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.cross_entropy.reference import Rows
from mezzo.pytorch.kernels.plain import is_plain

__all__ = ["cross_entropy_loss"]

_HALVES = (torch.float16, torch.bfloat16)
_DEVICES = ("cpu", "cuda")
SMALL = 1 << 15
"""Logits of which FP32 copies weigh nothing, and PyTorch's operations are called sooner than ours."""

BLOCK = 1 << 19
"""Elements that are copied at once: the copy is still in a cache when a kernel reads it."""

NONE, MEAN, SUM = 0, 1, 2  # ATen's numbers of the reductions

Settings = tuple[int, int, float]  # reduction, ignored class, label smoothing


def cross_entropy_loss(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of logits with classes or class probabilities; ATen's names and numbers.

    Naive code, which FP32 and FP64 logits get::

        aten.cross_entropy_loss(self.float(), target, weight.float(), reduction, ignore_index, label_smoothing)

    Args:
        self: logits, [C], [N, C] or [N, C, d1, ...].
        target: classes (int64 or uint8; [], [N] or [N, d1, ...]), or probabilities of the logits' shape.
        weight: of each class, [C], FP32 or 16 bits.
        reduction: 0 for none, 1 for the mean over the rows that count, by their classes' weight, 2 for the sum.
        ignore_index: a class whose rows count for nothing.
        label_smoothing: from 0 to 1, the part of each target that is spread over all classes.

    Returns:
        FP32: a number, or one for each row. It is within FP32's rounding of PyTorch's FP32 loss of the same logits. A
        row with a NaN, +inf, or nothing but -inf has loss and gradient NaN, a class at -inf has probability 0; the mean
        over no row is NaN, and its gradient 0. The gradient has the logits' dtype; what exceeds it is infinite.

    Raises:
        IndexError: a class that there is not (on a GPU a device-side assertion, as PyTorch's).
        RuntimeError: PyTorch's own, for shapes, dtypes and settings that it refuses.
    """
    settings = (reduction, ignore_index, label_smoothing)
    if self.dtype not in _HALVES:
        return _aten(self, target, weight, settings)
    if self.numel() <= SMALL or not _is_ours(self, target, weight, settings):
        return _in_fp32(self, target, weight, settings)
    if self.dim() == 1:
        loss = cross_entropy_loss(self[None], target[None], weight, *settings)
        return loss[0] if reduction == NONE else loss
    result: Tensor = _CrossEntropy.apply(self, target, weight, settings)  # type: ignore[no-untyped-call,unused-ignore]
    return result


def _aten(logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings) -> Tensor:
    loss: Tensor = torch.ops.aten.cross_entropy_loss(logits, target, weight, *settings)
    return loss


def _in_fp32(logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings) -> Tensor:
    """The naive code; whatever is wrong with the arguments, PyTorch says."""
    target = target.float() if target.dtype in _HALVES else target
    weight = weight.float() if weight is not None and weight.dtype in _HALVES else weight
    return _aten(logits.float(), target, weight, settings)


def _is_ours(logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings) -> bool:
    """Whether the arguments are valid, and what the kernels are for."""
    reduction, _, label_smoothing = settings
    if not is_plain(logits, target, weight) or logits.device.type not in _DEVICES:
        return False
    if logits.dim() == 0 or target.device != logits.device or target.requires_grad:
        return False
    classes = logits.shape[min(logits.dim() - 1, 1)]
    if classes == 0 or reduction not in (NONE, MEAN, SUM) or not 0 <= label_smoothing <= 1:
        return False
    if weight is not None and (
        weight.shape != (classes,)
        or weight.dtype not in (*_HALVES, torch.float32)
        or weight.device != logits.device
        or weight.requires_grad
    ):
        return False
    rows = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else ()
    return target.dtype in (torch.int64, torch.uint8) and target.shape == rows


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings
    ) -> Tensor:
        reduction = settings[0]
        kernel = backend.load(__name__, logits.device.type)
        given = Rows(logits, target.reshape(-1).long(), _wide(weight), *settings[1:])
        found = [
            kernel.rows_loss(given._replace(logits=piece, target=given.target[rows]))
            for rows, piece, _ in _pieces(logits)
        ]
        loss, lse = found[0] if len(found) == 1 else _joined(logits, found)
        divisor = _weight_of(given) if reduction == MEAN else None
        ctx.save_for_backward(logits, target, weight, lse, divisor)
        ctx.settings, ctx.kernel = settings, kernel
        if reduction == NONE:
            return loss.view(target.shape)
        return loss.sum() if divisor is None else loss.sum() / divisor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, weight, lse, divisor = ctx.saved_tensors
        (grad,) = grads
        if torch.is_grad_enabled() or not is_plain(grad):
            return _twice(logits, target, weight, ctx.settings, grad), None, None, None
        given = Rows(logits, target.reshape(-1).long(), _wide(weight), *ctx.settings[1:])
        # What each row's gradient is multiplied by, perhaps one number for all.
        scale = (grad if divisor is None else grad / divisor).reshape(-1).expand(len(lse))
        gradient = _empty_like(logits)
        for rows, piece, out in _pieces(logits, gradient):
            part = given._replace(logits=piece, target=given.target[rows])
            ctx.kernel.rows_gradient(part, lse[rows], scale[rows], out)
        return gradient, None, None, None


def _joined(logits: Tensor, found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exps of several pieces, or of none."""
    loss, lse = logits.new_empty(0, dtype=torch.float32), logits.new_empty(0, dtype=torch.float64)
    return torch.cat([loss, *(each[0] for each in found)]), torch.cat([lse, *(each[1] for each in found)])


def _weight_of(given: Rows) -> Tensor:
    """What the mean divides by: the number of rows that count, or the sum of their classes' weights."""
    counts = given.target != given.ignore_index
    if given.weight is None:
        return counts.sum(dtype=torch.float32)
    return torch.where(counts, given.weight[given.target.masked_fill(~counts, 0)], 0.0).sum()


def _twice(logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings, grad: Tensor) -> Tensor:
    """A gradient that can be differentiated again, and one for each of a batch: of PyTorch operations, whose FP32
    intermediates are held.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        loss = _in_fp32(logits, target, weight, settings)
    (gradient,) = torch.autograd.grad(loss, logits, grad, create_graph=again)
    return gradient


def _wide(weight: Tensor | None) -> Tensor | None:
    """Class weights as the kernels take them: FP32, one after the other."""
    return None if weight is None else weight.detach().float().contiguous()


def _as_matrix(tensor: Tensor) -> Tensor | None:
    """``[N, C, ...]`` as a view [n, C] with classes next to each other, or None where that is not possible.

    The rows of a matrix may lie apart, as in ``logits[:, :vocabulary]``.
    """
    classes = tensor.shape[1]
    if tensor.dim() > 2:
        last = tensor.movedim(1, -1)
        return last.view(-1, classes) if last.is_contiguous() else None
    return tensor if classes == 1 or tensor.stride(1) == 1 else None


def _empty_like(logits: Tensor) -> Tensor:
    """A gradient to be written: `_as_matrix` finds a view of it if it found one of the logits."""
    if logits.dim() > 2 and _as_matrix(logits) is not None:
        return logits.new_empty(logits.movedim(1, -1).shape).movedim(-1, 1)
    return logits.new_empty(logits.shape)


def _pieces(logits: Tensor, gradient: Tensor | None = None) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """All rows of ``[N, C, ...]`` as matrices [n, C] with classes next to each other: one view, or copies of blocks.

    Args:
        logits: to be read.
        gradient: what `_empty_like` gave, or None.

    Yields:
        which rows of a flattened target these are; their logits; where to write their gradient before the next piece
        is asked for.
    """
    matrix = _as_matrix(logits)
    if matrix is not None:
        out = matrix if gradient is None else _as_matrix(gradient)
        assert out is not None
        yield slice(None), matrix, out
        return
    last = logits.flatten(2).transpose(1, 2) if logits.dim() > 2 else logits[:, None]
    samples, places, classes = last.shape
    width = min(max(1, places), max(1, BLOCK // classes))
    depth = max(1, BLOCK // max(1, classes * places))
    buffer = logits.new_empty(min(samples, depth) * width * classes)
    for first in range(0, samples, depth):
        for start in range(0, places, width):
            block = slice(first, first + depth), slice(start, start + width)
            part = last[block]
            piece = buffer[: part.numel()].view(part.shape).copy_(part).view(-1, classes)
            row = first * places + start
            yield slice(row, row + len(piece)), piece, piece
            if gradient is not None:
                into = gradient.flatten(2).transpose(1, 2) if gradient.dim() > 2 else gradient[:, None]
                into[block].copy_(piece.view(part.shape))
