"""Normalisation of 16-bit rows in Triton: layer_norm, and rms_norm as the same without a mean.

A program holds some whole rows in registers: short rows several at once. Backward, a program walks over a stretch of
rows whose length depends on the shape alone and keeps the parameters' sums of its stretch; a sum over the stretches
ends it: no atomics, the same bits every time. Rows of more than `MOST_COLUMNS` are left to the reference.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.pytorch.kernels.layer_norm import reference as layer_reference
from mezzo.pytorch.kernels.rms_norm import reference as rms_reference

MOST_COLUMNS = 1 << 14
"""The longest row that a program holds."""

_TILE = 1 << 11  # elements of short rows that a program holds at once
_STRETCHES = 256  # at most so many programs of a backward, unless rows are very many
_MOST_ROWS = 4096  # of a stretch

Wanted = tuple[bool, torch.dtype | None, torch.dtype | None]


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
    if columns > MOST_COLUMNS:
        if is_centred:
            return layer_reference.forward(x, weight, bias, columns, epsilon)
        return rms_reference.forward(x, weight, columns, epsilon)
    rows = x.numel() // columns
    out = torch.empty_like(x)
    statistics = x.new_empty((2 if is_centred else 1, rows), dtype=torch.float32)
    if rows:
        height, width, warps = _tile(columns)
        with torch.cuda.device_of(x):
            forward_kernel[(triton.cdiv(rows, height),)](
                _patterns(x),
                _patterns(weight, x),
                _patterns(bias, x),
                _patterns(out),
                statistics,
                statistics[-1],
                rows,
                columns,
                epsilon,
                IS_BF16=x.dtype is torch.bfloat16,
                WEIGHT=_kind(weight),
                BIAS=_kind(bias),
                IS_CENTRED=is_centred,
                HEIGHT=height,
                WIDTH=width,
                num_warps=warps,
            )
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
    if columns > MOST_COLUMNS:
        if is_centred:
            return layer_reference.backward(dy, x, weight, statistics, columns, wanted)
        return *rms_reference.backward(dy, x, weight, statistics, columns, wanted[:2]), None
    wants_dx, weight_dtype, bias_dtype = wanted
    rows = x.numel() // columns
    height, width, warps = _tile(columns)
    stretch = min(-(-max(rows, 1) // _STRETCHES), _MOST_ROWS)
    stretch = -(-stretch // height) * height
    stretches = -(-rows // stretch)
    has_sums = weight_dtype is not None or bias_dtype is not None
    dx = torch.empty_like(x) if wants_dx else None
    sums = x.new_empty((2 if is_centred else 1, stretches if has_sums else 0, columns), dtype=torch.float32)
    if rows and (wants_dx or has_sums):
        with torch.cuda.device_of(x):
            backward_kernel[(stretches,)](
                _patterns(dy),
                _patterns(x),
                _patterns(weight, x),
                statistics,
                statistics[-1],
                _patterns(dx, x),
                sums,
                sums[-1],
                rows,
                columns,
                stretch,
                IS_BF16=x.dtype is torch.bfloat16,
                WEIGHT=_kind(weight),
                IS_CENTRED=is_centred,
                WANTS_DX=wants_dx,
                HAS_SUMS=has_sums,
                HEIGHT=height,
                WIDTH=width,
                num_warps=warps,
            )
    return (
        dx,
        None if weight_dtype is None else sums[0].sum(0).to(weight_dtype),
        None if bias_dtype is None else sums[-1].sum(0).to(bias_dtype),
    )


def _tile(columns: int) -> tuple[int, int, int]:
    """The rows and columns that a program holds, powers of two, and its warps."""
    width = triton.next_power_of_2(columns)
    height = max(1, _TILE // width)
    return height, width, min(16, max(4, height * width // 512))


def _kind(parameter: Tensor | None) -> int:
    """None, FP32, fp16 or bf16, as the kernels count them."""
    if parameter is None:
        return 0
    return 1 + (torch.float32, torch.float16, torch.bfloat16).index(parameter.dtype)


def _patterns(tensor: Tensor | None, otherwise: Tensor | None = None) -> Tensor | None:
    """A tensor as the kernels take it: bf16 as its patterns, and for none another, which is not read."""
    if tensor is None:
        return _patterns(otherwise)
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


@triton.jit
def _widened(loaded: tl.tensor, IS_BF16: tl.constexpr) -> tl.tensor:
    """FP32 of what was loaded; bf16 comes as patterns, since the interpreter's own loses subnormals."""
    if IS_BF16:
        return (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return loaded.to(tl.float32)


@triton.jit
def _rounded(value: tl.tensor, IS_BF16: tl.constexpr) -> tl.tensor:
    """The 16 bits nearest to FP32, ties to even; every NaN of bf16 as one pattern."""
    if IS_BF16:
        pattern = value.to(tl.int32, bitcast=True)
        nearest = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
        return tl.where(value != value, 0x7FC0, nearest).to(tl.int16)
    else:
        return value.to(tl.float16)


@triton.jit
def _parameter(
    pointer: tl.tensor, at: tl.tensor, mask: tl.tensor, KIND: tl.constexpr, ABSENT: tl.constexpr
) -> tl.tensor:
    if KIND == 0:
        return tl.full(at.shape, ABSENT, tl.float32)
    else:
        return _widened(tl.load(pointer + at, mask=mask, other=0), KIND == 3)


@triton.jit
def forward_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    means: tl.tensor,
    rstds: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    epsilon: tl.tensor,
    IS_BF16: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Normalise `HEIGHT` rows."""
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    at = tl.arange(0, WIDTH)
    has_column = at < columns
    here = (row < rows)[:, None] & has_column[None, :]
    place = row[:, None] * columns + at[None, :]
    distance = _widened(tl.load(x + place, mask=here, other=0), IS_BF16)
    if IS_CENTRED:
        mean = tl.sum(distance, axis=1) / columns
        tl.store(means + row, mean, mask=row < rows)
        distance = tl.where(here, distance - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(distance * distance, axis=1) / columns + epsilon)
    tl.store(rstds + row, rstd, mask=row < rows)
    w = _parameter(weight, at, has_column, WEIGHT, 1.0)
    b = _parameter(bias, at, has_column, BIAS, -0.0)
    wide = distance * rstd[:, None] * w[None, :] + b[None, :]
    tl.store(out + place, _rounded(wide, IS_BF16), mask=here)


@triton.jit
def backward_kernel(
    dy: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    means: tl.tensor,
    rstds: tl.tensor,
    dx: tl.tensor,
    weight_sums: tl.tensor,
    bias_sums: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stretch: tl.tensor,
    IS_BF16: tl.constexpr,
    WEIGHT: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    WANTS_DX: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The gradients of a stretch of rows, `HEIGHT` at a time."""
    first = tl.program_id(0).to(tl.int64) * stretch
    at = tl.arange(0, WIDTH)
    has_column = at < columns
    w = _parameter(weight, at, has_column, WEIGHT, 1.0)
    weight_sum = tl.zeros((WIDTH,), tl.float32)
    bias_sum = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, stretch, HEIGHT):
        row = first + start + tl.arange(0, HEIGHT)
        here = (row < rows)[:, None] & has_column[None, :]
        place = row[:, None] * columns + at[None, :]
        gradient = _widened(tl.load(dy + place, mask=here, other=0), IS_BF16)
        h = _widened(tl.load(x + place, mask=here, other=0), IS_BF16)
        rstd = tl.load(rstds + row, mask=row < rows, other=0)
        if IS_CENTRED:
            h -= tl.load(means + row, mask=row < rows, other=0)[:, None]
        h = tl.where(here, h * rstd[:, None], 0.0)
        if HAS_SUMS:
            weight_sum += tl.sum(gradient * h, axis=0)
            bias_sum += tl.sum(gradient, axis=0)
        if WANTS_DX:
            g = gradient * w[None, :]
            wide = g - h * (tl.sum(g * h, axis=1) / columns)[:, None]
            if IS_CENTRED:
                wide -= (tl.sum(g, axis=1) / columns)[:, None]
            tl.store(dx + place, _rounded(wide * rstd[:, None], IS_BF16), mask=here)
    if HAS_SUMS:
        line = tl.program_id(0).to(tl.int64) * columns + at
        tl.store(weight_sums + line, weight_sum, mask=has_column)
        if IS_CENTRED:
            tl.store(bias_sums + line, bias_sum, mask=has_column)
