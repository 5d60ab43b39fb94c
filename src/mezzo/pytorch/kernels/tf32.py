"""TF32 on hardware that has none: factors of products are rounded to 10 bits of mantissa, the rest is FP32.

A tensor core reads 19 bits of each FP32 operand, multiplies exactly and sums in FP32. GPUs differ in the rounding by at
most one unit in the last of the 10 places. For backward the sources are kept and rounded again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.emulated import saving_low
from mezzo.pytorch.kernels.not_traced import not_traced
from mezzo.pytorch.kernels.packing import Reuse, Rounded, may_pack
from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.nested import changed
from mezzo.pytorch.rounding import straight_through

_CUT = 13  # bits of FP32's mantissa that TF32 lacks


def round_tf32(x: Tensor) -> Tensor:
    """FP32, bf16 or fp16 values as new FP32 ones with 10 bits of mantissa, as ``mezzo.formats.round(x, "tf32")``."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return x.to(torch.float32)
    if torch.is_grad_enabled() and x.requires_grad:
        return straight_through(x, _round)
    return _round(x)


def _round(x: Tensor) -> Tensor:
    x = x.detach()
    bits = x.view(torch.int32)
    # A carry moves to the next exponent by itself, to infinity and to the smallest normal too. A NaN may become
    # anything, so the result is multiplied by 1, or NaN where x is: a sixth of the time of `torch.where`.
    rounded = (bits >> _CUT).bitwise_and_(1).add_(bits).add_((1 << _CUT - 1) - 1).bitwise_and_(-(1 << _CUT))
    return rounded.view(torch.float32).mul_(x.clamp(1.0, 1.0))


class _Result(torch.autograd.Function):
    """Unchanged in forward; its gradient, a factor of two products, is rounded."""

    @staticmethod
    def forward(y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None: ...

    @staticmethod
    @not_traced
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return round_tf32(gradients[0])


class _InTF32(Rounded):
    """One factor: its source is kept for backward and rounded again there."""

    def __init__(self, source: Tensor) -> None:
        self.source = self.low = source.float()
        self.wide = _factor(self.source)
        self.reuse = Reuse(_round)


def product(op: Any) -> Callable[..., Any]:
    """The op on TF32 factors; addends (a bias, a mask, a recurrent layer's first state) keep their 24 bits."""
    names = [argument.name for argument in op._schema.arguments]
    addends = {"bias", "b_ih", "b_hh", "hx", "attn_mask"}
    if op._schema.name.removeprefix("aten::").removeprefix("_").startswith(("add", "badd")):
        addends.add("self")

    def in_tf32(*args: Any, **kwargs: Any) -> Any:
        factors: list[_InTF32] = []
        rounded = [_rounded(value, factors, name in addends) for name, value in zip(names, args)]
        named = {name: _rounded(value, factors, name in addends) for name, value in kwargs.items()}
        if not may_pack(factors):
            return changed(op(*rounded, **named), _handed_on)
        return changed(saving_low(op, rounded, named, factors, torch.float32), _handed_on)

    return in_tf32


def _rounded(value: Any, factors: list[_InTF32], is_addend: bool) -> Any:
    """The argument with its factors rounded, each added to `factors`, and its addends in FP32."""
    if isinstance(value, Tensor):
        if not value.is_floating_point() or value.dtype is torch.float64:
            return value
        if is_addend:
            return value.float()
        factors.append(_InTF32(value))
        return factors[-1].wide
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        # Among a recurrent layer's parameters the vectors are biases.
        is_vector = [isinstance(item, Tensor) and item.dim() == 1 for item in value]
        has_biases = not all(is_vector)
        return [
            _rounded(item, factors, is_addend or (has_biases and vector))
            for item, vector in zip(value, is_vector)
        ]
    return value


def _factor(x: Tensor) -> Tensor:
    if is_plain(x):
        return round_tf32(x)
    # `torch.func` cannot transform an autograd Function inside a kernel. A number's rounding error is exact, as is
    # their sum.
    change = (_round(x) - x.detach()).detach()
    return torch.where(x.isfinite(), x + change, x)


def _handed_on(result: Any) -> Any:
    if isinstance(result, Tensor) and result.is_floating_point() and result.requires_grad:
        if is_plain(result):
            return _Result.apply(result)  # type: ignore[no-untyped-call]
        result.register_hook(lambda grad: None if grad is None else round_tf32(grad))
    return result
