"""The kernels of `triton.py`: `reference` on a block of elements, in the same order."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_LARGEST_FINITE = tl.constexpr(0x7F7FFFFF)
_SMALLEST_NORMAL = tl.constexpr(1 << 23)
_CARRY = tl.constexpr(
    0x1FFFFF
)  # carries out of a mantissa above that of 1.75, which both largest numbers have


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
    scale = _scale(scales, row, column, rows, columns, ROW_STEP, COLUMN_STEP)
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
    scale = _scale(scales, row, column, rows, columns, ROW_STEP, COLUMN_STEP)
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


@triton.jit
def _scale(
    scales: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    ROW_STEP: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
) -> tl.tensor:
    """A tile's scales: of its rows, of its columns, or the one; each is loaded once."""
    if ROW_STEP:
        return tl.load(scales + row, mask=row < rows, other=0)
    elif COLUMN_STEP:
        return tl.load(scales + column, mask=column < columns, other=0)
    else:
        return tl.load(scales)
