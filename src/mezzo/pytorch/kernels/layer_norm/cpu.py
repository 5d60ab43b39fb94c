"""Normalisation of 16-bit rows on a CPU, on PyTorch's threads: layer_norm, and rms_norm as the same without a mean.

Forward: mean, then variance about it, then the output, a row at a time while it lies in the cache. Backward:
dx from two sums over a row, the parameters' gradients from sums over each block of rows, in one pass. With h
= (x - mean) * rstd and g = dy * weight::

    dx      = rstd * (g - mean(g) - h * mean(g * h))       (rms_norm: h = x * rstd, and no mean(g))
    dweight = sum over rows of dy * h
    dbias   = sum over rows of dy

Rows are shared out in blocks that depend on the shape alone, and the blocks' sums, in FP32, are added up in
the blocks' order and rounded once: any number of threads gives the same bits. What a call does in Python is
to allocate what it returns, the statistics and the blocks' sums, and to write their addresses down.

The loops are a template: `jit` writes this file out with other functions in the lines marked as bound.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
from ctypes import addressof, c_int64

import torch
from torch import Tensor

from mezzo.pytorch.kernels import jit
from mezzo.pytorch.kernels.cpu import (
    LANES,
    Pointer,
    clear,
    expand,
    f32,
    float32_at,
    float32_scratch,
    float_of,
    fma,
    i32,
    inline,
    int16_at,
    lanes_scratch,
    loop,
    take,
    total,
)
from mezzo.pytorch.kernels.cpu import float32_at as bias_at  # bound
from mezzo.pytorch.kernels.cpu import float32_at as weight_at  # bound
from mezzo.pytorch.kernels.cpu import load_bf16 as load_x  # bound
from mezzo.pytorch.kernels.cpu import load_fp32 as load_bias  # bound
from mezzo.pytorch.kernels.cpu import load_fp32 as load_weight  # bound
from mezzo.pytorch.kernels.cpu import store_bf16 as store_x  # bound
from mezzo.pytorch.kernels.cpu import store_fp32 as store_bias  # bound
from mezzo.pytorch.kernels.cpu import store_fp32 as store_weight  # bound
from mezzo.pytorch.kernels.cpu import yes as has_sums  # bound
from mezzo.pytorch.kernels.cpu import yes as is_centred  # bound

# What the loops are given; 0 for a tensor that is absent or isn't wanted. SUMS: FP32 [2, blocks, columns], the weight's
# and the bias's. EPSILON is an FP32's pattern.
(
    COUNTER, TAKEN, ROWS, COLUMNS, X, WEIGHT, MEANS, RSTDS, BIAS, OUT, EPSILON,
    BLOCKS, BLOCK_ROWS, DY, DX, SUMS, DWEIGHT, DBIAS, JOB_WORDS,
) = range(19)  # fmt: skip

PIECE = 256  # columns whose sums over the blocks are added up at once

ALONE = 1 << 15
"""Elements up to which one thread is done before a second has begun."""

_LEAST = 1 << 13  # elements that a thread of the forward takes at once
_LEAST_ROWS, _MOST_ROWS, _BLOCKS = 16, 4096, 64  # of a block of the backward, and how many blocks between

_Job = c_int64 * JOB_WORDS

Wanted = tuple[bool, torch.dtype | None, torch.dtype | None]
"""Whether dx is wanted; the dtypes of dweight and dbias, None for what isn't wanted."""


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    columns: int,
    epsilon: float,
    is_centred: bool = True,
) -> tuple[Tensor, Tensor]:
    """The normalised rows and their statistics; see `reference.forward`."""
    rows = x.numel() // columns
    out = torch.empty_like(x)
    statistics = torch.empty((2 if is_centred else 1, rows), dtype=torch.float32)
    if rows:
        job = _Job(
            0,
            max(_shared(rows), _LEAST // columns),
            rows,
            columns,
            x.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            statistics.data_ptr(),
            statistics.data_ptr() + (4 * rows if is_centred else 0),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            _pattern(epsilon),
        )
        call = jit.alone if rows * columns <= ALONE else jit.parallel
        call(_forward_kernel(x.dtype, _dtype(weight), _dtype(bias), is_centred), addressof(job))
    return out, statistics


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    columns: int,
    wanted: Wanted,
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
    dweight = None if weight_dtype is None else torch.empty(columns, dtype=weight_dtype)
    dbias = None if bias_dtype is None else torch.empty(columns, dtype=bias_dtype)
    job = _Job(
        0,
        _shared(blocks),
        rows,
        columns,
        x.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        statistics.data_ptr(),
        statistics.data_ptr() + (4 * rows if is_centred else 0),
        0,
        0,
        0,
        blocks,
        block_rows,
        dy.data_ptr(),
        0 if dx is None else dx.data_ptr(),
        0 if sums is None else sums.data_ptr(),
        0 if dweight is None else dweight.data_ptr(),
        0 if dbias is None else dbias.data_ptr(),
    )
    if rows:
        call = jit.alone if rows * columns <= ALONE else jit.parallel
        call(_backward_kernel(x.dtype, _dtype(weight), has_sums, is_centred), addressof(job))
    if has_sums:
        job[COUNTER] = 0
        call = jit.alone if size <= ALONE else jit.parallel
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
    bindings = {
        **jit.elements(x, load="load_x", store="store_x"),
        **_parameter("weight", weight, "one"),
        **_parameter("bias", bias, "zero"),
        **_choice("is_centred", is_centred),
    }
    return jit.kernel(sys.modules[__name__], bindings, "normalise").address


@functools.cache
def _backward_kernel(x: torch.dtype, weight: torch.dtype | None, has_sums: bool, is_centred: bool) -> int:
    bindings = {
        **jit.elements(x, load="load_x", store="store_x"),
        **_parameter("weight", weight, "one"),
        **_choice("has_sums", has_sums),
        **_choice("is_centred", is_centred),
    }
    return jit.kernel(sys.modules[__name__], bindings, "differentiate").address


@functools.cache
def _sums_kernel(weight: torch.dtype, bias: torch.dtype) -> int:
    bindings = {
        **jit.elements(weight, store="store_weight", at="weight_at"),
        **jit.elements(bias, store="store_bias", at="bias_at"),
    }
    return jit.kernel(sys.modules[__name__], bindings, "add_up").address


def _choice(name: str, chosen: bool) -> dict[str, str]:
    return {name: f"{jit.CPU}:{'yes' if chosen else 'no'}"}


def _parameter(name: str, dtype: torch.dtype | None, absent: str) -> dict[str, str]:
    """What reads a parameter: of its dtype, or a constant where there is none."""
    if dtype is None:
        return {f"load_{name}": f"{jit.CPU}:load_{absent}", f"{name}_at": f"{jit.CPU}:float32_at"}
    return jit.elements(dtype, load=f"load_{name}", at=f"{name}_at")


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
    x: Pointer,
    weight: Pointer,
    bias: Pointer,
    out: Pointer,
    means: Pointer,
    rstds: Pointer,
    start: int,
    stop: int,
    columns: int,
    epsilon: float,
) -> None:
    """Normalise some rows."""
    lanes = lanes_scratch()
    whole = columns - columns % LANES
    count = f32(columns)
    for row in range(start, stop):
        first = row * columns
        mean = f32(0.0)
        if is_centred():
            clear(lanes)
            for i in range(0, whole, LANES):
                add(x, first + i, LANES, lanes)
            add(x, first + whole, columns - whole, lanes)
            mean = total(lanes) / count
            means[row] = mean
        clear(lanes)
        for i in range(0, whole, LANES):
            add_squares(x, first + i, LANES, mean, lanes)
        add_squares(x, first + whole, columns - whole, mean, lanes)
        rstd = f32(1.0) / f32(math.sqrt(total(lanes) / count + epsilon))
        rstds[row] = rstd
        for i in range(columns):
            normal = (load_x(x, first + i) - mean) * rstd
            store_x(out, first + i, fma(normal, load_weight(weight, i), load_bias(bias, i)))


