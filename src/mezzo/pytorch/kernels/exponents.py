"""Exponent histograms of tensors, counted on their device: how often each FP32 exponent occurs.

Nothing waits for the device until the row of `WORDS` 64-bit integers is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.core.ranges import BINS, INFINITE, NAN, ZERO
from mezzo.pytorch.kernels.plain import is_dense

LARGEST = BINS
"""Index of the FP32 pattern of the largest finite magnitude. Patterns are ordered as their numbers."""
WORDS = BINS + 1  # length of a row: the bins of `mezzo.core.ranges`, and `LARGEST`

BLOCK = 1 << 18  # elements per block, which bounds the temporary memory: some 20 bytes for each

_INFINITY = 0xFF << 23  # its FP32 pattern


def count(tensor: Tensor, row: Tensor) -> None:
    """Add the exponents of a floating tensor of any strides to a row, int64 [WORDS] on its device.

    FP64 is rounded to FP32 first. Naive code::

        for x in tensor.flatten().float():
            pattern = abs(x).view(torch.int32)
            row[ZERO if x == 0 else NAN if x.isnan() else pattern >> 23] += 1
            row[LARGEST] = max(row[LARGEST], pattern if x.isfinite() else 0)
    """
    if not tensor.numel():
        return
    if not is_dense(tensor):
        tensor = tensor.contiguous()
    for block in tensor.as_strided((tensor.numel(),), (1,)).split(BLOCK):
        pattern = block.to(torch.float32).view(torch.int32) & 0x7FFFFFFF
        fields = pattern >> 23
        if row.device.type == "cpu":
            row[: INFINITE + 1] += torch.bincount(fields, minlength=INFINITE + 1)
        else:  # bincount would wait for the device
            row.scatter_add_(0, fields.long(), torch.ones_like(fields, dtype=torch.int64))
        for field, bin, special in ((0, ZERO, pattern == 0), (INFINITE, NAN, pattern > _INFINITY)):
            number = special.sum()
            row[field] -= number
            row[bin] += number
        finite = torch.where(pattern < _INFINITY, pattern, 0)
        row[LARGEST] = torch.maximum(row[LARGEST], finite.max())
