"""Exponent histograms on a CPU: each element is read once, on PyTorch's threads.

The exponents of 1,024 elements at a time are found in vector registers, zeros, NaN and the largest with them, and then
counted one by one: no vector instruction adds to memory at eight places of which two may be the same. Successive
elements count into eight histograms in turn, since most have the exponent of the one before, and a count that was just
stored can't be loaded again for some cycles. `torch.bincount` and what it needs before it take three times as long on
one thread, and have one.

The loops are a template: `jit` writes this file out with other functions in the lines marked as bound.
"""

from __future__ import annotations

import sys
from ctypes import addressof, c_int64

import numpy as np
import torch
from torch import Tensor

from mezzo.core.ranges import BINS
from mezzo.pytorch.kernels import jit
from mezzo.pytorch.kernels.cpu import (
    Pointer,
    bits,
    i32,
    int64_at,
    loop,
    take,
    u32,
    uint32_scratch,
)
from mezzo.pytorch.kernels.cpu import int16_at as x_at  # bound
from mezzo.pytorch.kernels.cpu import load_bf16 as load_x  # bound

# What `main` is given. SLOT counts the threads that have come: each has a part of its own. JOB is the job's address.
COUNTER, SLOT, TOTAL, X, PARTS, JOB, JOB_WORDS = range(7)

PART = 264  # words of a part, of which the first 259 are used: no two threads write to one line of memory
BLOCK = 1 << 16
TILE = 1 << 10
LANES = 8
FIELDS = 256

_INFINITE, _ZERO, _NAN, _LARGEST = 255, 256, 257, 258

ALONE = 1 << 15
"""Elements up to which one thread is done before a second has begun."""

_Job = c_int64 * JOB_WORDS


def count(elements: Tensor, row: Tensor) -> None:
    """Count into the row, or with several threads into a part for each first; see `exponents.count`."""
    total = elements.numel()
    kernel = jit.kernel(sys.modules[__name__], jit.elements(elements.dtype, load="load_x", at="x_at"))
    if total <= ALONE:
        job = _Job(0, 0, total, elements.data_ptr(), row.data_ptr(), 0)
        job[JOB] = addressof(job)
        jit.alone(kernel.address, addressof(job))
        return
    parts = np.zeros((torch.get_num_threads(), PART), np.int64)
    job = _Job(0, 0, total, elements.data_ptr(), parts.ctypes.data, 0)
    job[JOB] = addressof(job)
    jit.parallel(kernel.address, addressof(job))
    into = row.numpy()
    into[:BINS] += parts[:, :BINS].sum(axis=0)
    into[BINS] = max(into[BINS], parts[:, BINS].max())


@loop
def block(x: Pointer, part: Pointer, start: int, stop: int) -> None:
    """Add one block's exponents to a thread's part."""
    counts, index = uint32_scratch(2048), uint32_scratch(1024)
    for i in range(LANES * FIELDS):
        counts[i] = u32(0)
    zeros = nans = 0
    largest = i32(0)
    for tile in range(start, stop, TILE):
        size = min(TILE, stop - tile)
        tile_zeros = tile_nans = i32(0)
        for i in range(size):
            pattern = i32(bits(load_x(x, tile + i)) & 0x7FFFFFFF)
            index[i] = u32(pattern >> 23)
            tile_zeros = i32(tile_zeros + i32(pattern == 0))
            tile_nans = i32(tile_nans + i32(pattern > 0x7F800000))
            largest = i32(max(largest, pattern if pattern < 0x7F800000 else i32(0)))
        zeros += tile_zeros
        nans += tile_nans
        whole = size - size % LANES
        for i in range(0, whole, LANES):
            for lane in range(LANES):
                counts[lane * FIELDS + index[i + lane]] += u32(1)
        for i in range(whole, size):
            counts[index[i]] += u32(1)
    for field in range(FIELDS):
        for lane in range(LANES):
            part[field] += counts[lane * FIELDS + field]
    part[0] -= zeros
    part[_ZERO] += zeros
    part[_INFINITE] -= nans
    part[_NAN] += nans
    part[_LARGEST] = max(part[_LARGEST], largest)


def main(job: Pointer) -> None:
    """Take blocks until none is left."""
    part = int64_at(job[PARTS] + 8 * PART * take(int64_at(job[JOB] + 8 * SLOT)))
    x = x_at(job[X])
    while True:
        start = take(job) * BLOCK
        if start >= job[TOTAL]:
            break
        block(x, part, start, min(start + BLOCK, job[TOTAL]))
