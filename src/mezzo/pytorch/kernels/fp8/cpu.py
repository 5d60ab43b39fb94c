"""The fp8 casts on a CPU, on PyTorch's threads: each reads its input once and writes its output once.

A tensor is cut into stretches: rows, where each has its own scale, and 65,536 elements otherwise. What no loop here
takes (a scale of another shape, a reduction over an inner dimension) is left to the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from ctypes import addressof, c_int64
from types import MappingProxyType, ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from mezzo.pytorch.kernels import openmp, specialise
from mezzo.pytorch.kernels.fp8 import cpu_cast, cpu_largest, cpu_scale, cpu_widen, reference

_KERNELS = "mezzo.pytorch.kernels"

ALONE = 1 << 15
"""Elements up to which one thread is done before a second has begun."""

_STRETCH = 1 << 16
_LEAST = 1 << 13  # elements that a thread takes at once

_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float32: "fp32",
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.float8_e4m3fn: "e4m3fn",
        torch.float8_e5m2: "e5m2",
    }
)
_LargestJob = c_int64 * cpu_largest.JOB_WORDS
_ScaleJob = c_int64 * cpu_scale.JOB_WORDS
_CastJob = c_int64 * cpu_cast.JOB_WORDS
_WidenJob = c_int64 * cpu_widen.JOB_WORDS

count_saturated = reference.count_saturated


class _Cut(NamedTuple):
    """How a tensor is cut: stretches of `length` elements, `at_once` of them a turn, `step` from scale to scale."""

    length: int
    at_once: int
    step: int
    by_column: bool


def amax(x: Tensor, dim: int | None = None) -> Tensor:
    """The largest finite magnitude; see `fp8.amax`."""
    cut = _cut(x, _reduced(x, dim))
    if cut is None:
        return reference.amax(x, dim)
    shape = _reduced(x, dim)
    parts = _parts(x.contiguous(), cut)
    if parts.shape[0] == 1:
        return parts.view(shape)
    return _finish(parts, None)[0].view(shape)


def scale_of(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """The power of two; see `fp8.scale_of`."""
    return _finish(amax.contiguous().view(1, -1), (dtype, margin))[1].view(amax.shape)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of ``x * scale``; see `fp8.cast`."""
    cut = _cut(x, scale.shape)
    if cut is None:
        return reference.cast(x, scale, dtype)
    codes = torch.empty(x.shape, dtype=dtype)
    _cast(x.contiguous(), scale.contiguous(), codes, cut, "given")
    return codes


def cast_with_amax(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes, and the tensor's largest finite magnitude; see `fp8.cast_with_amax`."""
    cut = _cut(x, scale.shape)
    if cut is None or scale.numel() != 1:
        return reference.cast_with_amax(x, scale, dtype)
    codes = torch.empty(x.shape, dtype=dtype)
    parts = torch.empty((_count(x, cut), 1))
    _cast(x.contiguous(), scale, codes, cut, "kept", parts)
    largest = parts if len(parts) == 1 else _finish(parts, None)[0]
    return codes, largest.view(())


def quantize(x: Tensor, dtype: torch.dtype, margin: int, dim: int | None) -> tuple[Tensor, Tensor]:
    """Codes and their scale; see `fp8.quantize`."""
    shape = _reduced(x, dim)
    cut = _cut(x, shape)
    if cut is None:
        return reference.quantize(x, dtype, margin, dim)
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=dtype)
    if cut.step or (_count(x, cut) == 1 and not cut.by_column):
        scale = torch.empty(shape)
        _cast(x, scale, codes, cut, "found", margin=margin)
    else:
        scale = _finish(_parts(x, cut), (dtype, margin))[1].view(shape)
        _cast(x, scale, codes, cut, "given")
    return codes, scale


