"""TF32's rounding in Triton, in the order of `reference.py`; a GPU's own `cvt.rna.tf32` rounds ties away from zero."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1 << 11

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)


def round_tf32(x: Tensor) -> Tensor:
    """The nearest TF32 values, ties to even; see `tf32.round_tf32`."""
    out = torch.empty_like(x)
    if out.stride() != x.stride():  # the elements of x fill no stretch of memory
        x = torch.empty_like(x).copy_(x)
    if total := x.numel():
        with torch.cuda.device_of(x):
            round_kernel[(triton.cdiv(total, _BLOCK),)](x, out, total, BLOCK=_BLOCK)
    return out


@triton.jit
def round_kernel(x: tl.tensor, out: tl.tensor, total: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Round one block."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pattern = tl.load(x + at, mask=at < total, other=0).to(tl.int32, bitcast=True)
    near = (pattern + 0xFFF + ((pattern >> 13) & 1)) & -8192
    is_nan = (pattern & _MAGNITUDE) > _INFINITY
    rounded = tl.where(is_nan, (pattern & -2147483648) | 0x7FC00000, near)
    tl.store(out + at, rounded.to(tl.float32, bitcast=True), mask=at < total)
