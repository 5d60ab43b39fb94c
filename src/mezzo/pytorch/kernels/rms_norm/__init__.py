"""`rms_norm` with 16-bit input and output, FP32 inside, and a weight of FP32 or 16 bits.

PyTorch's own on a CPU is made of operations that save FP32 copies of a 16-bit input. Here what is saved for backward is
the input as it came, 16 bits an element, and one FP32 number a row; the weight's gradient is summed in FP32.

Under `torch.func`, in compilers, in forward-mode differentiation, and for tensor subclasses, the same is made of
casts around PyTorch's own op, which all of these know how to take apart.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.layer_norm import columns_of
from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.kernels.rms_norm import reference

__all__ = ["rms_norm"]

_HALVES = (torch.float16, torch.bfloat16)
_EPSILON = torch.finfo(torch.float32).eps


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Rows with mean square 1, scaled, as `torch.rms_norm` gives them.

    Naive code::

        torch.rms_norm(input.float(), normalized_shape, weight.float(), eps).to(input.dtype)

    The gradients are the naive code's as well, that of the weight in the weight's own dtype; its sum does not
    depend on the number of threads. A row with a NaN is NaN throughout; one with an infinity is 0, but
    NaN where it is infinite. A second derivative is computed by PyTorch operations in FP32.

    Args:
        input: [..., \\*normalized_shape], fp16 or bf16; of FP32 and FP64, PyTorch's own op takes care.
        normalized_shape: the sizes of the last dimensions, over which is normalised.
        weight: of that shape, FP32, fp16 or bf16; None for ones.
        eps: added to the mean square; None for FP32's own, 2^-23, which PyTorch takes for 16-bit input too.

    Returns:
        of the input's shape and dtype, whatever the weight's.

    Raises:
        RuntimeError: PyTorch's own, where the shapes don't fit.
    """
    if input.dtype not in _HALVES:
        return torch.rms_norm(input, normalized_shape, weight, eps)
    columns = columns_of(input, normalized_shape, weight)
    if not columns:
        if weight is not None and weight.dtype in _HALVES:
            weight = weight.float()
        return torch.rms_norm(input.float(), normalized_shape, weight, eps).to(input.dtype)
    epsilon = _EPSILON if eps is None else eps
    if torch.is_grad_enabled() and (input.requires_grad or (weight is not None and weight.requires_grad)):
        out: Tensor = _RMSNorm.apply(input, weight, columns, epsilon)  # type: ignore[no-untyped-call,unused-ignore]
        return out
    return _forward(input, weight, columns, epsilon)[1]


@functools.cache
def _kernel(device_type: str, forced: str | None) -> ModuleType:
    return backend.load(__name__, device_type)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, columns: int, epsilon: float) -> Tensor:
        kernel, out, statistics = _forward(x, weight, columns, epsilon)
        ctx.save_for_backward(x, weight, statistics)
        ctx.rest = kernel, columns, epsilon
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight, statistics = ctx.saved_tensors
        kernel, columns, epsilon = ctx.rest
        needs_x, needs_weight, _, _ = ctx.needs_input_grad
        wanted = needs_x, weight.dtype if needs_weight else None
        if torch.is_grad_enabled() or not is_plain(dy, x, weight):
            dx, dweight = _by_operations(dy, x, weight, columns, epsilon, wanted)
        else:
            flat = None if weight is None else weight.contiguous()
            dx, dweight = kernel.backward(dy.contiguous(), x.contiguous(), flat, statistics, columns, wanted)
        if dweight is not None and weight.dim() > 1:
            dweight = dweight.view(weight.shape)
        return dx, dweight, None, None


def _forward(
    x: Tensor, weight: Tensor | None, columns: int, epsilon: float
) -> tuple[ModuleType, Tensor, Tensor]:
    kernel = _kernel(x.device.type, os.environ.get(backend.KERNELS))
    flat = None if weight is None else weight.contiguous()
    out, statistics = kernel.forward(x.contiguous(), flat, columns, epsilon)
    return kernel, out, statistics


def _by_operations(
    dy: Tensor, x: Tensor, weight: Tensor | None, columns: int, epsilon: float, wanted: reference.Wanted
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of what has gradients itself, or belongs to a transform."""
    lines = x.reshape(-1, columns).float()
    flat = None if weight is None else weight.reshape(columns).float()
    dx, dweight = reference.gradients(
        dy.reshape(-1, columns).float(), lines, flat, reference.statistics(lines, epsilon)
    )
    wants_dx, weight_dtype = wanted
    return (
        dx.to(x.dtype).view(x.shape) if wants_dx else None,
        None if weight_dtype is None else dweight.to(weight_dtype),
    )