def normalise(job: Pointer) -> None:
    """Take blocks of rows until none is left."""
    while True:
        start = take(job) * job[TAKEN]
        if start >= job[ROWS]:
            break
        normalise_rows(
            int16_at(job[X]),
            weight_at(job[WEIGHT]),
            bias_at(job[BIAS]),
            int16_at(job[OUT]),
            float32_at(job[MEANS]),
            float32_at(job[RSTDS]),
            start,
            min(start + job[TAKEN], job[ROWS]),
            job[COLUMNS],
            float_of(i32(job[EPSILON])),
        )


@expand
def add_products(
    dy: Pointer,
    x: Pointer,
    weight: Pointer,
    first: int,
    start: int,
    count: int,
    mean: float,
    rstd: float,
    g_lanes: Pointer,
    gh_lanes: Pointer,
    weight_sums: Pointer,
    bias_sums: Pointer,
) -> None:
    """Add g and g * h of as many elements to as many lanes, and their parts to the parameters' sums."""
    for lane in range(count):
        i = start + lane
        gradient = load_x(dy, first + i)
        h = (load_x(x, first + i) - mean) * rstd
        g = gradient * load_weight(weight, i)
        if is_centred():
            g_lanes[lane] = g_lanes[lane] + g
        gh_lanes[lane] = fma(g, h, gh_lanes[lane])
        if has_sums():
            weight_sums[i] = fma(gradient, h, weight_sums[i])
            if is_centred():
                bias_sums[i] = bias_sums[i] + gradient


