"""The fp8 casts in Triton: integer arithmetic on patterns in the order of `reference.py`, without a host sync.

Codes are written as bytes and bf16 is read as patterns: which conversions a GPU has, and what they make of an infinity,
differs from one to the next. A tensor with one scale is cut into stretches of 16,384 elements, whose largest magnitudes
a second, small launch brings together. A row with its own scale is read twice by one program, from the cache the
second time.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.pytorch.kernels.fp8 import reference

_TILE = 1 << 12  # elements that a program holds
_STRETCH = 1 << 14
_WIDTH = 1 << 7  # columns of a program that looks for the largest of each
_ROWS = 1 << 9  # rows of such a program

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_LARGEST_FINITE = tl.constexpr(0x7F7FFFFF)
_SMALLEST_NORMAL = tl.constexpr(1 << 23)
_CARRY = tl.constexpr(
    0x1FFFFF
)  # carries out of a mantissa above that of 1.75, which both largest numbers have

# How a cast gets its scales, and what else it leaves: the reference's plan, a word each.
_PLANS = {dtype: tuple(plan) for dtype, plan in reference.PLANS.items()}

count_saturated = reference.count_saturated


def amax(x: Tensor, dim: int | None = None) -> Tensor:
    """The largest finite magnitude; see `fp8.amax`."""
    shape = _reduced(x, dim)
    if not x.numel() or _layout(x, shape) is None:
        return reference.amax(x, dim)
    parts = _parts(x.contiguous(), shape)
    if parts.shape[0] == 1:
        return parts.view(shape)
    return _finish(parts, None)[0].view(shape)


def scale_of(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """The power of two; see `fp8.scale_of`."""
    if not amax.numel():
        return torch.empty_like(amax)
    return _finish(amax.contiguous().view(1, -1), (dtype, margin))[1].view(amax.shape)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of ``x * scale``; see `fp8.cast`."""
    if not x.numel() or _layout(x, scale.shape) is None:
        return reference.cast(x, scale, dtype)
    return _cast(x, scale, dtype)


