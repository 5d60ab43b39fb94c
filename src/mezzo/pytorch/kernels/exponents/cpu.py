"""Exponent histograms on a CPU: each element is read once, on PyTorch's threads."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from mezzo.core.ranges import BINS
from mezzo.pytorch.kernels import openmp, specialise
from mezzo.pytorch.kernels.exponents import cpu_blocks as words

ALONE = 1 << 15
"""Elements up to which one thread is done before a second has begun."""

_GRADS = "mezzo.pytorch.kernels.optimizer_step.cpu_grads"
_NATIVE = "mezzo.pytorch.kernels.native"

_BINDINGS: Mapping[torch.dtype, Mapping[str, str]] = MappingProxyType(
    {
        torch.float32: {"load_x": f"{_GRADS}:load_fp32", "x_at": f"{_NATIVE}:float32_at"},
        torch.bfloat16: {"load_x": f"{_GRADS}:load_bf16", "x_at": f"{_NATIVE}:int16_at"},
        torch.float16: {"load_x": f"{_GRADS}:load_fp16", "x_at": f"{_NATIVE}:int16_at"},
    }
)


def count(elements: Tensor, row: Tensor) -> None:
    """Count into a part of each thread's own, then add the parts to the row; see `exponents.count`."""
    total = elements.numel()
    threads = 1 if total <= ALONE else torch.get_num_threads()
    parts = np.zeros((threads, words.PART), np.int64)
    job = np.zeros(words.JOB_WORDS, np.int64)
    job[words.TOTAL] = total
    job[words.X] = elements.data_ptr()
    job[words.PARTS] = parts.ctypes.data
    job[words.JOB] = job.ctypes.data
    kernel = specialise.kernel(words, _BINDINGS[elements.dtype])
    call = openmp.alone if threads == 1 else openmp.parallel
    call(kernel.address, job.ctypes.data)
    into = row.numpy()
    into[:BINS] += parts[:, :BINS].sum(axis=0)
    into[BINS] = max(into[BINS], parts[:, BINS].max())