@loop
def differentiate_rows(
    dy: Pointer,
    x: Pointer,
    weight: Pointer,
    means: Pointer,
    rstds: Pointer,
    dx: Pointer,
    weight_sums: Pointer,
    bias_sums: Pointer,
    start: int,
    stop: int,
    columns: int,
    wants_dx: bool,
) -> None:
    """The gradients of some rows; their parts of the parameters' gradients are added to a block's sums."""
    g_lanes, gh_lanes = lanes_scratch(), lanes_scratch()
    whole = columns - columns % LANES
    count = f32(columns)
    if has_sums():
        for i in range(columns):
            weight_sums[i] = f32(0.0)
            if is_centred():
                bias_sums[i] = f32(0.0)
    for row in range(start, stop):
        first = row * columns
        mean, rstd = f32(0.0), rstds[row]
        if is_centred():
            mean = means[row]
            clear(g_lanes)
        clear(gh_lanes)
        for i in range(0, whole, LANES):
            add_products(
                dy, x, weight, first, i, LANES, mean, rstd, g_lanes, gh_lanes, weight_sums, bias_sums
            )
        rest = columns - whole
        add_products(dy, x, weight, first, whole, rest, mean, rstd, g_lanes, gh_lanes, weight_sums, bias_sums)
        if wants_dx:
            g_mean = total(g_lanes) / count if is_centred() else f32(0.0)
            gh_mean = total(gh_lanes) / count
            for i in range(columns):
                g = load_x(dy, first + i) * load_weight(weight, i)
                h = (load_x(x, first + i) - mean) * rstd
                store_x(dx, first + i, rstd * (g - g_mean - h * gh_mean))


@inline
def block(job: Pointer, number: int) -> None:
    """The gradients of a block of rows."""
    columns = job[COLUMNS]
    start = number * job[BLOCK_ROWS]
    differentiate_rows(
        int16_at(job[DY]),
        int16_at(job[X]),
        weight_at(job[WEIGHT]),
        float32_at(job[MEANS]),
        float32_at(job[RSTDS]),
        int16_at(job[DX]),
        float32_at(job[SUMS] + number * columns * 4),
        float32_at(job[SUMS] + (job[BLOCKS] + number) * columns * 4),
        start,
        min(start + job[BLOCK_ROWS], job[ROWS]),
        columns,
        job[DX] != 0,
    )


def differentiate(job: Pointer) -> None:
    """Take some blocks until none is left."""
    while True:
        first = take(job) * job[TAKEN]
        if first >= job[BLOCKS]:
            break
        for number in range(first, min(first + job[TAKEN], job[BLOCKS])):
            block(job, number)


@loop
def add_blocks(sums: Pointer, totals: Pointer, blocks: int, columns: int, count: int) -> None:
    """The sums of some columns over all blocks."""
    for i in range(count):
        totals[i] = f32(0.0)
    for block in range(blocks):
        for i in range(count):
            totals[i] = totals[i] + sums[block * columns + i]


def add_up(job: Pointer) -> None:
    """Take pieces of both parameters' gradients until none is left."""
    columns, blocks = job[COLUMNS], job[BLOCKS]
    totals = float32_scratch(PIECE)
    while True:
        start = take(job) * PIECE
        if start >= columns:
            break
        count = min(PIECE, columns - start)
        if job[DWEIGHT] != 0:
            add_blocks(float32_at(job[SUMS] + 4 * start), totals, blocks, columns, count)
            for i in range(count):
                store_weight(weight_at(job[DWEIGHT]), start + i, totals[i])
        if job[DBIAS] != 0:
            add_blocks(float32_at(job[SUMS] + 4 * (blocks * columns + start)), totals, blocks, columns, count)
            for i in range(count):
                store_bias(bias_at(job[DBIAS]), start + i, totals[i])
