"""Ops whose FP32 arithmetic on 16-bit tensors is a matter of how PyTorch's own kernels are called.

`instance_norm` reads FP32 parameters rightly and 16-bit ones wrongly; `softmax` rounds its exponentials along every
dimension but the last. So each is the kernel that is right, called so that it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.plain import is_plain

_aten = torch.ops.aten


def instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """`aten.instance_norm` of a 16-bit input [N, C, ...] with its parameters [C] in FP32.

    Naive code::

        aten.instance_norm(input.float(), weight.float(), bias.float(), ...).to(input.dtype)

    Running statistics are updated in place, in their own format. NaN and infinities pass as in that code.
    """
    wide = [None if t is None else t.float() for t in (weight, bias)]
    statistics = (running_mean, running_var)
    out: Tensor = _aten.instance_norm(
        input, *wide, *statistics, use_input_stats, momentum, eps, cudnn_enabled
    )
    return out


def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """`aten.softmax` of a 16-bit input, computed in FP32 along any dimension and rounded once.

    Naive code::

        aten.softmax(input.float(), dim).to(input.dtype)

    Backward computes in FP32 from the rounded output, which is all that is kept. A `dtype` that the caller gives is
    respected. A row with NaN or +inf becomes NaN, -inf gives 0, a row of nothing but -inf NaN, as in that code.
    """
    if dtype is not None or input.dim() == 0 or dim % input.dim() == input.dim() - 1:
        out: Tensor = _aten.softmax(input, dim, dtype)
    elif is_plain(input):
        out = _Softmax.apply(input, dim)  # type: ignore[no-untyped-call,unused-ignore]
    else:
        out = _aten.softmax(input, dim, torch.float32).to(input.dtype)
    return out


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        out: Tensor = _aten.softmax(input, dim, torch.float32).to(input.dtype)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        wide, grad = out.float(), grads[0].float()
        return (wide * (grad - (wide * grad).sum(ctx.dim, keepdim=True))).to(out.dtype), None
