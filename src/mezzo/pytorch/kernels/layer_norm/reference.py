"""layer_norm, and rms_norm as the same without a mean, as PyTorch operations: computed in FP32 and rounded once.

It goes a block of rows at a time: no FP32 tensor is larger than a block, whatever the input. Its statistics and the
parameters' gradients are FP32.
"""

from __future__ import annotations

import torch
from torch import Tensor

Wanted = tuple[bool, torch.dtype | None, torch.dtype | None]

BLOCK = 1 << 20
"""Elements of a block of rows."""


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    columns: int,
    epsilon: float,
    is_centred: bool = True,
) -> tuple[Tensor, Tensor]:
    """The normalised rows, and what the backward needs of them.

    Args:
        x: contiguous, fp16 or bf16, of which the last `columns` elements are a row.
        weight: `columns` elements, FP32, fp16 or bf16, or None for ones.
        bias: likewise, or None for zeros.
        columns: at least 1.
        epsilon: added to the variance.
        is_centred: subtract the mean: layer_norm. Else it is rms_norm, without a bias.

    Returns:
        of `x`'s shape and dtype; FP32 [2, rows], the means and the reciprocals of the deviations; [1, rows] without
        the means.
    """
    lines = x.view(-1, columns)
    out = torch.empty_like(lines)
    kept = x.new_empty((2 if is_centred else 1, len(lines)), dtype=torch.float32)
    weight, bias = _row(weight), _row(bias)
    for block in _blocks(*lines.shape):
        wide = lines[block].float()
        if is_centred:
            wide, mean, rstd = torch.native_layer_norm(wide, (columns,), weight, bias, epsilon)
            out[block] = wide
            kept[0, block] = mean[:, 0]
        else:
            _, rstd = statistics(wide, epsilon, is_centred)
            wide *= rstd
            out[block] = wide if weight is None else wide * weight
        kept[-1, block] = rstd[:, 0]
    return out.view_as(x), kept


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    columns: int,
    wanted: Wanted,
    is_centred: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients.

    Args:
        dy: the gradient of the output, of `x`'s shape and dtype, contiguous.
        x: as `forward` got it; so `weight`, `columns`.
        statistics: as `forward` gave them.
        wanted: whether dx is; dweight's dtype and dbias's, None for what isn't wanted.
        is_centred: as for `forward`.

    Returns:
        dx of `x`'s shape and dtype; dweight and dbias [columns], summed in FP32 and rounded once.
    """
    wants_dx, weight_dtype, bias_dtype = wanted
    x_lines, dy_lines = x.view(-1, columns), dy.view(-1, columns)
    dx = torch.empty_like(x_lines) if wants_dx else None
    dweight, dbias = (x.new_zeros(columns, dtype=torch.float32) for _ in range(2))
    for block in _blocks(*x_lines.shape):
        mean = statistics[0, block, None] if is_centred else None
        rstd = statistics[-1, block, None]
        block_dx, block_dweight, block_dbias = gradients(
            dy_lines[block].float(), x_lines[block].float(), _row(weight), mean, rstd
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
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of FP32 rows [rows, columns], in terms that can be differentiated again."""
    h = (x if mean is None else x - mean) * rstd
    g = dy if weight is None else dy * weight
    centred = g if mean is None else g - g.mean(-1, keepdim=True)
    dx = rstd * (centred - h * (g * h).mean(-1, keepdim=True))
    return dx, (dy * h).sum(0), dy.sum(0)


def statistics(x: Tensor, epsilon: float, is_centred: bool) -> tuple[Tensor | None, Tensor]:
    """Mean and reciprocal deviation of FP32 rows, [rows, 1] each, in terms that can be differentiated."""
    mean = x.mean(-1, keepdim=True) if is_centred else None
    distance = x if mean is None else x - mean
    return mean, distance.square().mean(-1, keepdim=True).add(epsilon).rsqrt()


def _blocks(rows: int, columns: int) -> list[slice]:
    """All rows, in order, cut into blocks."""
    step = max(1, BLOCK // columns)
    return [slice(start, start + step) for start in range(0, rows, step)]


def _row(parameter: Tensor | None) -> Tensor | None:
    """A parameter in FP32, as one row."""
    return None if parameter is None else parameter.float().reshape(-1)
