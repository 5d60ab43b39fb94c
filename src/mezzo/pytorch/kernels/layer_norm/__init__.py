"""`layer_norm` with 16-bit input and output, FP32 inside, and parameters of FP32 or 16 bits.

PyTorch's own kernel on a CPU sums the parameters' gradients in sixteen bits (7 % off at 4,096 rows), and CUDA's refuses
FP32 parameters with 16-bit input. Here the statistics, the arithmetic and all sums are FP32. What is saved for backward
is the input as it came, 16 bits an element, and two FP32 numbers a row.

Under `torch.func`, in compilers, in forward-mode differentiation, and for tensor subclasses, the same is made of
casts around PyTorch's own op, which all of these know how to take apart.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.layer_norm import reference
from mezzo.pytorch.kernels.plain import is_plain

__all__ = ["columns_of", "layer_norm", "normalised", "widened"]

_HALVES = (torch.float16, torch.bfloat16)
_PARAMETERS = (torch.float32, torch.float16, torch.bfloat16)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Rows with mean 0 and variance 1, scaled and shifted, as `torch.layer_norm` gives them.

    Naive code::

        torch.layer_norm(input.float(), normalized_shape, weight.float(), bias.float(), eps).to(input.dtype)

    The gradients are the naive code's as well, those of the parameters in the parameters' own dtypes; sums do not
    depend on the number of threads. A row with a NaN or an infinity is NaN throughout. A second derivative
    is computed by PyTorch operations in FP32.

    Args:
        input: [..., \\*normalized_shape], fp16 or bf16; of FP32 and FP64, PyTorch's own op takes care.
        normalized_shape: the sizes of the last dimensions, over which is normalised.
        weight: of that shape, FP32, fp16 or bf16; None for ones.
        bias: likewise; None for zeros.
        eps: added to the variance.
        cudnn_enable: as in PyTorch's schema, where it does nothing.

    Returns:
        of the input's shape and dtype.

    Raises:
        RuntimeError: PyTorch's own, where the shapes don't fit.
    """
    if input.dtype not in _HALVES:
        return torch.layer_norm(input, normalized_shape, weight, bias, eps, cudnn_enable)
    columns = columns_of(input, normalized_shape, weight, bias)
    if not columns:
        wide, weight, bias = input.float(), widened(weight), widened(bias)
        return torch.layer_norm(wide, normalized_shape, weight, bias, eps).to(input.dtype)
    return normalised(input, weight, bias, columns, eps, True)


def normalised(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, columns: int, eps: float, is_centred: bool
) -> Tensor:
    """Rows of `columns` elements normalised, with gradients; without the mean and a bias it is `rms_norm`."""
    if torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        out: Tensor = _Normalised.apply(input, weight, bias, columns, eps, is_centred)  # type: ignore[no-untyped-call,unused-ignore]
        return out
    return _forward(input, weight, bias, columns, eps, is_centred)[1]


def columns_of(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None
) -> int:
    """The elements of a row, if a kernel of ours may take these tensors whole; else 0."""
    if not is_plain(input, weight, bias):
        return 0
    shape = tuple(normalized_shape)
    device, dims = input.device, len(shape)
    if not dims or tuple(input.shape[-dims:]) != shape:
        return 0
    for parameter in (weight, bias):
        if parameter is not None and (
            parameter.shape != shape or parameter.dtype not in _PARAMETERS or parameter.device != device
        ):
            return 0
    if input.layout is not torch.strided or device.type == "meta":
        return 0
    return shape[0] if dims == 1 else math.prod(shape)


@functools.cache
def _kernel(device_type: str, forced: str | None) -> ModuleType:
    return backend.load(__name__, device_type)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        columns: int,
        eps: float,
        is_centred: bool,
    ) -> Tensor:
        kernel, out, statistics = _forward(x, weight, bias, columns, eps, is_centred)
        ctx.save_for_backward(x, weight, statistics)
        ctx.rest = kernel, columns, eps, is_centred, bias if bias is None else (bias.dtype, bias.shape)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight, statistics = ctx.saved_tensors
        kernel, columns, eps, is_centred, bias = ctx.rest
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        wanted = needs_x, weight.dtype if needs_weight else None, bias[0] if needs_bias else None
        if torch.is_grad_enabled() or not is_plain(dy, x, weight):
            dx, dweight, dbias = _by_operations(dy, x, weight, columns, eps, wanted, is_centred)
        else:
            dx, dweight, dbias = kernel.backward(
                dy.contiguous(), x.contiguous(), _dense(weight), statistics, columns, wanted, is_centred
            )
        if dweight is not None and weight.dim() > 1:
            dweight = dweight.view(weight.shape)
        if dbias is not None and len(bias[1]) > 1:
            dbias = dbias.view(bias[1])
        return dx, dweight, dbias, None, None, None


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, columns: int, eps: float, is_centred: bool
) -> tuple[ModuleType, Tensor, Tensor]:
    kernel = _kernel(x.device.type, os.environ.get(backend.KERNELS))
    out, statistics = kernel.forward(x.contiguous(), _dense(weight), _dense(bias), columns, eps, is_centred)
    return kernel, out, statistics


def _by_operations(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    columns: int,
    eps: float,
    wanted: reference.Wanted,
    is_centred: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of what has gradients itself, or belongs to a transform."""
    lines = x.reshape(-1, columns).float()
    flat = None if weight is None else weight.reshape(columns).float()
    dx, dweight, dbias = reference.gradients(
        dy.reshape(-1, columns).float(), lines, flat, *reference.statistics(lines, eps, is_centred)
    )
    wants_dx, weight_dtype, bias_dtype = wanted
    return (
        dx.to(x.dtype).view(x.shape) if wants_dx else None,
        None if weight_dtype is None else dweight.to(weight_dtype),
        None if bias_dtype is None else dbias.to(bias_dtype),
    )


def _dense(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def widened(parameter: Tensor | None) -> Tensor | None:
    """A 16-bit parameter in FP32; others as they are."""
    return parameter.float() if parameter is not None and parameter.dtype in _HALVES else parameter
