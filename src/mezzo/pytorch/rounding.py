"""Rounding a tensor's values to a format, ties to even: the array form of `mezzo.core.rounding`, on any
device.

It is written with integer operations on the tensor's own bit patterns, in the same order as its numpy twin,
so that the two can be read side by side; denormal-flushing modes of a device cannot reach it, and a float64
is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch

from mezzo.core.errors import UsageError
from mezzo.core.formats import FORMATS, Format
from mezzo.core.rounding import BitPlan, is_wider

# A tensor's values are held in one of these: dtype -> (the format it is, a signed integer of its width).
_HELD_IN: dict[torch.dtype, tuple[Format, torch.dtype]] = {
    torch.float32: (FORMATS["fp32"], torch.int32),
    torch.float64: (FORMATS["fp64"], torch.int64),
}
_SIGN = {torch.int32: -(1 << 31), torch.int64: -(1 << 63)}
_TO_FP32 = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_TO_FP64 = (torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32)


def round_tensor(x: torch.Tensor, form: Format, overflow: str) -> torch.Tensor:
    """The nearest values of the format, ties to even, for a tensor of any shape; the input is left as it was.

    See `mezzo.formats.round`, which this is for a tensor: float64 and integers come back in float64, others
    in float32. Under autograd it is differentiated as a cast is: the gradient passes unchanged, without
    being rounded.
    """
    values = held(x)
    storage, word = _HELD_IN[values.dtype]
    if is_wider(form, storage, overflow):
        return values.clone()
    plan = BitPlan.of(form, storage, overflow)
    if values.requires_grad:
        rounded: torch.Tensor = _Straight.apply(values, plan, word)  # type: ignore[no-untyped-call,unused-ignore]
        return rounded
    return _round(values, plan, word)


def _round(values: torch.Tensor, plan: BitPlan, word: torch.dtype) -> torch.Tensor:
    bits = values.view(word)
    magnitude = bits & plan.magnitude_mask
    rounded = magnitude
    if plan.shift:
        is_odd = (magnitude >> plan.shift) & 1
        rounded = (magnitude + (is_odd + plan.below_half)) & plan.kept_mask
    if plan.anchor:
        subnormal = (magnitude.view(values.dtype) + plan.anchor) - plan.anchor
        rounded = torch.where(magnitude < plan.smallest_normal, subnormal.view(word), rounded)
    rounded = torch.where(rounded > plan.largest, plan.beyond, rounded)
    rounded = torch.where(magnitude > plan.infinity, plan.nan, rounded)
    return (rounded | (bits & _SIGN[word])).view(values.dtype)


class _Straight(torch.autograd.Function):
    """Rounding in forward, nothing in backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: torch.Tensor, plan: BitPlan, word: torch.dtype) -> torch.Tensor:
        return _round(values, plan, word)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0], None, None


def held(x: torch.Tensor) -> torch.Tensor:
    """The tensor in float64 for float64 and integers, else in float32; always exactly.

    Raises:
        UsageError: a dtype that neither holds exactly, or a tensor that is not strided.
    """
    if x.layout is not torch.strided:
        raise UsageError(f"cannot round a tensor of layout {x.layout}: round its values() instead")
    if x.dtype in _HELD_IN:
        return x
    if x.dtype in _TO_FP32:
        return x.to(torch.float32)
    if x.dtype in _TO_FP64:
        return x.to(torch.float64)
    raise UsageError(f"cannot round a {x.dtype} tensor exactly: convert it to float64 or float32 first")
