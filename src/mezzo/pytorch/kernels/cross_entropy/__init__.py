"""`cross_entropy_loss` on 16-bit logits, with ATen's signature: FP32 inside, and no FP32 copy of the logits.

Autocast makes an FP32 copy of the logits, an FP32 log-softmax that is saved for backward, its FP32 gradient, and that
gradient's 16-bit copy: 14 bytes per logit at the peak. Here the 16-bit logits are saved with one number per row, their
log-sum-exp. Backward computes the gradient from both in FP32 and rounds it once into a new 16-bit tensor: 4 bytes per
logit, logits included.

PyTorch operations in FP32 serve targets that are probabilities, up to `SMALL` logits, `torch.func`, forward-mode
differentiation, compilers, tensor subclasses, a target or weight that needs a gradient, and second derivatives.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.cross_entropy import reference
from mezzo.pytorch.kernels.cross_entropy.reference import Rows
from mezzo.pytorch.kernels.plain import is_plain

__all__ = ["cross_entropy_loss"]

_HALVES = (torch.float16, torch.bfloat16)
_CLASSES, _WEIGHTS = (torch.int64, torch.uint8), (*_HALVES, torch.float32)
_DEVICES = ("cpu", "cuda")
SMALL = 1 << 15
"""Number of logits up to which PyTorch's operations are faster, and their FP32 copies small."""

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
        reduction: 0 for none, 1 for the mean weighted by class over rows that are not ignored, 2 for the sum.
        ignore_index: rows with this target are ignored.
        label_smoothing: from 0 to 1, the part of each target that is spread over all classes.

    Returns:
        FP32, a number or one per row, within FP32's rounding of PyTorch's FP32 loss. A row with a NaN, +inf, or only
        -inf has loss and gradient NaN, a class at -inf has probability 0; the mean over no row is NaN, its gradient 0.
        The gradient has the logits' dtype; beyond its range it is infinite.

    Raises:
        IndexError: a class out of range (on a GPU a device-side assertion, as PyTorch's).
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
    """The naive code, which also refuses wrong arguments."""
    target = target.float() if target.dtype in _HALVES else target
    weight = weight.float() if weight is not None and weight.dtype in _HALVES else weight
    return _aten(logits.float(), target, weight, settings)


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
        (weight, (classes,), _WEIGHTS),
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
    """The module whose `rows_loss` and `rows_gradient` serve these rows.

    Class weights together with label smoothing are rare: the reference serves them on every device.
    """
    if given.weight is not None and given.label_smoothing > 0:
        return reference
    return backend.load(__name__, device_type)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings
    ) -> Tensor:
        reduction = settings[0]
        given = Rows(_matrix(logits)[0], target.reshape(-1).long(), _wide(weight), *settings[1:])
        ctx.kernel = kernel_for(logits.device.type, given)
        loss: Tensor
        loss, lse = ctx.kernel.rows_loss(given)
        divisor = _weight_of(given) if reduction == MEAN else None
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
            return _twice(logits, target, weight, ctx.settings, grad), None, None, None
        matrix, is_copy = _matrix(logits)
        given = Rows(matrix, target.reshape(-1).long(), _wide(weight), *ctx.settings[1:])
        # The factor of each row's gradient, perhaps one number for all.
        scale = (grad if divisor is None else grad / divisor).reshape(-1).expand(len(lse))
        out = matrix if is_copy else matrix.new_empty(matrix.shape)
        ctx.kernel.rows_gradient(given, lse, scale, out)
        return out.view(logits.movedim(1, -1).shape).movedim(-1, 1), None, None, None


def _matrix(logits: Tensor) -> tuple[Tensor, bool]:
    """Logits ``[N, C, ...]`` as a matrix [n, C] whose classes are adjacent, and whether it is a copy.

    The rows of a view may lie apart, as in ``logits[:, :vocabulary]``.
    """
    classes = logits.shape[1]
    last = logits.movedim(1, -1)
    if logits.dim() == 2 and (classes == 1 or logits.stride(1) == 1):
        return logits, False
    if last.is_contiguous():
        return last.view(-1, classes), False
    return last.contiguous().view(-1, classes), True


def _weight_of(given: Rows) -> Tensor:
    """The divisor of the mean: the number of rows that are not ignored, or the sum of their classes' weights."""
    counts = given.target != given.ignore_index
    if given.weight is None:
        return counts.sum(dtype=torch.float32)
    return torch.where(counts, given.weight[given.target.masked_fill(~counts, 0)], 0.0).sum()


def _twice(logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings, grad: Tensor) -> Tensor:
    """A gradient by PyTorch operations, which can be differentiated again or batched."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        loss = _in_fp32(logits, target, weight, settings)
    (gradient,) = torch.autograd.grad(loss, logits, grad, create_graph=again)
    return gradient


def _wide(weight: Tensor | None) -> Tensor | None:
    """Class weights as the kernels take them: FP32 and contiguous."""
    return None if weight is None else weight.detach().float().contiguous()
