"""Exponent histograms of tensors, counted where the tensors are: how often each FP32 exponent occurs in them.

A histogram is a row of `WORDS` 64-bit integers on the tensor's device, into which any number of tensors are added, and
nothing is read until somebody reads the row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.core.ranges import BINS
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.plain import is_dense

__all__ = ["LARGEST", "WORDS", "count", "counter", "exponents"]

LARGEST = BINS
"""Index in a row of the FP32 pattern of the largest finite magnitude: patterns are in the order of their numbers."""

WORDS = BINS + 1
"""Length of a row: the bins of `mezzo.core.ranges`, and `LARGEST`."""

# What the kernels read as it is. The 8-bit formats' numbers are all in fp16, which is half the bytes of FP32.
_READ = (torch.float32, torch.bfloat16, torch.float16)
_IN_FP16 = (torch.float8_e4m3fn, torch.float8_e5m2)


def exponents(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """How often each exponent field occurs among a tensor's elements, as FP32 numbers.

    Naive code::

        for x in tensor.flatten().float():
            pattern = abs(x).view(torch.int32)
            out[256 if x == 0 else 257 if x.isnan() else pattern >> 23] += 1

    FP64 is rounded to FP32 first, ties to even: what lies beyond its range counts as infinite or as zero.

    Args:
        tensor: of a floating format, any shape and strides, on any device.
        out: int64, `BINS` long, contiguous, on the tensor's device: counted into. None: a new one.

    Returns:
        `out`, for `mezzo.core.ranges.Histogram.from_bins`. The host does not wait for it.

    Raises:
        UsageError: a tensor that is not floating, or not strided; an `out` of another length, dtype or device.
    """
    row = torch.zeros(WORDS, dtype=torch.int64, device=tensor.device)
    if out is not None:
        _check_row("out", out, BINS, tensor)
    count(tensor, row)
    return row[:BINS] if out is None else out.add_(row[:BINS])


def count(tensor: Tensor, row: Tensor) -> None:
    """Add a tensor's `exponents` to the first `BINS` words of a row, and raise `LARGEST` to what is in the tensor.

    No grad mode is switched for it: within autocast that would empty the cache of weights cast, and a weight used
    twice would have its gradients added in another format.

    Args:
        tensor: as for `exponents`.
        row: int64, `WORDS` long, contiguous, on the tensor's device.

    Raises:
        UsageError: as for `exponents`.
    """
    _check_row("row", row, WORDS, tensor)
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        raise UsageError(
            f"exponents(): a tensor of {tensor.dtype} and {tensor.layout}. Give a floating one, strided: the "
            "values of a sparse one, torch.view_as_real of a complex one."
        )
    counter(tensor.device.type)(tensor.detach(), row)


def counter(device_type: str) -> Callable[[Tensor, Tensor], None]:
    """`count` for a type of device, without its checks: for whoever counts many small tensors, of no autograd."""
    kernel = backend.load(__name__, device_type).count

    def unchecked(tensor: Tensor, row: Tensor) -> None:
        if tensor.numel():
            kernel(_dense(tensor), row)

    return unchecked


def _check_row(name: str, row: Tensor, length: int, tensor: Tensor) -> None:
    if (
        row.dtype is not torch.int64
        or row.shape != (length,)
        or not row.is_contiguous()
        or row.device != tensor.device
    ):
        raise UsageError(
            f"exponents(): {name} is {row.dtype} {list(row.shape)} on {row.device}. Give a contiguous torch.int64 "
            f"[{length}] on {tensor.device}."
        )


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy: in a format that the kernels read, and filling a stretch of memory."""
    if tensor.dtype not in _READ:
        tensor = tensor.to(torch.float16 if tensor.dtype in _IN_FP16 else torch.float32)
    return tensor if is_dense(tensor) else tensor.contiguous()
