"""The sum of squares on a CPU: at the speed of memory, the same for any number of threads."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mezzo.pytorch.kernels import openmp, specialise
from mezzo.pytorch.kernels.gradient_norm import cpu_blocks as words
from mezzo.pytorch.kernels.optimizer_step.cpu import grad_bindings


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
    job = np.zeros(words.JOB_WORDS, np.int64)
    job[words.BLOCKS] = len(blocks)
    job[words.BLOCK_LIST] = blocks.ctypes.data
    job[words.TENSORS] = tensors.ctypes.data
    job[words.SUMS] = sums.ctypes.data
    kernel = specialise.kernel(words, grad_bindings(dtype))
    call = openmp.alone if len(blocks) < 2 else openmp.parallel
    call(kernel.address, job.ctypes.data)
    return sums


@functools.lru_cache(maxsize=16)
def _blocks(sizes: tuple[int, ...]) -> npt.NDArray[np.int64]:
    pairs = [(index, start) for index, size in enumerate(sizes) for start in range(0, size, words.BLOCK)]
    return np.array(pairs, np.int64).reshape(-1, 2)
