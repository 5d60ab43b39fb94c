"""Exponent histograms of tensors, counted where the tensors are: how often each FP32 exponent occurs in them.

A histogram is a row of `WORDS` 64-bit integers on the tensor's device, into which any number of tensors are added, and
nothing is read until somebody reads the row. On a CPU with Numba it is counted by `cpu_reductions.count`; `reference`
serves elsewhere and is the specification.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mezzo.core.ranges import BINS, NAN, ZERO
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.plain import is_dense

__all__ = ["LARGEST", "WORDS", "counter"]

LARGEST = BINS
"""Index in a row of the FP32 pattern of the largest finite magnitude: patterns are in the order of their numbers."""

WORDS = BINS + 1
"""Length of a row: the bins of `mezzo.core.ranges`, and `LARGEST`."""

BLOCK = 1 << 20
"""Elements that the reference takes at a time, which bounds what it allocates: 16 bytes for each."""

_INFINITY = 0xFF << 23  # FP32's pattern of it

# What the kernels read as it is. The 8-bit formats' numbers are all in fp16, which is half the bytes of FP32.
_READ = (torch.float32, torch.bfloat16, torch.float16)
_IN_FP16 = (torch.float8_e4m3fn, torch.float8_e5m2)


def counter(device_type: str) -> Callable[[Tensor, Tensor], None]:
    """The function ``count(tensor, row)`` for a type of device: add a tensor's exponents to a row.

    Naive code::

        for x in tensor.flatten().float():
            pattern = abs(x).view(torch.int32)
            row[256 if x == 0 else 257 if x.isnan() else pattern >> 23] += 1
            row[LARGEST] = max(row[LARGEST], pattern if x.isfinite() else 0)

    The tensor has a floating format, any shape and strides, and no history of autograd. FP64 is rounded to FP32 first,
    ties to even: what lies beyond its range counts as infinite or as zero. The row is int64, `WORDS` long, contiguous,
    on the tensor's device. The host does not wait for the device.
    """
    kernel = reference
    if backend.implementation(device_type) == "numba":
        from mezzo.pytorch.kernels import cpu_reductions

        kernel = cpu_reductions.count

    def count(tensor: Tensor, row: Tensor) -> None:
        if tensor.numel():
            kernel(_dense(tensor), row)

    return count


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy: in a format that the kernels read, and filling a stretch of memory."""
    if tensor.dtype not in _READ:
        tensor = tensor.to(torch.float16 if tensor.dtype in _IN_FP16 else torch.float32)
    return tensor if is_dense(tensor) else tensor.contiguous()


def reference(elements: Tensor, row: Tensor) -> None:
    """Add the exponents of dense FP32, bf16 or fp16 elements to a row, in PyTorch operations."""
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
