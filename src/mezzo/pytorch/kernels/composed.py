"""Ops that PyTorch's own 16-bit kernels compute in FP32 if they are called in the right way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def instance_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Tensor:
    """``aten.instance_norm(input.float(), weight.float(), bias.float(), *rest).to(input.dtype)``.

    PyTorch's kernel for 16-bit inputs [N, C, ...] reads only FP32 parameters [C] correctly.
    """
    wide = [None if t is None else t.float() for t in (weight, bias)]
    out: Tensor = _aten.instance_norm(input, *wide, *rest)
    return out


def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``aten.softmax(input.float(), dim).to(input.dtype)``; backward keeps the rounded output.

    PyTorch's 16-bit kernel rounds its exponentials along every dimension but the last, so `dim` becomes the last one.
    """
    if dtype is not None or input.dim() == 0 or dim % input.dim() == input.dim() - 1:
        out: Tensor = _aten.softmax(input, dim, dtype)
    else:
        out = _aten.softmax(input.transpose(dim, -1).contiguous(), -1).transpose(dim, -1).contiguous()
    return out
