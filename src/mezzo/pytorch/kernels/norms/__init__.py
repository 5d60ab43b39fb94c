"""`layer_norm` and `rms_norm` with 16-bit input and output, FP32 inside, and parameters of FP32 or 16 bits.

PyTorch's `layer_norm` on a CPU sums the parameters' gradients in 16 bits (7 % off at 4,096 rows); its `rms_norm` saves
FP32 copies. Here sums are FP32, and the 16-bit input is saved. PyTorch's FP32 op between casts serves other calls.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mezzo.pytorch.dtypes import FLOATS, SIXTEEN_BITS
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.plain import differentiable_gradients, is_plain, wide_row

_EPSILON = torch.finfo(torch.float32).eps


class Form(NamedTuple):
    """The `shape` of a row, its number of `columns`, the `epsilon`, and whether the mean is subtracted (layer_norm)."""

    shape: tuple[int, ...]
    columns: int
    epsilon: float
    is_centred: bool


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Rows with mean 0 and variance 1, scaled and shifted; the signature and the errors of `torch.layer_norm`.

    Naive code::

        torch.layer_norm(input.float(), normalized_shape, weight.float(), bias.float(), eps).to(input.dtype)

    The parameters' gradients have their dtypes, and sums do not depend on the number of threads. FP32 and FP64 input
    goes to PyTorch's own op.
    """
    if input.dtype not in SIXTEEN_BITS:
        return torch.layer_norm(input, normalized_shape, weight, bias, eps, cudnn_enable)
    return _norm(input, weight, bias, _form(normalized_shape, eps, True))


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Rows with mean square 1, scaled, as `torch.rms_norm`; see `layer_norm`. `eps` is FP32's, also for 16-bit input.

    Naive code::

        torch.rms_norm(input.float(), normalized_shape, weight.float(), eps).to(input.dtype)
    """
    if input.dtype not in SIXTEEN_BITS:
        return torch.rms_norm(input, normalized_shape, weight, eps)
    return _norm(input, weight, None, _form(normalized_shape, _EPSILON if eps is None else eps, False))


def _form(normalized_shape: Sequence[int], epsilon: float, is_centred: bool) -> Form:
    shape = tuple(normalized_shape)
    return Form(shape, shape[0] if len(shape) == 1 else math.prod(shape), epsilon, is_centred)


def _norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, form: Form) -> Tensor:
    fits = _fits(input, weight, bias, form)
    kernel = backend.cpu_loops("norms.cpu", os.environ.get(backend.KERNELS)) if fits else None
    if kernel is None:
        return _naive(input, weight, bias, form)
    if torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        out: Tensor = _Normalised.apply(input, weight, bias, form, kernel)  # type: ignore[no-untyped-call,unused-ignore]
        return out
    found: Tensor = kernel.forward(input.contiguous(), wide_row(weight), wide_row(bias), form)[0]
    return found


def _fits(input: Tensor, weight: Tensor | None, bias: Tensor | None, form: Form) -> bool:
    """Whether these are plain tensors on a CPU that fit together, with rows of at least one element."""
    if not is_plain(input, weight, bias) or not input.is_cpu or input.layout is not torch.strided:
        return False
    shape = form.shape
    if not shape or not form.columns or input.shape[-len(shape) :] != shape:
        return False
    for parameter in (weight, bias):
        if parameter is not None and (
            parameter.shape != shape or parameter.dtype not in FLOATS or not parameter.is_cpu
        ):
            return False
    return True


def _naive(input: Tensor, weight: Tensor | None, bias: Tensor | None, form: Form) -> Tensor:
    """The definition; it also says what is wrong with the arguments."""
    weight, bias = (p.float() if p is not None and p.dtype in SIXTEEN_BITS else p for p in (weight, bias))
    if form.is_centred:
        return torch.layer_norm(input.float(), form.shape, weight, bias, form.epsilon).to(input.dtype)
    return torch.rms_norm(input.float(), form.shape, weight, form.epsilon).to(input.dtype)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, form: Form, kernel: ModuleType
    ) -> Tensor:
        ctx.row, ctx.form, ctx.kernel = wide_row(weight), form, kernel
        out: Tensor
        out, statistics = kernel.forward(x.contiguous(), ctx.row, wide_row(bias), form)
        ctx.save_for_backward(x, weight, bias, statistics)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight, bias, statistics = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled() or not is_plain(dy, x, weight):
            naive, needs = functools.partial(_naive, form=ctx.form), ctx.needs_input_grad[:3]
            return *differentiable_gradients(naive, [x, weight, bias], needs, dy), None, None
        given = (dy.contiguous(), x.contiguous(), ctx.row, statistics, ctx.form)
        dx, dweight, dbias = ctx.kernel.backward(*given, needs_x, needs_weight or needs_bias)
        dweight = _like(dweight, weight) if needs_weight else None
        dbias = _like(dbias, bias) if needs_bias else None
        return dx, dweight, dbias, None, None


def _like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A parameter's gradient in its own format and shape."""
    gradient = gradient if parameter.dtype is torch.float32 else gradient.to(parameter.dtype)
    return gradient if parameter.dim() == 1 else gradient.view(parameter.shape)
