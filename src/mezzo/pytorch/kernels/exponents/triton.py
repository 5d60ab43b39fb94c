"""Exponent histograms in Triton: each program counts a part of the elements, and adds its counts to the row.

The adds are atomic, but of integers: the row does not depend on their order.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.core.ranges import BINS
from mezzo.pytorch.kernels import block

PART = 1 << 15
"""Elements that one program counts."""

OPTIONS: Mapping[str, Any] = MappingProxyType({"num_warps": 8, "enable_fp_fusion": True})
"""How `count_kernel` is compiled; it has no multiplication that could be fused."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_PART, _BLOCK, _BINS = tl.constexpr(PART), tl.constexpr(2048), tl.constexpr(BINS)
_COUNTED = tl.constexpr(512)  # a power of two, as Triton wants it; what lies beyond the bins is thrown away


def count(elements: Tensor, row: Tensor) -> None:
    """Add the exponents of dense FP32, bf16 or fp16 elements to a row; see `exponents.count`."""
    total = elements.numel()
    with torch.cuda.device_of(elements):
        count_kernel[(triton.cdiv(total, PART),)](
            elements.data_ptr(),
            total,
            row,
            DTYPE=_DTYPES.index(elements.dtype),
            PLAIN=total % PART == 0 and elements.data_ptr() % 16 == 0,
            **OPTIONS,
        )


@triton.jit(do_not_specialize=["address", "total"])
def count_kernel(
    address: tl.tensor, total: tl.tensor, row: tl.tensor, DTYPE: tl.constexpr, PLAIN: tl.constexpr
) -> None:
    """One part's counts, and its largest; `PLAIN`: every part is whole, and vectors can be loaded."""
    index = tl.arange(0, _BLOCK)
    start = tl.program_id(0).to(tl.int64) * _PART
    counts = tl.zeros((_COUNTED,), tl.int32)
    largest = tl.zeros((_BLOCK,), tl.int32)
    for i in range(_PART // _BLOCK if PLAIN else tl.cdiv(tl.minimum(total - start, _PART), _BLOCK)):
        at = start + i * _BLOCK
        exists = index < total - at
        x = block.decode_float(block.load_float(address, (at, index, exists), DTYPE, PLAIN), DTYPE)
        pattern = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        field = tl.where(pattern == 0, 256, tl.where(pattern > 0x7F800000, 257, pattern >> 23))
        counts += tl.histogram(field if PLAIN else tl.where(exists, field, 511), _COUNTED)
        largest = tl.maximum(largest, tl.where(pattern < 0x7F800000, pattern, 0))
    words = tl.arange(0, _COUNTED)
    tl.atomic_add(row + words, counts.to(tl.int64), mask=(words < _BINS) & (counts > 0), sem="relaxed")
    tl.atomic_max(row + _BINS, tl.max(largest, axis=0).to(tl.int64), sem="relaxed")
