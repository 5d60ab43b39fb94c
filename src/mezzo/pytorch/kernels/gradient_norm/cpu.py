"""The sum of squares of gradients on a CPU, read once at the speed of memory, in a `jit` template.

Blocks of 65,536 elements are summed each in 64 FP64 lanes: the same result for any number of threads.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mezzo.pytorch.kernels import cpu, jit
from mezzo.pytorch.kernels.cpu import Pointer, expand, f64, float64_at, float64_scratch, int64_at, loop

x_at = cpu.int16_at  # bound
load_x = cpu.load_bf16  # bound

BLOCK = 1 << 16  # elements that a thread takes at once

# The words of a job: blocks as pairs of a tensor's index and an element, tensors as pairs of address and size.
_, BLOCKS, BLOCK_LIST, TENSORS, SUMS, SUM_WORDS = range(6)

SUM_LANES = 64  # eight AVX-512 registers


def sum_of_squares(grads: Sequence[Tensor]) -> Tensor:
    """Sum the squares of each block, then the blocks' sums; as the package's `sum_of_squares`."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    sums = [_sums(dtype, of_dtype) for dtype, of_dtype in by_dtype.items()]
    # NumPy's order is fixed by the length; the blocks' sums are in theirs, on any thread.
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
    (jit.alone if len(blocks) < 2 else jit.parallel)(_kernel(dtype), job.ctypes.data)
    return sums


@functools.cache
def _kernel(dtype: torch.dtype) -> int:
    bindings = jit.elements(dtype, load="load_x", at="x_at")
    return jit.kernel(sys.modules[__name__], bindings).address


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


@cpu.inline
def work(job: Pointer, this: int) -> None:
    """Sum one block of one tensor."""
    block_list, tensors, sums = int64_at(job[BLOCK_LIST]), int64_at(job[TENSORS]), float64_at(job[SUMS])
    tensor, start = block_list[2 * this], block_list[2 * this + 1]
    stop = min(start + BLOCK, tensors[2 * tensor + 1])
    sums[this] = sum_block(x_at(tensors[2 * tensor]), start, stop)


def main(job: Pointer) -> None:
    """Take blocks until none is left."""
    cpu.share(job, job[BLOCKS], 1, work)
