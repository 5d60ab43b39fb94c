"""Normalization of 16-bit rows on a CPU, in a `jit` template. With h = (x - mean) * rstd and g = dy * weight::

    dx      = rstd * (g - mean(g) - h * mean(g * h))       (rms_norm: h = x * rstd, and no mean(g))
    dweight = sum over rows of dy * h;  dbias = sum over rows of dy

Sums over blocks of rows are FP32, added in order and rounded once: any number of threads gives the same bits.
"""

from __future__ import annotations

import functools
import struct
import sys
from array import array
from ctypes import c_int64
from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mezzo.pytorch.kernels import cpu, jit
from mezzo.pytorch.kernels.cpu import LANES, Pointer, expand, f32, float32_at, fma, i32, int16_at, loop

if TYPE_CHECKING:
    from mezzo.pytorch.kernels.norms import Form

load_x = cpu.load_bf16  # bound
store_x = cpu.store_bf16  # bound
HAS_SUMS = True  # bound
IS_CENTRED = True  # bound

# The words of a job; 0 for a tensor that is not wanted. SUMS: FP32 [2, blocks, columns], of weight and bias (rms_norm
# has none). EPSILON is an FP32's pattern.
(
    COUNTER, TAKEN, ROWS, COLUMNS, X, WEIGHT, MEANS, RSTDS, BIAS, OUT, EPSILON,
    BLOCKS, BLOCK_ROWS, DY, DX, SUMS, JOB_WORDS,
) = range(17)  # fmt: skip

_LEAST = 1 << 13  # elements that a thread of the forward takes at once
_LEAST_ROWS, _MOST_ROWS, _BLOCKS = 16, 4096, 64  # of a block of the backward, and how many blocks between

_Job = c_int64 * JOB_WORDS

