"""layer_norm, and rms_norm as the same without a mean, as PyTorch operations: computed in FP32 and rounded once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Form(NamedTuple):
    """How rows are normalised.

    Args:
        columns: the elements of a row, at least 1.
        epsilon: added to the variance.
        is_centred: subtract the mean: layer_norm. Otherwise it is rms_norm, without a bias.
    """

    columns: int
    epsilon: float
    is_centred: bool


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, form: Form) -> tuple[Tensor, Tensor]:
    """The normalised rows, and their statistics for backward.

    Args:
        x: contiguous, fp16 or bf16, of which the last `form.columns` elements are a row.
        weight: FP32, contiguous, of a row's size; None for ones.
        bias: likewise; None for zeros.
        form: see `Form`.

    Returns:
        of `x`'s shape and dtype; FP32 [2, rows], the means and the reciprocals of the deviations, or [1, rows] without
        the means.
    """
    lines = x.view(-1, form.columns).float()
    mean, rstd = statistics(lines, form)
    out = (lines if mean is None else lines - mean) * rstd
    if weight is not None:
        out *= weight.view(-1)
    if bias is not None:
        out += bias.view(-1)
    return out.to(x.dtype).view_as(x), torch.cat([rstd] if mean is None else [mean, rstd], dim=1).t()


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    kept: Tensor,
    form: Form,
    wants_dx: bool,
    wants_sums: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx of `x`'s shape and dtype, dweight and dbias FP32 [columns]; what is not wanted may be None.

    Args:
        dy: the gradient of the output, of `x`'s shape and dtype, contiguous.
        x, weight, form: the arguments of `forward`.
        kept: the statistics that `forward` returned.
        wants_dx, wants_sums: whether the gradients of the input, and of the parameters, are wanted.
    """
    lines = x.view(-1, form.columns).float()
    mean = kept[0][:, None] if form.is_centred else None
    flat = None if weight is None else weight.view(-1)
    dx, dweight, dbias = gradients(dy.view(lines.shape).float(), lines, flat, mean, kept[-1][:, None])
    return dx.to(x.dtype).view_as(x) if wants_dx else None, dweight, dbias


def gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of FP32 rows [rows, columns], by differentiable operations."""
    h = (x if mean is None else x - mean) * rstd
    g = dy if weight is None else dy * weight
    centred = g if mean is None else g - g.mean(-1, keepdim=True)
    dx = rstd * (centred - h * (g * h).mean(-1, keepdim=True))
    return dx, (dy * h).sum(0), dy.sum(0)


def statistics(x: Tensor, form: Form) -> tuple[Tensor | None, Tensor]:
    """Mean and reciprocal deviation of FP32 rows, [rows, 1] each, by differentiable operations."""
    mean = x.mean(-1, keepdim=True) if form.is_centred else None
    distance = x if mean is None else x - mean
    return mean, distance.square().mean(-1, keepdim=True).add(form.epsilon).rsqrt()
