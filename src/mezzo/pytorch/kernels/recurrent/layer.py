"""One recurrent layer in one direction, with 16-bit factors and FP32 sums: where arguments are checked."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.core.errors import unknown_name
from mezzo.pytorch.kernels.recurrent import reference
from mezzo.pytorch.kernels.recurrent.reference import GATES, Weights

__all__ = ["Weights", "layer"]


def layer(
    kind: str,
    input: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Weights,
    *,
    compute: torch.dtype,
    hidden_fp32: bool,
    reverse: bool = False,
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One layer."""
    if kind not in GATES:
        raise unknown_name("kind of recurrent layer", kind, GATES)
    if not len(input):
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    return reference.layer(
        kind,
        input,
        h0,
        c0,
        weights,
        compute=compute,
        hidden_fp32=hidden_fp32,
        reverse=reverse,
        batch_sizes=batch_sizes,
    )
