"""`cross_entropy_loss` on 16-bit logits, with ATen's signature: FP32 inside, and no FP32 copy of the logits.

What autocast makes of it is an FP32 copy of the logits, an FP32 log-softmax that is saved for backward, its FP32
gradient, and that gradient's 16-bit copy: 14 bytes a logit at the peak. Here the 16-bit logits themselves are saved
with one number a row, their log-sum-exp; backward computes the gradient from both, in FP32, and rounds it once into a
new 16-bit tensor: 4 bytes a logit, logits included. The logits are never written.

Class probabilities as targets, and logits whose classes do not lie next to each other, are computed by blocks of a
bounded size. Under `torch.func`, forward-mode differentiation, in compilers, for tensor subclasses, where target or
weight need a gradient, where a second derivative is asked for, and for a few thousand logits, the same is made of
PyTorch operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.cross_entropy.layout import as_matrix, blocks, empty_like, put, take
from mezzo.pytorch.kernels.cross_entropy.rows import wide
from mezzo.pytorch.kernels.plain import is_plain

_PACKAGE = __package__
_HALVES = (torch.float16, torch.bfloat16)
_DEVICES = ("cpu", "cuda")
SMALL = 1 << 15
"""Logits of which FP32 copies weigh nothing, and PyTorch's operations are called sooner than ours."""

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
    kind = _Probabilities if target.is_floating_point() else _Classes
    result: Tensor = kind.apply(self, target, weight, settings)  # type: ignore[no-untyped-call,unused-ignore]
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
    reduction, ignore_index, label_smoothing = settings
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
    if target.is_floating_point():
        fits = target.dtype in (*_HALVES, torch.float32) and ignore_index < 0 and target.shape == logits.shape
    else:
        rows = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else ()
        fits = target.dtype in (torch.int64, torch.uint8) and target.shape == rows
    return fits


class _Classes(torch.autograd.Function):
    """Targets that are classes."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings
    ) -> Tensor:
        reduction, ignore_index, label_smoothing = settings
        flat = target.reshape(-1).long()
        kernel = backend.load(_PACKAGE, logits.device.type)
        given = (wide(weight), ignore_index, label_smoothing)
        matrix = as_matrix(logits)
        if matrix is not None:
            loss, lse = kernel.rows_loss(matrix, flat, *given)
        else:
            loss = logits.new_empty(flat.shape, dtype=torch.float32)
            lse = logits.new_empty(flat.shape, dtype=torch.float64)
            for block in blocks(logits):
                rows = block.rows
                loss[rows], lse[rows] = kernel.rows_loss(take(logits, block), flat[rows], *given)
        divisor = _weight_of(flat, given[0], ignore_index) if reduction == MEAN else None
        ctx.save_for_backward(logits, target, weight, lse, divisor)
        ctx.settings, ctx.kernel = settings, kernel
        return _reduced(loss, reduction, divisor, target.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, weight, lse, divisor = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(grads[0]):
            return _twice(logits, target, weight, ctx.settings, grads[0]), None, None, None
        _, ignore_index, label_smoothing = ctx.settings
        flat = target.reshape(-1).long()
        scale = _row_scale(grads[0], divisor, len(flat))
        given = (wide(weight), ignore_index, label_smoothing)
        gradient = empty_like(logits)
        matrix = as_matrix(logits)
        if matrix is not None:
            ctx.kernel.rows_gradient(matrix, flat, lse, scale, *given, as_matrix(gradient))
        else:
            for block in blocks(logits):
                rows = block.rows
                piece = take(logits, block)
                ctx.kernel.rows_gradient(piece, flat[rows], lse[rows], scale[rows], *given, piece)
                put(gradient, block, piece)
                del piece  # before the next is made
        return gradient, None, None, None


class _Probabilities(torch.autograd.Function):
    """Targets that are probabilities: FP32 blocks of a bounded size."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings
    ) -> Tensor:
        reduction, _, label_smoothing = settings
        shape = logits.shape[:1] + logits.shape[2:]
        loss = logits.new_empty(shape.numel(), dtype=torch.float32)
        for block in blocks(logits):
            wanted = _wanted(take(target, block), wide(weight), label_smoothing)
            loss[block.rows] = -(take(logits, block).float().log_softmax(1) * wanted).sum(1)
        divisor = logits.new_tensor(len(loss), dtype=torch.float32) if reduction == MEAN else None
        ctx.save_for_backward(logits, target, weight, divisor)
        ctx.settings = settings
        return _reduced(loss, reduction, divisor, shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, weight, divisor = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(grads[0]):
            return _twice(logits, target, weight, ctx.settings, grads[0]), None, None, None
        scale = _row_scale(grads[0], divisor, logits.numel() // logits.shape[1])
        gradient = empty_like(logits)
        for block in blocks(logits):
            wanted = _wanted(take(target, block), wide(weight), ctx.settings[2])
            p = take(logits, block).float().softmax(1)
            p.mul_(wanted.sum(1, keepdim=True)).sub_(wanted).mul_(scale[block.rows, None])
            put(gradient, block, p)
        return gradient, None, None, None


def _wanted(target: Tensor, weight: Tensor | None, label_smoothing: float) -> Tensor:
    """Smoothed probabilities times class weights, [n, C] in FP32."""
    wanted = target.float()
    if label_smoothing:
        wanted = wanted * (1 - label_smoothing) + label_smoothing / target.shape[1]
    return wanted if weight is None else wanted * weight


def _weight_of(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What the mean divides by: the number of rows that count, or the sum of their classes' weights."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum(dtype=torch.float32)
    return torch.where(counts, weight[target.masked_fill(~counts, 0)], 0.0).sum()


def _reduced(loss: Tensor, reduction: int, divisor: Tensor | None, shape: torch.Size) -> Tensor:
    if reduction == NONE:
        return loss.view(shape)
    total = loss.sum()
    return total if divisor is None else total / divisor


def _row_scale(grad: Tensor, divisor: Tensor | None, rows: int) -> Tensor:
    """What each row's gradient is multiplied by, FP32 [rows], perhaps one number for all."""
    if divisor is not None:
        grad = grad / divisor
    return grad.reshape(-1).expand(rows)


def _twice(logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings, grad: Tensor) -> Tensor:
    """A gradient that can be differentiated again, and one for each of a batch: of PyTorch operations, whose FP32
    intermediates are held.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        loss = _in_fp32(logits, target, weight, settings)
    (gradient,) = torch.autograd.grad(loss, logits, grad, create_graph=again)
    return gradient
