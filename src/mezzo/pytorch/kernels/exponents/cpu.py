"""Exponent histograms on a CPU: each element is read once, on PyTorch's threads."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import addressof, c_int64
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


_Job = c_int64 * words.JOB_WORDS


def count(elements: Tensor, row: Tensor) -> None:
    """Count into the row, or with several threads into a part for each first; see `exponents.count`."""
    total = elements.numel()
    kernel = specialise.kernel(words, _BINDINGS[elements.dtype])
    if total <= ALONE:
        job = _Job(0, 0, total, elements.data_ptr(), row.data_ptr(), 0)
        job[words.JOB] = addressof(job)
        openmp.alone(kernel.address, addressof(job))
        return
    parts = np.zeros((torch.get_num_threads(), words.PART), np.int64)
    job = _Job(0, 0, total, elements.data_ptr(), parts.ctypes.data, 0)
    job[words.JOB] = addressof(job)
    openmp.parallel(kernel.address, addressof(job))
    into = row.numpy()
    into[:BINS] += parts[:, :BINS].sum(axis=0)
    into[BINS] = max(into[BINS], parts[:, BINS].max())
