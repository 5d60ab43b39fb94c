"""layer_norm as PyTorch operations: computed in FP32 and rounded once, a block of rows at a time.

No FP32 tensor is larger than a block, whatever the input; its statistics and the parameters' gradients are FP32.
"""

from __future__ import annotations

import torch
from torch import Tensor

Wanted = tuple[bool, torch.dtype | None, torch.dtype | None]

BLOCK = 1 << 20
"""Elements of a block of rows."""


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, columns: int, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The normalised rows, and what the backward needs of them.

    Args:
        x: contiguous, fp16 or bf16, of which the last `columns` elements are a row.
        weight: `columns` elements, FP32, fp16 or bf16, or None for ones.
        bias: likewise, or None for zeros.
        columns: at least 1.
        epsilon: added to the variance.

    Returns:
        of `x`'s shape and dtype; FP32 [2, rows], the means and the reciprocals of the deviations.
    """
    lines = x.view(-1, columns)
    out = torch.empty_like(lines)
    statistics = x.new_empty((2, len(lines)), dtype=torch.float32)
    weight, bias = widened(weight), widened(bias)
    for block in blocks(*lines.shape):
        wide, mean, rstd = torch.native_layer_norm(lines[block].float(), (columns,), weight, bias, epsilon)
        out[block] = wide
        statistics[0, block] = mean[:, 0]
        statistics[1, block] = rstd[:, 0]
    return out.view_as(x), statistics


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, statistics: Tensor, columns: int, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients.

    Args:
        dy: the gradient of the output, of `x`'s shape and dtype, contiguous.
        x: as `forward` got it; so `weight`, `columns`.
        statistics: as `forward` gave them.
        wanted: whether dx is; dweight's dtype and dbias's, None for what isn't wanted.

    Returns:
        dx of `x`'s shape and dtype; dweight and dbias [columns], summed in FP32 and rounded once.
    """
    wants_dx, weight_dtype, bias_dtype = wanted
    x_lines, dy_lines = x.view(-1, columns), dy.view(-1, columns)
    dx = torch.empty_like(x_lines) if wants_dx else None
    dweight, dbias = (x.new_zeros(columns, dtype=torch.float32) for _ in range(2))
    for block in blocks(*x_lines.shape):
        mean, rstd = statistics[:, block, None]
        block_dx, block_dweight, block_dbias = gradients(
            dy_lines[block].float(), x_lines[block].float(), widened(weight), mean, rstd
        )
        if dx is not None:
            dx[block] = block_dx
        dweight += block_dweight
        dbias += block_dbias
    return (
        None if dx is None else dx.view_as(x),
        None if weight_dtype is None else dweight.to(weight_dtype),
        None if bias_dtype is None else dbias.to(bias_dtype),
    )


def gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of FP32 rows [rows, columns], in terms that can be differentiated again."""
    h = (x - mean) * rstd
    g = dy if weight is None else dy * weight
    dx = rstd * (g - g.mean(-1, keepdim=True) - h * (g * h).mean(-1, keepdim=True))
    return dx, (dy * h).sum(0), dy.sum(0)


def statistics(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal deviation of FP32 rows, [rows, 1] each, in terms that can be differentiated."""
    mean = x.mean(-1, keepdim=True)
    return mean, (x - mean).square().mean(-1, keepdim=True).add(epsilon).rsqrt()


def blocks(rows: int, columns: int) -> list[slice]:
    """All rows, in order, cut into blocks."""
    step = max(1, BLOCK // columns)
    return [slice(start, start + step) for start in range(0, rows, step)]


def widened(parameter: Tensor | None) -> Tensor | None:
    """A parameter in FP32, as one row."""
    return None if parameter is None else parameter.float().reshape(-1)
