"""Normalisation of 16-bit rows on a CPU, on PyTorch's threads: layer_norm, and rms_norm as the same without a mean.

Rows are shared out in blocks that depend on the shape alone, so any number of threads gives the same bits. What a call
does in Python is to allocate what it returns, the statistics and the blocks' sums, and to write their addresses down.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from ctypes import addressof, c_int64
from types import MappingProxyType, ModuleType

import torch
from torch import Tensor

from mezzo.pytorch.kernels import openmp, specialise
from mezzo.pytorch.kernels.layer_norm import cpu_backward, cpu_forward, cpu_sums

_KERNELS = "mezzo.pytorch.kernels"

ALONE = 1 << 15
"""Elements up to which one thread is done before a second has begun."""

_LEAST = 1 << 13  # elements that a thread of the forward takes at once
_LEAST_ROWS, _MOST_ROWS, _BLOCKS = 16, 4096, 64  # of a block of the backward, and how many blocks between

_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
)
_ForwardJob = c_int64 * cpu_forward.JOB_WORDS
_BackwardJob = c_int64 * cpu_backward.JOB_WORDS
_SumsJob = c_int64 * cpu_sums.JOB_WORDS

Wanted = tuple[bool, torch.dtype | None, torch.dtype | None]
"""Whether dx is wanted; the dtypes of dweight and dbias, None for what isn't wanted."""


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    columns: int,
    epsilon: float,
    *,
    is_centred: bool = True,
) -> tuple[Tensor, Tensor]:
    """The normalised rows and their statistics; see `reference.forward`."""
    rows = x.numel() // columns
    out = torch.empty_like(x)
    statistics = torch.empty((2 if is_centred else 1, rows), dtype=torch.float32)
    if rows:
        job = _ForwardJob(
            0,
            max(_shared(rows), _LEAST // columns),
            rows,
            columns,
            x.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            statistics.data_ptr(),
            statistics.data_ptr() + (4 * rows if is_centred else 0),
            _pattern(epsilon),
        )
        call = openmp.alone if rows * columns <= ALONE else openmp.parallel
        call(_forward_kernel(x.dtype, _dtype(weight), _dtype(bias), is_centred), addressof(job))
    return out, statistics


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    columns: int,
    wanted: Wanted,
    *,
    is_centred: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dweight and dbias; see `reference.backward`."""
    wants_dx, weight_dtype, bias_dtype = wanted
    has_sums = weight_dtype is not None or bias_dtype is not None
    rows = x.numel() // columns
    block_rows = min(max(-(-rows // _BLOCKS), _LEAST_ROWS), _MOST_ROWS)
    blocks = -(-rows // block_rows)
    dx = torch.empty_like(x) if wants_dx else None
    size = blocks * columns
    sums = torch.empty(2 * size if is_centred else size, dtype=torch.float32) if has_sums else None
    if rows:
        job = _BackwardJob(
            0,
            _shared(blocks),
            blocks,
            block_rows,
            rows,
            columns,
            dy.data_ptr(),
            x.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            statistics.data_ptr(),
            statistics.data_ptr() + (4 * rows if is_centred else 0),
            0 if dx is None else dx.data_ptr(),
            0 if sums is None else sums.data_ptr(),
        )
        call = openmp.alone if rows * columns <= ALONE else openmp.parallel
        call(_backward_kernel(x.dtype, _dtype(weight), has_sums, is_centred), addressof(job))
    if sums is None:
        return dx, None, None
    dweight = None if weight_dtype is None else torch.empty(columns, dtype=weight_dtype)
    dbias = None if bias_dtype is None else torch.empty(columns, dtype=bias_dtype)
    job = _SumsJob(
        0,
        blocks,
        columns,
        sums.data_ptr(),
        0 if dweight is None else dweight.data_ptr(),
        0 if dbias is None else dbias.data_ptr(),
    )
    call = openmp.alone if size <= ALONE else openmp.parallel
    call(_sums_kernel(weight_dtype or torch.float32, bias_dtype or torch.float32), addressof(job))
    return dx, dweight, dbias


def _shared(count: int) -> int:
    """How many a thread takes at once: a fourth of its part.

    Fewer, and threads walk side by side through memory, where each one's prefetching takes lines from the other.
    """
    return -(-count // (4 * torch.get_num_threads()))


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


@functools.lru_cache(maxsize=64)
def _pattern(value: float) -> int:
    found: int = struct.unpack("i", struct.pack("f", value))[0]
    return found


@functools.cache
def _forward_kernel(
    x: torch.dtype, weight: torch.dtype | None, bias: torch.dtype | None, is_centred: bool
) -> int:
    return _address(
        cpu_forward,
        {
            "load_x": f"{_KERNELS}.optimizer_step.cpu_grads:load_{_NAMES[x]}",
            "store_out": f"{_KERNELS}.layer_norm.cpu_elements:store_{_NAMES[x]}",
            "is_centred": f"{_KERNELS}.layer_norm.cpu_elements:{'yes' if is_centred else 'no'}",
            **_parameter("weight", weight, "one"),
            **_parameter("bias", bias, "zero"),
        },
    )


@functools.cache
def _backward_kernel(x: torch.dtype, weight: torch.dtype | None, has_sums: bool, is_centred: bool) -> int:
    return _address(
        cpu_backward,
        {
            "load_x": f"{_KERNELS}.optimizer_step.cpu_grads:load_{_NAMES[x]}",
            "store_dx": f"{_KERNELS}.layer_norm.cpu_elements:store_{_NAMES[x]}",
            "is_centred": f"{_KERNELS}.layer_norm.cpu_elements:{'yes' if is_centred else 'no'}",
            "has_sums": f"{_KERNELS}.layer_norm.cpu_elements:{'yes' if has_sums else 'no'}",
            **_parameter("weight", weight, "one"),
        },
    )


@functools.cache
def _sums_kernel(weight: torch.dtype, bias: torch.dtype) -> int:
    return _address(
        cpu_sums,
        {
            "store_weight": f"{_KERNELS}.layer_norm.cpu_elements:store_{_NAMES[weight]}",
            "store_bias": f"{_KERNELS}.layer_norm.cpu_elements:store_{_NAMES[bias]}",
            "weight_at": f"{_KERNELS}.native:{_pointer(weight)}",
            "bias_at": f"{_KERNELS}.native:{_pointer(bias)}",
        },
    )


def _address(template: ModuleType, bindings: Mapping[str, str]) -> int:
    return specialise.kernel(template, bindings).address


def _parameter(name: str, dtype: torch.dtype | None, absent: str) -> dict[str, str]:
    """What reads a parameter: of its dtype, or a constant where there is none."""
    if dtype is None:
        load = f"{_KERNELS}.layer_norm.cpu_elements:load_{absent}"
    else:
        load = f"{_KERNELS}.optimizer_step.cpu_grads:load_{_NAMES[dtype]}"
    return {f"load_{name}": load, f"{name}_at": f"{_KERNELS}.native:{_pointer(dtype)}"}


def _pointer(dtype: torch.dtype | None) -> str:
    return "float32_at" if dtype in (None, torch.float32) else "int16_at"