def widen(codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of codes, divided by their scale; see `fp8.widen`."""
    cut = _cut(codes, inv_scale.shape)
    if cut is None:
        return reference.widen(codes, inv_scale, dtype)
    codes, inv_scale = codes.contiguous(), inv_scale.contiguous()
    out = torch.empty(codes.shape, dtype=dtype)
    job = _WidenJob(
        0,
        cut.at_once,
        cut.length,
        codes.numel(),
        codes.data_ptr(),
        inv_scale.data_ptr(),
        cut.step,
        out.data_ptr(),
    )
    _call(_widen_kernel(codes.dtype, dtype, cut.by_column), job, codes.numel())
    return out


def _reduced(x: Tensor, dim: int | None) -> torch.Size:
    """The shape of what is left when a dimension, or every one, is reduced."""
    if dim is None:
        return torch.Size(())
    shape = list(x.shape)
    shape[dim] = 1
    return torch.Size(shape)


def _cut(x: Tensor, scales: torch.Size) -> _Cut | None:
    """How a tensor is cut beside scales of this shape, or None for the reference."""
    total = x.numel()
    if not total:
        return None
    if scales.numel() == 1:
        return _Cut(total if total <= ALONE else _STRETCH, 1, 0, False)
    length = x.shape[-1]
    rows = total // length
    at_once = max(-(-rows // (4 * torch.get_num_threads())), _LEAST // length, 1)
    if scales == (*x.shape[:-1], 1):
        return _Cut(length, at_once, 1, False)
    if x.dim() == 2 and scales == (1, length):
        return _Cut(length, at_once, 0, True)
    return None


def _count(x: Tensor, cut: _Cut) -> int:
    return -(-x.numel() // cut.length)


def _parts(x: Tensor, cut: _Cut) -> Tensor:
    """The largest finite magnitudes of stretches, [stretches, 1], of rows, [1, M], or of columns, [parts, K]."""
    count = _count(x, cut)
    if cut.by_column:
        parts = torch.empty((-(-count // cut.at_once), cut.length))
    else:
        parts = torch.empty((1, count) if cut.step else (count, 1))
    job = _LargestJob(0, cut.at_once, cut.length, x.numel(), x.data_ptr(), x.element_size(), parts.data_ptr())
    _call(_largest_kernel(x.dtype, cut.by_column), job, x.numel())
    return parts


def _finish(parts: Tensor, wanted: tuple[torch.dtype, int] | None) -> tuple[Tensor, Tensor]:
    """The largest of each column of [rows, columns], and, if wanted, the scales of those for a format and a margin."""
    rows, columns = parts.shape
    found = torch.empty((2, columns))
    largest, scales = found[0], found[1]
    top, margin = (0, 0) if wanted is None else (reference.PLANS[wanted[0]].largest >> 23, wanted[1])
    job = _ScaleJob(
        parts.data_ptr(),
        rows,
        columns,
        largest.data_ptr(),
        0 if wanted is None else scales.data_ptr(),
        top,
        margin,
    )
    openmp.alone(_scale_kernel(), addressof(job))
    return largest, scales


def _cast(
    x: Tensor,
    scales: Tensor,
    codes: Tensor,
    cut: _Cut,
    mode: str,
    largest: Tensor | None = None,
    margin: int = 0,
) -> None:
    """Cast with scales that are ``given``, or are to be ``found`` for each stretch; or the largest ``kept``."""
    job = _CastJob(
        0,
        cut.at_once,
        cut.length,
        x.numel(),
        x.data_ptr(),
        scales.data_ptr(),
        cut.step,
        codes.data_ptr(),
        0 if largest is None else largest.data_ptr(),
        reference.PLANS[codes.dtype].largest >> 23,
        margin,
    )
    _call(_cast_kernel(x.dtype, codes.dtype, cut.by_column, mode), job, x.numel())


def _call(kernel: int, job: object, elements: int) -> None:
    (openmp.alone if elements <= ALONE else openmp.parallel)(kernel, addressof(job))  # type: ignore[arg-type]


@functools.cache
def _largest_kernel(x: torch.dtype, by_column: bool) -> int:
    return _address(cpu_largest, {**_input(x), "by_column": _answer(by_column)})


@functools.cache
def _scale_kernel() -> int:
    return _address(cpu_scale, {})


@functools.cache
def _cast_kernel(x: torch.dtype, codes: torch.dtype, by_column: bool, mode: str) -> int:
    return _address(
        cpu_cast,
        {
            **_input(x),
            "narrow": f"{_KERNELS}.fp8.cpu_elements:narrow_{_NAMES[codes]}",
            "by_column": _answer(by_column),
            "finds_scales": _answer(mode == "found"),
            "keeps_largest": _answer(mode == "kept"),
        },
    )


@functools.cache
def _widen_kernel(codes: torch.dtype, out: torch.dtype, by_column: bool) -> int:
    return _address(
        cpu_widen,
        {
            "load_code": f"{_KERNELS}.fp8.cpu_elements:load_{_NAMES[codes]}",
            "store_out": f"{_KERNELS}.layer_norm.cpu_elements:store_{_NAMES[out]}",
            "out_at": f"{_KERNELS}.native:{_pointer(out)}",
            "by_column": _answer(by_column),
        },
    )


def _input(dtype: torch.dtype) -> dict[str, str]:
    return {
        "x_at": f"{_KERNELS}.native:{_pointer(dtype)}",
        "load_x": f"{_KERNELS}.optimizer_step.cpu_grads:load_{_NAMES[dtype]}",
    }


def _pointer(dtype: torch.dtype) -> str:
    return "float32_at" if dtype is torch.float32 else "int16_at"


def _answer(value: bool) -> str:
    return f"{_KERNELS}.layer_norm.cpu_elements:{'yes' if value else 'no'}"


def _address(template: ModuleType, bindings: Mapping[str, str]) -> int:
    return specialise.kernel(template, bindings).address
