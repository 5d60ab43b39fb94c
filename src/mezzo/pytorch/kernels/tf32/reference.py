"""TF32 as PyTorch operations on FP32's bit patterns; see `mezzo.pytorch.kernels.tf32`."""

from __future__ import annotations

import torch
from torch import Tensor

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_QUIET = 0x7FC00000
_CUT = 13  # bits of FP32's mantissa that TF32 lacks


def round_tf32(x: Tensor) -> Tensor:
    """The nearest TF32 values, ties to even; see `tf32.round_tf32`."""
    bits = x.view(torch.int32)
    is_odd = (bits >> _CUT) & 1
    # A carry out of the mantissa moves to the next exponent by itself, from the largest to infinity, and from the
    # largest subnormal to the smallest normal.
    rounded = (bits + ((1 << _CUT - 1) - 1 + is_odd)) & -(1 << _CUT)
    is_nan = (bits & _MAGNITUDE) > _INFINITY
    return torch.where(is_nan, (bits & ~_MAGNITUDE) | _QUIET, rounded).view(torch.float32)
