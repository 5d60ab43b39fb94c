"""`cross_entropy_loss` on 16-bit logits, with ATen's signature: FP32 inside, and no FP32 copy of the logits.

What autocast makes of it is an FP32 copy of the logits, an FP32 log-softmax that is saved for backward, its FP32
gradient, and that gradient's 16-bit copy: 14 bytes a logit at the peak. Here the 16-bit logits themselves are saved
with one number a row, their log-sum-exp; backward computes the gradient from both, in FP32, and rounds it once into a
new 16-bit tensor: 4 bytes a logit, logits included. The logits are never written.

Class probabilities as targets, and logits whose classes do not lie next to each other, are computed by blocks of a
bounded size. Under `torch.func`, forward-mode differentiation, in compilers, for tensor subclasses, where target or
weight need a gradient, where a second derivative is asked for, and for a few thousand logits, the same is made of
PyTorch operations.

Logits of any layout are matrices [n, classes] with classes next to each other, none large unless it is a view: a
matrix, and images whose channels come last in memory, are one view. Of others (``[N, C, d1, ...]``) a block at a
time is copied in 16 bits, so that what is held besides logits and gradient stays small.

`rows_loss` and `rows_gradient` are the same without autograd, for a layer that ends in this loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.plain import is_plain

__all__ = ["cross_entropy_loss", "rows_gradient", "rows_loss"]

_HALVES = (torch.float16, torch.bfloat16)
_LOGITS = (*_HALVES, torch.float32)
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
        kernel = backend.load(__name__, logits.device.type)
        given = (_wide(weight), ignore_index, label_smoothing)
        matrix = _as_matrix(logits)
        if matrix is not None:
            loss, lse = kernel.rows_loss(matrix, flat, *given)
        else:
            loss = logits.new_empty(flat.shape, dtype=torch.float32)
            lse = logits.new_empty(flat.shape, dtype=torch.float64)
            for block in _blocks(logits):
                rows = block.rows
                loss[rows], lse[rows] = kernel.rows_loss(_take(logits, block), flat[rows], *given)
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
        given = (_wide(weight), ignore_index, label_smoothing)
        gradient = _empty_like(logits)
        matrix = _as_matrix(logits)
        if matrix is not None:
            ctx.kernel.rows_gradient(matrix, flat, lse, scale, *given, _as_matrix(gradient))
        else:
            for block in _blocks(logits):
                rows = block.rows
                piece = _take(logits, block)
                ctx.kernel.rows_gradient(piece, flat[rows], lse[rows], scale[rows], *given, piece)
                _put(gradient, block, piece)
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
        for block in _blocks(logits):
            wanted = _wanted(_take(target, block), _wide(weight), label_smoothing)
            loss[block.rows] = -(_take(logits, block).float().log_softmax(1) * wanted).sum(1)
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
        gradient = _empty_like(logits)
        for block in _blocks(logits):
            wanted = _wanted(_take(target, block), _wide(weight), ctx.settings[2])
            p = _take(logits, block).float().softmax(1)
            p.mul_(wanted.sum(1, keepdim=True)).sub_(wanted).mul_(scale[block.rows, None])
            _put(gradient, block, p)
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
    kernel = backend.load(__name__, logits.device.type)
    loss, lse = kernel.rows_loss(logits, target, _wide(weight), ignore_index, label_smoothing)
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
    kernel = backend.load(__name__, logits.device.type)
    kernel.rows_gradient(
        logits, target, lse.double(), scale, _wide(weight), ignore_index, label_smoothing, out
    )


def _wide(weight: Tensor | None) -> Tensor | None:
    """Class weights as the kernels take them: FP32, one after the other."""
    return None if weight is None else weight.detach().float().contiguous()


def _check(matrix: Tensor) -> None:
    if matrix.dim() != 2 or matrix.dtype not in _LOGITS or (matrix.shape[1] > 1 and matrix.stride(1) != 1):
        raise UsageError(
            f"rows of logits: {matrix.dtype} {tuple(matrix.shape)} with strides {matrix.stride()}. Give a matrix "
            "[n, classes] of bf16, fp16 or FP32 whose classes are next to each other; contiguous() makes one."
        )


class _Block(NamedTuple):
    """A part of ``[N, C, places]``.

    Args:
        samples: of the first dimension.
        places: of the last.
        rows: the same among the N * places rows that a flattened target has.
    """

    samples: slice
    places: slice
    rows: slice


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


def _blocks(logits: Tensor) -> Iterator[_Block]:
    """Walk over all rows of ``[N, C, ...]``, in the order of a flattened target."""
    samples, classes = logits.shape[:2]
    places = logits.numel() // (samples * classes) if logits.numel() else 0
    if not places:
        return
    width = min(places, max(1, BLOCK // classes))
    depth = max(1, BLOCK // (classes * places))
    for first in range(0, samples, depth):
        last = min(first + depth, samples)
        for start in range(0, places, width):
            stop = min(start + width, places)
            rows = slice(first * places + start, (last - 1) * places + stop)
            yield _Block(slice(first, last), slice(start, stop), rows)


def _take(tensor: Tensor, block: _Block) -> Tensor:
    """A copy [n, C] of a block."""
    part = _part(tensor, block)
    return (
        part.contiguous().view(-1, part.shape[2]) if not part.is_contiguous() else part.flatten(0, 1).clone()
    )


def _put(tensor: Tensor, block: _Block, rows: Tensor) -> None:
    """Write a block's rows [n, C] to where `_take` has them from."""
    part = _part(tensor, block)
    part.copy_(rows.view(part.shape))


def _part(tensor: Tensor, block: _Block) -> Tensor:
    flat = tensor.flatten(2) if tensor.dim() > 2 else tensor[:, :, None]
    return flat[block.samples, :, block.places].transpose(1, 2)
