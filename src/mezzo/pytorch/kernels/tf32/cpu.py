"""TF32's rounding on a CPU, on PyTorch's threads: one pass."""

from __future__ import annotations

import functools
from ctypes import addressof, c_int64

import torch
from torch import Tensor

from mezzo.pytorch.kernels import openmp, specialise
from mezzo.pytorch.kernels.tf32 import cpu_round

ALONE = 1 << 15
"""Elements up to which one thread is done before a second has begun."""

_STRETCH = 1 << 16
_Job = c_int64 * cpu_round.JOB_WORDS


def round_tf32(x: Tensor) -> Tensor:
    """The nearest TF32 values, ties to even; see `tf32.round_tf32`."""
    out = torch.empty_like(x)
    if out.stride() != x.stride():  # the elements of x fill no stretch of memory
        x = torch.empty_like(x).copy_(x)
    total = x.numel()
    if total:
        job = _Job(0, _STRETCH, total, x.data_ptr(), out.data_ptr())
        call = openmp.alone if total <= ALONE else openmp.parallel
        call(_kernel(), addressof(job))
    return out


@functools.cache
def _kernel() -> int:
    return specialise.kernel(cpu_round, {}).address
