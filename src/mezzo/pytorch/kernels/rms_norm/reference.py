"""rms_norm as PyTorch operations: computed in FP32 and rounded once, a block of rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.pytorch.kernels.layer_norm.reference import blocks, widened

Wanted = tuple[bool, torch.dtype | None]


def forward(x: Tensor, weight: Tensor | None, columns: int, epsilon: float) -> tuple[Tensor, Tensor]:
    """The normalised rows, and what the backward needs of them.

    Args:
        x: contiguous, fp16 or bf16, of which the last `columns` elements are a row.
        weight: `columns` elements, FP32, fp16 or bf16, or None for ones.
        columns: at least 1.
        epsilon: added to the mean square.

    Returns:
        of `x`'s shape and dtype; FP32 [1, rows], the reciprocals of the root mean squares.
    """
    lines = x.view(-1, columns)
    out = torch.empty_like(lines)
    rstds = x.new_empty((1, len(lines)), dtype=torch.float32)
    weight = widened(weight)
    for block in blocks(*lines.shape):
        wide = lines[block].float()
        rstd = statistics(wide, epsilon)
        wide *= rstd
        out[block] = wide if weight is None else wide * weight
        rstds[0, block] = rstd[:, 0]
    return out.view_as(x), rstds


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, statistics: Tensor, columns: int, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients.

    Args:
        dy: the gradient of the output, of `x`'s shape and dtype, contiguous.
        x: as `forward` got it; so `weight`, `columns`.
        statistics: as `forward` gave them.
        wanted: whether dx is; dweight's dtype, None if it isn't wanted.

    Returns:
        dx of `x`'s shape and dtype; dweight [columns], summed in FP32 and rounded once.
    """
    wants_dx, weight_dtype = wanted
    x_lines, dy_lines = x.view(-1, columns), dy.view(-1, columns)
    dx = torch.empty_like(x_lines) if wants_dx else None
    dweight = x.new_zeros(columns, dtype=torch.float32)
    for block in blocks(*x_lines.shape):
        block_dx, block_dweight = gradients(
            dy_lines[block].float(), x_lines[block].float(), widened(weight), statistics[0, block, None]
        )
        if dx is not None:
            dx[block] = block_dx
        dweight += block_dweight
    return (
        None if dx is None else dx.view_as(x),
        None if weight_dtype is None else dweight.to(weight_dtype),
    )


def gradients(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dweight of FP32 rows [rows, columns], in terms that can be differentiated again."""
    h = x * rstd
    g = dy if weight is None else dy * weight
    return rstd * (g - h * (g * h).mean(-1, keepdim=True)), (dy * h).sum(0)


def statistics(x: Tensor, epsilon: float) -> Tensor:
    """Reciprocal root mean square of FP32 rows, [rows, 1], in terms that can be differentiated."""
    return x.square().mean(-1, keepdim=True).add(epsilon).rsqrt()
