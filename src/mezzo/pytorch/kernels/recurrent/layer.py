"""One recurrent layer in one direction, with 16-bit factors and FP32 sums: where arguments are checked."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.core.errors import unknown_name
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.kernels.recurrent import reference
from mezzo.pytorch.kernels.recurrent.reference import GATES, Weights
from mezzo.pytorch.kernels.recurrent.saved import Layer, Settings

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
    if _is_ours(input, h0, c0, weights, batch_sizes):
        return _compiled(kind, input, h0, c0, weights, compute, hidden_fp32, reverse, batch_sizes)
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


def _is_ours(
    input: Tensor, h0: Tensor, c0: Tensor | None, weights: Weights, batch_sizes: Tensor | None
) -> bool:
    """Whether the compiled kernels may take these tensors whole."""
    return (
        is_plain(input, h0, c0, *weights, batch_sizes)
        and input.device.type == "cpu"
        and weights[4] is None
        and input.numel() > 0
        and h0.numel() > 0
        and backend.implementation("cpu") == "numba"
    )


def _compiled(
    kind: str,
    input: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Weights,
    compute: torch.dtype,
    hidden_fp32: bool,
    reverse: bool,
    batch_sizes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    from mezzo.pytorch.kernels.recurrent import cpu

    sizes = input.shape[1:2] * len(input) if batch_sizes is None else batch_sizes.tolist()
    settings = Settings(kind, compute, hidden_fp32, reverse, tuple(sizes), batch_sizes is not None)
    x = input.to(compute).reshape(-1, input.shape[-1]).contiguous()
    tensors = (x, h0, c0, *weights[:4])
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        out, h_n, *rest = Layer.apply(*tensors, settings)  # type: ignore[no-untyped-call,unused-ignore]
        c_n = rest[0] if rest else None
    else:
        out, h_n, c_n, _, _ = cpu.forward(settings, x, h0, c0, weights[:4], keeps=False)
    return (out if batch_sizes is not None else out.view(*input.shape[:2], -1)), h_n, c_n
