"""Rounding of tensors to a format: `mezzo.core.rounding` on any device, and under autograd.

Only integer operations touch the patterns of normal numbers: a device that flushes denormals gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mezzo.core import rounding
from mezzo.core.errors import UsageError
from mezzo.core.formats import FORMATS, Format
from mezzo.pytorch.kernels.not_traced import not_traced

_HELD_IN = {torch.float32: FORMATS["fp32"], torch.float64: FORMATS["fp64"]}
_TO_FP32 = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_TO_FP64 = (torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32)


def random_integers(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """What `RoundingPlan.round` takes to round an FP32 or FP64 tensor stochastically: the same run gives the same."""
    patterns = x.view(torch.int32 if x.dtype is torch.float32 else torch.int64)
    places = torch.arange(x.numel(), dtype=patterns.dtype, device=x.device).view(x.shape)
    result: torch.Tensor = rounding.random_integers(patterns, places, seed, 8 * x.itemsize)
    return result


def round_array(x: torch.Tensor, form: Format, overflow: str, seed: int | None = None) -> torch.Tensor:
    """`mezzo.formats.round` for a tensor of any shape; under autograd the gradient passes unchanged, as for a cast."""
    if x.layout is not torch.strided:
        raise UsageError(f"cannot round a tensor of layout {x.layout}. Round its values: x.values().")
    if x.dtype in _TO_FP32:
        x = x.to(torch.float32)
    elif x.dtype in _TO_FP64:
        x = x.to(torch.float64)
    elif x.dtype not in _HELD_IN:
        raise UsageError(
            f"cannot round a {x.dtype} tensor exactly. Convert it first: x.double() or x.float()."
        )
    plan = rounding.plan_of(form, _HELD_IN[x.dtype], overflow)
    if plan is None:
        return x.clone()

    def rounded(values: torch.Tensor) -> torch.Tensor:
        random = None if seed is None else random_integers(values, seed)
        result: torch.Tensor = plan.round(values, torch, random)
        return result

    return straight_through(x, rounded) if x.requires_grad else rounded(x)


def straight_through(x: torch.Tensor, cast: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``cast(x)``, whose gradient is x's, unchanged."""
    rounded: torch.Tensor = _StraightThrough.apply(x, cast)  # type: ignore[no-untyped-call,unused-ignore]
    return rounded


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(values: torch.Tensor, cast: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return cast(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None: ...

    @staticmethod
    @not_traced
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None