# Numba passes the elements of a tuple as separate arguments.
Tensors = tuple[Pointer, Pointer, Pointer, Pointer]
Statistics = tuple[Pointer, Pointer]


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, form: Form) -> tuple[Tensor, Tensor]:
    """The normalized rows of a contiguous 16-bit `x`, and their statistics: FP32 [2, rows], means and 1 / deviation."""
    _, columns, epsilon, is_centred = form
    rows = x.numel() // columns
    out = torch.empty_like(x)
    statistics = torch.empty((2 if is_centred else 1, rows), dtype=torch.float32)
    if rows:
        scale, shift = _address(weight, columns, 1.0), _address(bias, columns, -0.0)
        means = statistics.data_ptr()
        rstds = means + (4 * rows if is_centred else 0)
        block_rows = max(jit.shared(rows), _LEAST // columns)
        job = _Job(
            *(0, 1, rows, columns, x.data_ptr(), scale, means, rstds, shift),
            *(out.data_ptr(), _pattern(epsilon), -(-rows // block_rows), block_rows),
        )
        jit.run(_kernel("normalise_block", x.dtype, False, is_centred), job, rows * columns)
    return out, statistics


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, kept: Tensor, form: Form, wants_dx: bool, wants_sums: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx like `x`, dweight and dbias in FP32 [columns], as far as wanted; `kept`: the statistics of `forward`."""
    _, columns, _, is_centred = form
    rows = x.numel() // columns
    block_rows = min(max(-(-rows // _BLOCKS), _LEAST_ROWS), _MOST_ROWS)
    blocks = -(-rows // block_rows)
    dx = torch.empty_like(x) if wants_dx else None
    sums = torch.empty((1 + is_centred, blocks, columns), dtype=torch.float32) if wants_sums else None
    scale, means = _address(weight, columns, 1.0), kept.data_ptr()
    rstds = means + (4 * rows if is_centred else 0)
    job = _Job(
        *(0, jit.shared(blocks), rows, columns, x.data_ptr(), scale, means, rstds, 0, 0, 0),
        *(blocks, block_rows, dy.data_ptr()),
        *(0 if tensor is None else tensor.data_ptr() for tensor in (dx, sums)),
    )
    if rows:
        jit.run(_kernel("differentiate_block", x.dtype, wants_sums, is_centred), job, rows * columns)
    if sums is None:
        return dx, None, None
    # PyTorch splits the sum between threads by columns, so the order is always the same.
    totals = sums[:, 0] if blocks == 1 else sums.sum(1)
    return dx, totals[0], totals[1] if is_centred else None


def _address(parameter: Tensor | None, columns: int, absent: float) -> int:
    return _constant(columns, absent).buffer_info()[0] if parameter is None else parameter.data_ptr()


@functools.lru_cache(maxsize=64)
def _constant(columns: int, value: float) -> array[float]:
    """An absent parameter: ones, or minus zeros, which change nothing that they are added to."""
    return array("f", [value]) * columns


@functools.lru_cache(maxsize=64)
def _pattern(value: float) -> int:
    found: int = struct.unpack("i", struct.pack("f", value))[0]
    return found


@functools.cache
def _kernel(work: str, x: torch.dtype, has_sums: bool, is_centred: bool) -> int:
    bindings = {
        **jit.elements(x, load="load_x", store="store_x"),
        "HAS_SUMS": str(has_sums),
        "IS_CENTRED": str(is_centred),
        "work": work,
    }
    return jit.kernel(sys.modules[__name__], bindings).address


@expand
def add(x: Pointer, start: int, count: int, lanes: Pointer) -> None:
    """Add as many elements to as many lanes."""
    for lane in range(count):
        lanes[lane] = lanes[lane] + load_x(x, start + lane)


@expand
def add_squares(x: Pointer, start: int, count: int, mean: float, lanes: Pointer) -> None:
    """Add the squared distances of as many elements from the mean."""
    for lane in range(count):
        distance = load_x(x, start + lane) - mean
        lanes[lane] = fma(distance, distance, lanes[lane])


@loop
def normalise_rows(
    tensors: Tensors, statistics: Statistics, start: int, stop: int, columns: int, epsilon: float
) -> None:
    """Normalize some rows."""
    x, weight, bias, out = tensors
    means, rstds = statistics
    lanes = cpu.lanes_scratch()
    whole = columns - columns % LANES
    count = f32(columns)
    for row in range(start, stop):
        first = row * columns
        mean = f32(0.0)
        if IS_CENTRED:
            cpu.clear(lanes)
            for i in range(0, whole, LANES):
                add(x, first + i, LANES, lanes)
            add(x, first + whole, columns - whole, lanes)
            mean = cpu.total(lanes) / count
            means[row] = mean
        cpu.clear(lanes)
        for i in range(0, whole, LANES):
            add_squares(x, first + i, LANES, mean, lanes)
        add_squares(x, first + whole, columns - whole, mean, lanes)
        rstd = f32(1.0) / f32(sqrt(cpu.total(lanes) / count + epsilon))
        rstds[row] = rstd
        for i in range(columns):
            normal = (load_x(x, first + i) - mean) * rstd
            store_x(out, first + i, fma(normal, f32(weight[i]), f32(bias[i])))


@cpu.inline
def normalise_block(job: Pointer, number: int) -> None:
    """Normalize one block of rows."""
    tensors = int16_at(job[X]), float32_at(job[WEIGHT]), float32_at(job[BIAS]), int16_at(job[OUT])
    statistics = float32_at(job[MEANS]), float32_at(job[RSTDS])
    rows = job[BLOCK_ROWS]
    start, stop = number * rows, min(number * rows + rows, job[ROWS])
    normalise_rows(tensors, statistics, start, stop, job[COLUMNS], cpu.float_of(i32(job[EPSILON])))


@expand
def add_products(
    tensors: Tensors, sums: Tensors, first: int, start: int, count: int, mean: float, rstd: float
) -> None:
    """Add g and g * h of as many elements to as many lanes, and their parts to the parameters' sums."""
    dy, x, weight, _ = tensors
    g_lanes, gh_lanes, weight_sums, bias_sums = sums
    for lane in range(count):
        i = start + lane
        gradient = load_x(dy, first + i)
        h = (load_x(x, first + i) - mean) * rstd
        g = gradient * f32(weight[i])
        if IS_CENTRED:
            g_lanes[lane] = g_lanes[lane] + g
        gh_lanes[lane] = fma(g, h, gh_lanes[lane])
        if HAS_SUMS:
            weight_sums[i] = fma(gradient, h, weight_sums[i])
            if IS_CENTRED:
                bias_sums[i] = bias_sums[i] + gradient


@loop
def differentiate_rows(
    tensors: Tensors,
    statistics: Statistics,
    sums: Statistics,
    start: int,
    stop: int,
    columns: int,
    wants_dx: bool,
) -> None:
    """The gradients of some rows; their parts of the parameters' gradients are added to a block's sums."""
    dy, x, weight, dx = tensors
    means, rstds = statistics
    g_lanes, gh_lanes = cpu.lanes_scratch(), cpu.lanes_scratch()
    weight_sums, bias_sums = sums
    into = g_lanes, gh_lanes, weight_sums, bias_sums
    whole = columns - columns % LANES
    count = f32(columns)
    if HAS_SUMS:
        for i in range(columns):
            weight_sums[i] = f32(0.0)
            if IS_CENTRED:
                bias_sums[i] = f32(0.0)
    for row in range(start, stop):
        first = row * columns
        mean, rstd = f32(0.0), rstds[row]
        if IS_CENTRED:
            mean = means[row]
            cpu.clear(g_lanes)
        cpu.clear(gh_lanes)
        for i in range(0, whole, LANES):
            add_products(tensors, into, first, i, LANES, mean, rstd)
        add_products(tensors, into, first, whole, columns - whole, mean, rstd)
        if wants_dx:
            g_mean = cpu.total(g_lanes) / count if IS_CENTRED else f32(0.0)
            gh_mean = cpu.total(gh_lanes) / count
            for i in range(columns):
                g = load_x(dy, first + i) * f32(weight[i])
                h = (load_x(x, first + i) - mean) * rstd
                store_x(dx, first + i, rstd * (g - g_mean - h * gh_mean))


@cpu.inline
def differentiate_block(job: Pointer, number: int) -> None:
    """The gradients of one block of rows."""
    columns, rows = job[COLUMNS], job[BLOCK_ROWS]
    tensors = int16_at(job[DY]), int16_at(job[X]), float32_at(job[WEIGHT]), int16_at(job[DX])
    statistics = float32_at(job[MEANS]), float32_at(job[RSTDS])
    at = job[SUMS] + 4 * number * columns
    sums = float32_at(at), float32_at(at + 4 * job[BLOCKS] * columns)
    start, stop = number * rows, min(number * rows + rows, job[ROWS])
    differentiate_rows(tensors, statistics, sums, start, stop, columns, job[DX] != 0)


work = normalise_block  # bound


def main(job: Pointer) -> None:
    """Take blocks of rows until none is left."""
    cpu.share(job, job[BLOCKS], job[TAKEN], work)
