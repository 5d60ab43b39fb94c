"""`cross_entropy_loss` on 16-bit logits, with ATen's signature: FP32 inside, and no FP32 copy of the logits.

Autocast needs 14 bytes per logit at its peak. Here 16-bit logits and one log-sum-exp per row are saved, and backward
rounds the FP32 gradient once: 4 bytes per logit. PyTorch's FP32 op serves what `_is_ours` and `SMALL` leave to it.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.dtypes import FLOATS, SIXTEEN_BITS
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.cross_entropy import reference
from mezzo.pytorch.kernels.cross_entropy.reference import Rows
from mezzo.pytorch.kernels.plain import differentiable_gradients, is_plain, wide_row

_aten = torch.ops.aten
_CLASSES = (torch.int64, torch.uint8)
_DEVICES = ("cpu", "cuda")
SMALL = 1 << 15  # number of logits up to which PyTorch's operations are faster, and their FP32 copies small

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
    """Cross entropy of logits with classes or class probabilities; ATen's names, numbers and errors.

    Naive code, which FP32 and FP64 logits get::

        aten.cross_entropy_loss(self.float(), target, weight.float(), reduction, ignore_index, label_smoothing)

    The loss is FP32. A row with a NaN, +inf, or only -inf has loss and gradient NaN; the mean over no row is NaN with
    gradient 0. The gradient has the logits' dtype; beyond its range it is infinite.
    """
    loss: Tensor
    settings = (reduction, ignore_index, label_smoothing)
    if self.dtype not in SIXTEEN_BITS:
        loss = _aten.cross_entropy_loss(self, target, weight, *settings)
        return loss
    if self.numel() <= SMALL or not _is_ours(self, target, weight, settings):
        return _in_fp32(self, target, weight, settings)
    if self.dim() == 1:
        loss = cross_entropy_loss(self[None], target[None], weight, *settings)
        return loss[0] if reduction == NONE else loss
    result: Tensor = _CrossEntropy.apply(self, target, weight, settings)  # type: ignore[no-untyped-call,unused-ignore]
    return result


def _in_fp32(logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings) -> Tensor:
    """The naive code, which also refuses wrong arguments."""
    target = target.float() if target.dtype in SIXTEEN_BITS else target
    weight = weight.float() if weight is not None and weight.dtype in SIXTEEN_BITS else weight
    loss: Tensor = _aten.cross_entropy_loss(logits.float(), target, weight, *settings)
    return loss


def _is_ours(logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings) -> bool:
    """Whether the arguments are valid, and the kernels serve them."""
    reduction, _, label_smoothing = settings
    device = logits.device
    if logits.dim() == 0 or device.type not in _DEVICES or not is_plain(logits, target, weight):
        return False
    classes = logits.shape[min(logits.dim() - 1, 1)]
    if not (classes and reduction in (NONE, MEAN, SUM) and 0 <= label_smoothing <= 1):
        return False
    for tensor, shape, dtypes in (
        (target, logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else (), _CLASSES),
        (weight, (classes,), FLOATS),
    ):
        if tensor is not None and (
            tensor.shape != shape
            or tensor.dtype not in dtypes
            or tensor.device != device
            or tensor.requires_grad
        ):
            return False
    return True


def kernel_for(device_type: str, given: Rows) -> ModuleType:
    """The module that serves these rows: the reference for class weights with label smoothing, which are rare."""
    if given.weight is not None and given.label_smoothing > 0:
        return reference
    return backend.load(__name__, device_type)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings
    ) -> Tensor:
        reduction = settings[0]
        given = Rows(_matrix(logits)[0], target.reshape(-1).long(), wide_row(weight), *settings[1:])
        ctx.kernel = kernel_for(logits.device.type, given)
        loss: Tensor
        loss, lse = ctx.kernel.rows_loss(given)
        divisor = divisor_of_mean(given) if reduction == MEAN else None
        ctx.save_for_backward(logits, target, weight, lse, divisor)
        ctx.settings = settings
        if reduction == NONE:
            return loss.view(target.shape)
        return loss.sum() if divisor is None else loss.sum() / divisor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, weight, lse, divisor = ctx.saved_tensors
        (grad,) = grads
        if torch.is_grad_enabled() or not is_plain(grad):
            naive = functools.partial(_in_fp32, target=target, weight=weight, settings=ctx.settings)
            return *differentiable_gradients(naive, [logits], [True], grad), None, None, None
        matrix, is_copy = _matrix(logits)
        given = Rows(matrix, target.reshape(-1).long(), wide_row(weight), *ctx.settings[1:])
        # The factor of each row's gradient, perhaps one number for all.
        scale = (grad if divisor is None else grad / divisor).reshape(-1).expand(len(lse))
        out = matrix if is_copy else matrix.new_empty(matrix.shape)
        ctx.kernel.rows_gradient(given, lse, scale, out)
        return out.view(logits.movedim(1, -1).shape).movedim(-1, 1), None, None, None


def _matrix(logits: Tensor) -> tuple[Tensor, bool]:
    """Logits [N, C, ...] as a matrix [n, C] with adjacent classes, rows perhaps apart; whether it is a copy."""
    classes = logits.shape[1]
    last = logits.movedim(1, -1)
    if logits.dim() == 2 and (classes == 1 or logits.stride(1) == 1):
        return logits, False
    if last.is_contiguous():
        return last.view(-1, classes), False
    return last.contiguous().view(-1, classes), True


def divisor_of_mean(given: Rows) -> Tensor:
    """The number of rows that are not ignored, or the sum of their classes' weights; targets may be out of bounds."""
    counts = given.target != given.ignore_index
    if given.weight is None:
        return counts.sum(dtype=torch.float32)
    return torch.where(counts, given.weight[given.target.clamp(0, len(given.weight) - 1)], 0.0).sum()
