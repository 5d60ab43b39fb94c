"""The fp8 casts in Triton: integer arithmetic on patterns in the order of `reference.py`, without a host sync.

Codes are written as bytes and bf16 is read as patterns: which conversions a GPU has, and what they make of an infinity,
differs from one to the next. A tensor with one scale is cut into stretches of 16,384 elements, whose largest magnitudes
a second, small launch brings together. A row with its own scale is read twice by one program, from the cache the
second time.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mezzo.pytorch.kernels.fp8 import reference
from mezzo.pytorch.kernels.fp8 import triton_kernels as kernels

_TILE = 1 << 12  # elements that a program holds
_STRETCH = 1 << 14
_WIDTH = 1 << 7  # columns of a program that looks for the largest of each
_ROWS = 1 << 9  # rows of such a program

# The reference's plans as a kernel takes them.
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
        kernels.widen_kernel[(triton.cdiv(rows, height) * triton.cdiv(columns, width),)](
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
            kernels.largest_column_kernel[(parts.shape[0], triton.cdiv(columns, _WIDTH))](
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
        kernels.largest_kernel[(count,)](
            _patterns(x), parts, length, total, IS_BF16=is_bf16, BLOCK=_block(length)
        )
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
        kernels.finish_kernel[(triton.cdiv(columns, width),)](
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
        kernels.cast_kernel[(triton.cdiv(rows, height) * triton.cdiv(columns, width),)](
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
        kernels.quantize_rows_kernel[(x.numel() // columns,)](
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