def cast_with_amax(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes, and the tensor's largest finite magnitude; see `fp8.cast_with_amax`."""
    if not x.numel() or scale.numel() != 1:
        return reference.cast_with_amax(x, scale, dtype)
    parts = torch.empty((triton.cdiv(x.numel(), _TILE), 1), dtype=torch.float32, device=x.device)
    codes = _cast(x.reshape(-1), scale, dtype, parts).view(x.shape)
    return codes, _finish(parts, None)[0].view(())


def quantize(x: Tensor, dtype: torch.dtype, margin: int, dim: int | None) -> tuple[Tensor, Tensor]:
    """Codes and their scale; see `fp8.quantize`."""
    shape = _reduced(x, dim)
    layout = _layout(x, shape) if x.numel() else None
    if layout is None:
        return reference.quantize(x, dtype, margin, dim)
    x = x.contiguous()
    if layout[2]:
        return _quantize_rows(x, dtype, margin, shape)
    parts = _parts(x, shape)
    scale = _finish(parts, (dtype, margin))[1].view(shape)
    return _cast(x, scale, dtype), scale


def widen(codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of codes, divided by their scale; see `fp8.widen`."""
    layout = _layout(codes, inv_scale.shape) if codes.numel() else None
    if layout is None:
        return reference.widen(codes, inv_scale, dtype)
    rows, columns, row_step, column_step = layout
    codes = codes.contiguous()
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    height, width = _tile(rows, columns)
    with torch.cuda.device_of(codes):
        widen_kernel[(triton.cdiv(rows, height) * triton.cdiv(columns, width),)](
            codes.view(torch.uint8),
            inv_scale.contiguous(),
            _patterns(out),
            rows,
            columns,
            ROW_STEP=row_step,
            COLUMN_STEP=column_step,
            IS_E5M2=codes.dtype is torch.float8_e5m2,
            IS_BF16=dtype is torch.bfloat16,
            HEIGHT=height,
            WIDTH=width,
        )
    return out


def _reduced(x: Tensor, dim: int | None) -> torch.Size:
    """The shape of what is left when a dimension, or every one, is reduced."""
    if dim is None:
        return torch.Size(())
    shape = list(x.shape)
    shape[dim] = 1
    return torch.Size(shape)


def _layout(x: Tensor, scales: torch.Size) -> tuple[int, int, int, int] | None:
    """Rows, columns, and the steps from a row's scale and from a column's to the next; None for the reference."""
    if scales.numel() == 1:
        return 1, x.numel(), 0, 0
    columns = x.shape[-1]
    if scales == (*x.shape[:-1], 1):
        return x.numel() // columns, columns, 1, 0
    if x.dim() == 2 and scales == (1, columns):
        return x.shape[0], columns, 0, 1
    return None


def _tile(rows: int, columns: int) -> tuple[int, int]:
    """The rows and columns that a program holds, powers of two."""
    width = min(triton.next_power_of_2(columns), _TILE if rows == 1 else _TILE // 4)
    return _TILE // width, width


def _patterns(tensor: Tensor) -> Tensor:
    """A tensor as the kernels take it: bf16 as its patterns."""
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


def _parts(x: Tensor, shape: torch.Size) -> Tensor:
    """The largest finite magnitudes of stretches, [stretches, 1], of rows, [1, M], or of columns, [parts, K]."""
    total, is_bf16 = x.numel(), x.dtype is torch.bfloat16
    rows, columns, row_step, column_step = _layout(x, shape) or (0, 0, 0, 0)
    with torch.cuda.device_of(x):
        if column_step:
            parts = torch.empty((triton.cdiv(rows, _ROWS), columns), dtype=torch.float32, device=x.device)
            largest_column_kernel[(parts.shape[0], triton.cdiv(columns, _WIDTH))](
                _patterns(x),
                parts,
                rows,
                columns,
                IS_BF16=is_bf16,
                ROWS=_ROWS,
                HEIGHT=_TILE // _WIDTH,
                WIDTH=_WIDTH,
            )
            return parts
        length = columns if row_step else _STRETCH
        count = triton.cdiv(total, length)
        parts = torch.empty((1, count) if row_step else (count, 1), dtype=torch.float32, device=x.device)
        largest_kernel[(count,)](_patterns(x), parts, length, total, IS_BF16=is_bf16, BLOCK=_block(length))
        return parts


def _block(length: int) -> int:
    width: int = min(triton.next_power_of_2(length), _TILE)
    return width


def _finish(parts: Tensor, wanted: tuple[torch.dtype, int] | None) -> tuple[Tensor, Tensor]:
    """The largest of each column of [rows, columns], and, if wanted, the scales of those for a format and a margin."""
    rows, columns = parts.shape
    found = torch.empty((2, columns), dtype=torch.float32, device=parts.device)
    top, margin = (0, 0) if wanted is None else (reference.PLANS[wanted[0]].largest >> 23, wanted[1])
    width = min(triton.next_power_of_2(columns), _WIDTH)
    with torch.cuda.device_of(parts):
        finish_kernel[(triton.cdiv(columns, width),)](
            parts,
            found[0],
            found[1],
            rows,
            columns,
            margin,
            TOP=top,
            HAS_SCALES=wanted is not None,
            HEIGHT=_TILE // width // 2,
            WIDTH=width,
        )
    return found[0], found[1]


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype, parts: Tensor | None = None) -> Tensor:
    """Cast; with `parts`, each program's largest finite magnitude is written there."""
    rows, columns, row_step, column_step = _layout(x, scale.shape) or (0, 0, 0, 0)
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    height, width = (1, _TILE) if parts is not None else _tile(rows, columns)
    with torch.cuda.device_of(x):
        cast_kernel[(triton.cdiv(rows, height) * triton.cdiv(columns, width),)](
            _patterns(x),
            scale.contiguous(),
            codes.view(torch.uint8),
            scale if parts is None else parts,
            rows,
            columns,
            PLAN=_PLANS[dtype],
            ROW_STEP=row_step,
            COLUMN_STEP=column_step,
            IS_BF16=x.dtype is torch.bfloat16,
            KEEPS_LARGEST=parts is not None,
            HEIGHT=height,
            WIDTH=width,
        )
    return codes


def _quantize_rows(x: Tensor, dtype: torch.dtype, margin: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    columns = x.shape[-1]
    with torch.cuda.device_of(x):
        quantize_rows_kernel[(x.numel() // columns,)](
            _patterns(x),
            scale,
            codes.view(torch.uint8),
            columns,
            margin,
            PLAN=_PLANS[dtype],
            IS_BF16=x.dtype is torch.bfloat16,
            BLOCK=_block(columns),
        )
    return codes, scale


@triton.jit
def _loaded(pointer: tl.tensor, mask: tl.tensor, IS_BF16: tl.constexpr) -> tl.tensor:
    """FP32 values, 0 where there is none; bf16 comes as patterns, since the interpreter's own loses subnormals."""
    loaded = tl.load(pointer, mask=mask, other=0)
    if IS_BF16:
        return (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return loaded.to(tl.float32)


@triton.jit
def _finite_magnitude(value: tl.tensor) -> tl.tensor:
    """The pattern of the magnitude, in the order of the values; 0 for infinities and NaN."""
    magnitude = value.to(tl.int32, bitcast=True) & _MAGNITUDE
    return tl.where(magnitude < _INFINITY, magnitude, 0)


@triton.jit
def _scale_of(largest: tl.tensor, margin: tl.tensor, TOP: tl.constexpr) -> tl.tensor:
    """The scale for a largest magnitude's pattern; `TOP` is the exponent field of the format's largest number."""
    largest = tl.minimum(largest & _MAGNITUDE, _LARGEST_FINITE)
    counted = largest.to(tl.float32).to(tl.int32, bitcast=True)
    field = tl.where(largest < _SMALLEST_NORMAL, ((counted + _CARRY) >> 23) - 149, (largest + _CARRY) >> 23)
    exponent = tl.minimum(tl.maximum(TOP - field - margin, -126), 126)
    return tl.where(largest == 0, 127 << 23, (exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _narrow(value: tl.tensor, scale: tl.tensor, PLAN: tl.constexpr) -> tl.tensor:
    """The code of a product; `PLAN` is `reference.Plan`."""
    SHIFT: tl.constexpr = PLAN[0]
    pattern = value.to(tl.int32, bitcast=True)
    magnitude = tl.minimum((value * scale).to(tl.int32, bitcast=True) & _MAGNITUDE, PLAN[4])
    is_odd = (magnitude >> SHIFT) & 1
    normal = ((magnitude + ((1 << (SHIFT - 1)) - 1) + is_odd) >> SHIFT) - PLAN[1]
    anchor = tl.full(magnitude.shape, PLAN[3], tl.int32).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + anchor).to(tl.int32, bitcast=True) - PLAN[3]
    code = tl.where(magnitude < PLAN[2], subnormal, normal)
    original = pattern & _MAGNITUDE
    code = tl.where(original == _INFINITY, PLAN[6], code)
    code = tl.where(original > _INFINITY, PLAN[7], code)
    return (code | ((pattern >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _value(code: tl.tensor, IS_E5M2: tl.constexpr) -> tl.tensor:
    """The FP32 value of a code."""
    FIRST: tl.constexpr = 4 if IS_E5M2 else 8  # the smallest normal code
    SPECIAL: tl.constexpr = 0x7C if IS_E5M2 else 0x7F  # the first code that is no number
    SHIFT: tl.constexpr = 21 if IS_E5M2 else 20
    BIAS: tl.constexpr = 112 << 2 if IS_E5M2 else 120 << 3
    ULP: tl.constexpr = 2.0**-16 if IS_E5M2 else 2.0**-9  # of the subnormals
    magnitude = code & 0x7F
    small = (magnitude.to(tl.float32) * ULP).to(tl.int32, bitcast=True)
    pattern = tl.where(magnitude < FIRST, small, (magnitude + BIAS) << SHIFT)
    special = tl.where(magnitude == 0x7C, _INFINITY, 0x7FC00000)
    pattern = tl.where(magnitude >= SPECIAL, special, pattern)
    return (pattern | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def largest_kernel(
    x: tl.tensor,
    out: tl.tensor,
    length: tl.tensor,
    total: tl.tensor,
    IS_BF16: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The largest finite magnitude of one stretch; the last of `total` elements may be short."""
    stretch = tl.program_id(0).to(tl.int64)
    largest = _largest(x, stretch * length, tl.minimum(length, total - stretch * length), IS_BF16, BLOCK)
    tl.store(out + stretch, largest.to(tl.float32, bitcast=True))


@triton.jit
def _largest(
    x: tl.tensor, start: tl.tensor, count: tl.tensor, IS_BF16: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    largest = tl.zeros((BLOCK,), tl.int32)
    for i in range(0, count, BLOCK):
        at = i + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, _finite_magnitude(_loaded(x + start + at, at < count, IS_BF16)))
    return tl.max(largest, axis=0)


@triton.jit
def largest_column_kernel(
    x: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    IS_BF16: tl.constexpr,
    ROWS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The largest finite magnitude of each of some columns, over some rows."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    largest = tl.zeros((HEIGHT, WIDTH), tl.int32)
    for i in range(0, ROWS, HEIGHT):
        row = first + i + tl.arange(0, HEIGHT)
        here = (row < rows)[:, None] & (column < columns)[None, :]
        value = _loaded(x + row[:, None] * columns + column[None, :], here, IS_BF16)
        largest = tl.maximum(largest, _finite_magnitude(value))
    found = tl.max(largest, axis=0).to(tl.float32, bitcast=True)
    tl.store(out + tl.program_id(0).to(tl.int64) * columns + column, found, mask=column < columns)


@triton.jit
def finish_kernel(
    parts: tl.tensor,
    largest_out: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    margin: tl.tensor,
    TOP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The largest of each column of the parts, and its scale."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    largest = tl.zeros((HEIGHT, WIDTH), tl.int32)
    for i in range(0, rows, HEIGHT):
        row = i + tl.arange(0, HEIGHT)
        here = (row < rows)[:, None] & (column < columns)[None, :]
        part = tl.load(parts + row[:, None].to(tl.int64) * columns + column[None, :], mask=here, other=0)
        largest = tl.maximum(largest, part.to(tl.int32, bitcast=True) & _MAGNITUDE)
    found = tl.max(largest, axis=0)
    tl.store(largest_out + column, found.to(tl.float32, bitcast=True), mask=column < columns)
    if HAS_SCALES:
        tl.store(scales + column, _scale_of(found, margin, TOP), mask=column < columns)


@triton.jit
def cast_kernel(
    x: tl.tensor,
    scales: tl.tensor,
    codes: tl.tensor,
    parts: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    PLAN: tl.constexpr,
    ROW_STEP: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
    IS_BF16: tl.constexpr,
    KEEPS_LARGEST: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The codes of one tile, and its largest finite magnitude."""
    row, column, here = _place(rows, columns, HEIGHT, WIDTH)
    at = row * columns + column
    value = _loaded(x + at, here, IS_BF16)
    scale = tl.load(scales + row * ROW_STEP + column * COLUMN_STEP, mask=here, other=0)
    tl.store(codes + at, _narrow(value, scale, PLAN), mask=here)
    if KEEPS_LARGEST:
        largest = tl.max(tl.max(_finite_magnitude(value), axis=1), axis=0)
        tl.store(parts + tl.program_id(0), largest.to(tl.float32, bitcast=True))


@triton.jit
def quantize_rows_kernel(
    x: tl.tensor,
    scales: tl.tensor,
    codes: tl.tensor,
    columns: tl.tensor,
    margin: tl.tensor,
    PLAN: tl.constexpr,
    IS_BF16: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row's scale and codes."""
    row = tl.program_id(0).to(tl.int64)
    start = row * columns
    TOP: tl.constexpr = PLAN[4] >> 23
    scale = _scale_of(_largest(x, start, columns, IS_BF16, BLOCK), margin, TOP)
    tl.store(scales + row, scale)
    for i in range(0, columns, BLOCK):
        at = i + tl.arange(0, BLOCK)
        value = _loaded(x + start + at, at < columns, IS_BF16)
        tl.store(codes + start + at, _narrow(value, scale, PLAN), mask=at < columns)


@triton.jit
def widen_kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    ROW_STEP: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
    IS_E5M2: tl.constexpr,
    IS_BF16: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The values of one tile's codes."""
    row, column, here = _place(rows, columns, HEIGHT, WIDTH)
    at = row * columns + column
    scale = tl.load(scales + row * ROW_STEP + column * COLUMN_STEP, mask=here, other=0)
    value = _value(tl.load(codes + at, mask=here, other=0).to(tl.int32), IS_E5M2) * scale
    if IS_BF16:
        pattern = value.to(tl.int32, bitcast=True)
        nearest = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
        tl.store(out + at, tl.where(value != value, 0x7FC0, nearest).to(tl.int16), mask=here)
    else:
        tl.store(out + at, value, mask=here)


@triton.jit
def _place(rows: tl.tensor, columns: tl.tensor, HEIGHT: tl.constexpr, WIDTH: tl.constexpr) -> tl.tuple:
    """Rows (int64) and columns of this program's tile, and which of its elements exist."""
    across = tl.cdiv(columns, WIDTH)
    row = (tl.program_id(0) // across).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    column = (tl.program_id(0) % across).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)[None, :]
    return row, column, (row < rows) & (column < columns)
