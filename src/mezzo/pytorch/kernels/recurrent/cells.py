"""Recurrent cells: one step of a layer, as scripts call it in a loop of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.recurrent.layer import layer
from mezzo.pytorch.kernels.recurrent.ops import _FORMATS, all_in, takes, whole
from mezzo.pytorch.kernels.recurrent.reference import GATES


def cell(
    kind: str,
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    *,
    compute: torch.dtype,
    hidden_fp32: bool,
) -> Any:
    """Run one cell; `mezzo.pytorch.kernels.recurrent` says what it gives."""
    states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    tensors = (input, *states, w_ih, w_hh, b_ih, b_hh)
    op = getattr(torch.ops.aten, f"{kind}_cell").default
    if not all_in(_FORMATS, tensors):
        return op(input, hx, w_ih, w_hh, b_ih, b_hh)
    if not takes(tensors) or not _fits(kind, input, states, w_ih, w_hh, b_ih, b_hh):
        return whole(op, [input, hx, w_ih, w_hh, b_ih, b_hh], 1, 0, compute, hidden_fp32)
    h, c = states if kind == "lstm" else (states[0], None)
    _, h, c = layer(
        kind,
        input.unsqueeze(0),
        h,
        c,
        (w_ih, w_hh, b_ih, b_hh, None),
        compute=compute,
        hidden_fp32=hidden_fp32,
    )
    return h if c is None else (h, c)


def _fits(
    kind: str,
    input: Tensor,
    states: tuple[Tensor, ...],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> bool:
    """Whether all shapes go together; where they don't, PyTorch's op says what is wrong."""
    if input.dim() != 2 or w_hh.dim() != 2 or not input.numel() or len(states) != (kind == "lstm") + 1:
        return False
    gates, width = w_hh.shape
    return (
        bool(width)
        and gates == GATES[kind] * width
        and w_ih.shape == (gates, input.shape[1])
        and all(state.shape == (input.shape[0], width) for state in states)
        and all(bias is None or bias.shape == (gates,) for bias in (b_ih, b_hh))
    )
