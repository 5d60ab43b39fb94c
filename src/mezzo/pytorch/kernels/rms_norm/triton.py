"""rms_norm in Triton: layer_norm's kernels without a mean and a bias."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.pytorch.kernels.layer_norm import triton


def forward(x: Tensor, weight: Tensor | None, columns: int, epsilon: float) -> tuple[Tensor, Tensor]:
    """The normalised rows and their statistics; see `reference.forward`."""
    return triton.forward(x, weight, None, columns, epsilon, is_centred=False)


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    columns: int,
    wanted: tuple[bool, torch.dtype | None],
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dweight; see `reference.backward`."""
    dx, dweight, _ = triton.backward(dy, x, weight, statistics, columns, (*wanted, None), is_centred=False)
    return dx, dweight
