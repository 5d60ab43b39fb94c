"""Exponent histograms as PyTorch operations: the specification of the compiled ones."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.core.ranges import BINS, NAN, ZERO

BLOCK = 1 << 20
"""Elements at a time, which bounds what is allocated: 16 bytes for each."""

_INFINITY = 0xFF << 23  # FP32's pattern of it


def count(elements: Tensor, row: Tensor) -> None:
    """Add the exponents of dense FP32, bf16 or fp16 elements to a row; see `exponents.count`."""
    elements = elements.as_strided((elements.numel(),), (1,))
    for start in range(0, elements.numel(), BLOCK):
        block = elements[start : start + BLOCK].to(torch.float32)
        pattern = block.view(torch.int32) & 0x7FFFFFFF
        index = pattern >> 23
        index = torch.where(pattern == 0, ZERO, torch.where(pattern > _INFINITY, NAN, index)).to(torch.int64)
        # torch.bincount would ask the device for the largest index, and wait.
        row[:BINS].scatter_add_(0, index, torch.ones_like(index))
        finite = torch.where(pattern < _INFINITY, pattern, 0).max()
        row[BINS] = torch.maximum(row[BINS], finite)
