"""Whole tensors read once on a CPU, at the speed of memory: exponent histograms, and the sum of squares of gradients.

*Exponents*: those of 1,024 elements at a time are found in vector registers, zeros, NaN and the largest with them, and
then counted one by one: no vector instruction adds to memory at eight places of which two may be the same. Successive
elements count into eight histograms in turn, since most have the exponent of the one before, and a count that was just
stored can't be loaded again for some cycles. `torch.bincount` and what it needs before it take three times as long on
one thread, and have one.

*Sum of squares*: blocks of 65,536 elements, each in 64 lanes that no compiler or thread reorders, so the result is the
same for any number of threads.

The loops are a template: `jit` writes this file out with other functions in the lines marked as bound.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from ctypes import addressof, c_int64

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mezzo.core.ranges import BINS
from mezzo.pytorch.kernels import jit
from mezzo.pytorch.kernels.cpu import (
    Pointer,
    bits,
    expand,
    f64,
    float64_at,
    float64_scratch,
    i32,
    int64_at,
    loop,
    take,
    u32,
    uint32_scratch,
)
from mezzo.pytorch.kernels.cpu import int16_at as x_at  # bound
from mezzo.pytorch.kernels.cpu import load_bf16 as load_x  # bound

BLOCK = 1 << 16
"""Elements that a thread takes at once."""

ALONE = 1 << 15
"""Elements up to which one thread is done before a second has begun."""


@functools.cache
def _kernel(main: str, dtype: torch.dtype) -> int:
    bindings = jit.elements(dtype, load="load_x", at="x_at")
    return jit.kernel(sys.modules[__name__], bindings, main).address


# Exponents. What `count_exponents` is given; SLOT counts the threads that have come: each has a part of its own. JOB is
# the job's address.
COUNTER, SLOT, TOTAL, X, PARTS, JOB, JOB_WORDS = range(7)

PART = 264  # words of a part, of which the first 259 are used: no two threads write to one line of memory
TILE = 1 << 10
LANES = 8
FIELDS = 256

_INFINITE, _ZERO, _NAN, _LARGEST = 255, 256, 257, 258

_Job = c_int64 * JOB_WORDS


def count(elements: Tensor, row: Tensor) -> None:
    """Count into the row, or with several threads into a part for each first; see `exponents.counter`."""
    total = elements.numel()
    parts = np.zeros((torch.get_num_threads(), PART), np.int64) if total > ALONE else None
    job = _Job(0, 0, total, elements.data_ptr(), row.data_ptr() if parts is None else parts.ctypes.data, 0)
    job[JOB] = addressof(job)
    address = _kernel("count_exponents", elements.dtype)
    if parts is None:
        jit.alone(address, addressof(job))
        return
    jit.parallel(address, addressof(job))
    into = row.numpy()
    into[:BINS] += parts[:, :BINS].sum(axis=0)
    into[BINS] = max(into[BINS], parts[:, BINS].max())


@loop
def count_block(x: Pointer, part: Pointer, start: int, stop: int) -> None:
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


def count_exponents(job: Pointer) -> None:
    """Take blocks until none is left."""
    part = int64_at(job[PARTS] + 8 * PART * take(int64_at(job[JOB] + 8 * SLOT)))
    x = x_at(job[X])
    while True:
        start = take(job) * BLOCK
        if start >= job[TOTAL]:
            break
        count_block(x, part, start, min(start + BLOCK, job[TOTAL]))


# The sum of squares. What `sum_squares` is given: blocks as pairs of a tensor's index and an element, and tensors as
# pairs of address and size.
_, BLOCKS, BLOCK_LIST, TENSORS, SUMS, SUM_WORDS = range(6)

SUM_LANES = 64  # eight AVX-512 registers


def sum_of_squares(grads: Sequence[Tensor]) -> Tensor:
    """Sum the squares of each block, then the blocks' sums; see `gradient_norm.sum_of_squares`."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    sums = [_sums(dtype, of_dtype) for dtype, of_dtype in by_dtype.items()]
    # NumPy's order is fixed by the length; the blocks' sums are in theirs, whoever computed them.
    return torch.tensor(np.concatenate(sums).sum(), dtype=torch.float64)


def _sums(dtype: torch.dtype, grads: list[Tensor]) -> npt.NDArray[np.float64]:
    tensors = np.array([(grad.data_ptr(), grad.numel()) for grad in grads], np.int64)
    blocks = _blocks(tuple(tensors[:, 1].tolist()))
    sums = np.empty(len(blocks), np.float64)
    job = np.zeros(SUM_WORDS, np.int64)
    job[BLOCKS] = len(blocks)
    job[BLOCK_LIST] = blocks.ctypes.data
    job[TENSORS] = tensors.ctypes.data
    job[SUMS] = sums.ctypes.data
    call = jit.alone if len(blocks) < 2 else jit.parallel
    call(_kernel("sum_squares", dtype), job.ctypes.data)
    return sums


@functools.lru_cache(maxsize=16)
def _blocks(sizes: tuple[int, ...]) -> npt.NDArray[np.int64]:
    pairs = [(index, start) for index, size in enumerate(sizes) for start in range(0, size, BLOCK)]
    return np.array(pairs, np.int64).reshape(-1, 2)


@expand
def add(grad: Pointer, lanes: Pointer, start: int, count: int) -> None:
    """Add `count` squares to as many lanes."""
    for lane in range(count):
        x = f64(load_x(grad, start + lane))
        lanes[lane] = lanes[lane] + x * x


@loop
def sum_block(grad: Pointer, start: int, stop: int) -> float:
    """One block's sum: lane by lane, and at last over the lanes in order."""
    lanes = float64_scratch(SUM_LANES)
    for lane in range(SUM_LANES):
        lanes[lane] = 0.0
    whole = stop - (stop - start) % SUM_LANES
    for i in range(start, whole, SUM_LANES):
        add(grad, lanes, i, SUM_LANES)
    add(grad, lanes, whole, stop - whole)
    total = f64(0)
    for lane in range(SUM_LANES):
        total += lanes[lane]
    return total


def sum_squares(job: Pointer) -> None:
    """Take blocks until none is left."""
    block_list, tensors, sums = int64_at(job[BLOCK_LIST]), int64_at(job[TENSORS]), float64_at(job[SUMS])
    while True:
        this = take(job)
        if this >= job[BLOCKS]:
            break
        tensor, start = block_list[2 * this], block_list[2 * this + 1]
        stop = min(start + BLOCK, tensors[2 * tensor + 1])
        sums[this] = sum_block(x_at(tensors[2 * tensor]), start, stop)
