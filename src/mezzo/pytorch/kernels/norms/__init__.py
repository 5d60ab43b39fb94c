"""`layer_norm` and `rms_norm` with 16-bit input and output, FP32 inside, and parameters of FP32 or 16 bits.

PyTorch's `layer_norm` on a CPU sums the parameters' gradients in 16 bits (7 % off at 4,096 rows), and its `rms_norm`
saves FP32 copies of a 16-bit input. Here the statistics, the arithmetic and all sums are FP32. For backward the 16-bit
input itself is saved, and one FP32 number per row (`rms_norm`) or two. `torch.func`, compilers, forward-mode
differentiation and tensor subclasses get casts around PyTorch's own op.
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
from mezzo.pytorch.kernels.norms import reference
from mezzo.pytorch.kernels.norms.reference import Form
from mezzo.pytorch.kernels.plain import is_plain

__all__ = ["layer_norm", "rms_norm"]

_HALVES = (torch.float16, torch.bfloat16)
_PARAMETERS = (torch.float32, torch.float16, torch.bfloat16)
_EPSILON = torch.finfo(torch.float32).eps


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

    The gradients are the naive code's, those of the parameters in the parameters' dtypes; sums do not depend on the
    number of threads. A row with a NaN or an infinity is NaN. Second derivatives are PyTorch operations in FP32.

    Args:
        input: [..., \\*normalized_shape], fp16 or bf16; FP32 and FP64 go to PyTorch's own op.
        normalized_shape: the sizes of the last dimensions, which form a row.
        weight: of that shape, FP32, fp16 or bf16; None for ones.
        bias: likewise; None for zeros.
        eps: added to the variance.
        cudnn_enable: as in PyTorch's schema, without effect.

    Raises:
        RuntimeError: PyTorch's own, if the shapes don't fit.
    """
    if input.dtype not in _HALVES:
        return torch.layer_norm(input, normalized_shape, weight, bias, eps, cudnn_enable)
    columns = _columns(input, normalized_shape, weight, bias)
    if not columns:
        wide, weight, bias = input.float(), _widened(weight), _widened(bias)
        return torch.layer_norm(wide, normalized_shape, weight, bias, eps).to(input.dtype)
    return _normalised(input, weight, bias, Form(columns, eps, True))


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Rows with mean square 1, scaled, as `torch.rms_norm` gives them.

    Naive code::

        torch.rms_norm(input.float(), normalized_shape, weight.float(), eps).to(input.dtype)

    See `layer_norm` for the arguments and gradients. A row with a NaN is NaN; one with an infinity is 0, but NaN where
    it is infinite. `eps` is added to the mean square; None for FP32's, 2^-23, as PyTorch has it for 16-bit input too.
    """
    if input.dtype not in _HALVES:
        return torch.rms_norm(input, normalized_shape, weight, eps)
    columns = _columns(input, normalized_shape, weight, None)
    if not columns:
        return torch.rms_norm(input.float(), normalized_shape, _widened(weight), eps).to(input.dtype)
    return _normalised(input, weight, None, Form(columns, _EPSILON if eps is None else eps, False))


def _columns(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> int:
    """The elements of a row, if these are plain tensors that fit together; else 0."""
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


def _widened(parameter: Tensor | None) -> Tensor | None:
    """A 16-bit parameter in FP32; others as they are."""
    return parameter.float() if parameter is not None and parameter.dtype in _HALVES else parameter


def _normalised(input: Tensor, weight: Tensor | None, bias: Tensor | None, form: Form) -> Tensor:
    if torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        out: Tensor = _Normalised.apply(input, weight, bias, form)  # type: ignore[no-untyped-call,unused-ignore]
        return out
    kernel = _kernel(input.device.type, os.environ.get(backend.KERNELS))
    found: Tensor = kernel.forward(input.contiguous(), _row(weight), _row(bias), form)[0]
    return found


@functools.cache
def _kernel(device_type: str, forced: str | None) -> ModuleType:
    return backend.load(__name__, device_type)


def _row(parameter: Tensor | None) -> Tensor | None:
    """A parameter as the kernels take it: FP32, one element after the other."""
    if parameter is None:
        return None
    return (parameter if parameter.dtype is torch.float32 else parameter.float()).contiguous()


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, form: Form) -> Tensor:
        ctx.kernel = _kernel(x.device.type, os.environ.get(backend.KERNELS))
        ctx.row, ctx.form = _row(weight), form
        out: Tensor
        out, statistics = ctx.kernel.forward(x.contiguous(), ctx.row, _row(bias), form)
        ctx.save_for_backward(x, weight, statistics)
        ctx.of_weight, ctx.of_bias = (None if p is None else (p.dtype, p.shape) for p in (weight, bias))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight, statistics = ctx.saved_tensors
        form = ctx.form
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled() or not is_plain(dy, x, weight):
            # A second derivative, or a transform's tensors.
            lines = x.reshape(-1, form.columns).float()
            flat = None if weight is None else weight.reshape(form.columns).float()
            statistics = reference.statistics(lines, form)
            dx, dweight, dbias = reference.gradients(
                dy.reshape(lines.shape).float(), lines, flat, *statistics
            )
            dx = dx.to(x.dtype).view(x.shape)
        else:
            wants_sums = needs_weight or needs_bias
            dx, dweight, dbias = ctx.kernel.backward(
                dy.contiguous(), x.contiguous(), ctx.row, statistics, form, needs_x, wants_sums
            )
        return (
            dx if needs_x else None,
            _like(dweight, *ctx.of_weight) if needs_weight else None,
            _like(dbias, *ctx.of_bias) if needs_bias else None,
            None,
        )


def _like(gradient: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """A parameter's gradient in its own format and shape."""
    gradient = gradient if dtype is torch.float32 else gradient.to(dtype)
    return gradient if len(shape) == 1 else gradient.view(shape)
