"""TF32's rounding: FP32 with the 10 bits of mantissa that an Ampere's tensor cores multiply."""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.kernels.tf32 import reference

__all__ = ["round_tf32"]


def round_tf32(x: Tensor) -> Tensor:
    """FP32 values rounded to TF32's 10 bits of mantissa, ties to even, and held in FP32.

    Equals ``mezzo.formats.round(x, "tf32")``: -0 keeps its sign, subnormals are multiples of 2**-136, values from
    2**128 - 2**116 up become infinite, infinities stay, NaN is quiet and keeps its sign. Differentiated as a cast is:
    the gradient passes unchanged, unrounded.

    Args:
        x: FP32, any shape; bf16 and fp16 values are TF32 values already, and come back as FP32.

    Returns:
        FP32, a new tensor of x's shape.

    Raises:
        UsageError: other dtypes.
    """
    if x.dtype in (torch.bfloat16, torch.float16):
        return x.to(torch.float32)
    if x.dtype is not torch.float32:
        raise UsageError(f"round_tf32(): a {x.dtype} tensor. Use FP32, bf16 or fp16.")
    if torch.is_grad_enabled() and x.requires_grad:
        rounded: Tensor = _Straight.apply(x)  # type: ignore[no-untyped-call,unused-ignore]
        return rounded
    return _round(x)


def _round(x: Tensor) -> Tensor:
    """Round; by the reference where the tensor is a tracer's or a transform's, or has no memory."""
    is_ours = is_plain(x) and x.layout is torch.strided and x.device.type != "meta"
    kernel = _loaded(x.device.type, os.environ.get(backend.KERNELS)) if is_ours else reference
    rounded: Tensor = kernel.round_tf32(x.detach())
    return rounded


@functools.cache
def _loaded(device_type: str, forced: str | None) -> ModuleType:
    return backend.load(__name__, device_type)


class _Straight(torch.autograd.Function):
    """Rounding in forward, nothing in backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _round(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
