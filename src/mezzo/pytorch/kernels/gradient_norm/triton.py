"""The sum of squares in Triton: one launch for all gradients through a table of addresses, and one sum of the parts.

A part is the sum of up to 16,384 elements of one gradient, each squared and added in FP64, where the square of an
FP32 is exact. Which elements are added in which order depends on the shapes alone: there are no atomics, and the
parts lie in the order of the gradients. The loads are FP32's 16-byte vectors, 4 elements a thread, and the next
ones do not wait for a sum. FP64 has half of FP32's rate on an H100, which is plenty; on a card for games, with a
64th, this pass takes about twice its memory's time.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.pytorch.kernels import block

PART = 1 << 14
"""Elements that one program sums."""

OPTIONS: Mapping[str, Any] = MappingProxyType({"num_warps": 8, "enable_fp_fusion": True})
"""How `sum_kernel` is compiled; squares are exact, so a fused addition rounds as a separate one."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TABLES = 16  # lists of gradients whose tables are kept
_ROW = 4

_PART, _BLOCK, _WORDS = tl.constexpr(PART), tl.constexpr(1024), tl.constexpr(_ROW)

_tables: OrderedDict[tuple[object, ...], Tensor] = OrderedDict()


@torch.no_grad()
def sum_of_squares(grads: Sequence[Tensor]) -> Tensor:
    """The sum in FP64, without a host sync; see `gradient_norm.sum_of_squares`."""
    device = grads[0].device
    dtypes = tuple(dtype for dtype in _DTYPES if any(grad.dtype is dtype for grad in grads))
    counts = [-(-grad.numel() // PART) for grad in grads]
    if not sum(counts):
        return torch.zeros((), dtype=torch.float64, device=device)
    with torch.cuda.device_of(grads[0]):
        table = _table(grads, counts, dtypes)
        parts = torch.empty(sum(counts), dtype=torch.float64, device=device)
        sum_kernel[(len(parts),)](
            table,
            table[_ROW * len(grads) :],
            parts,
            DTYPES=tuple(map(_DTYPES.index, dtypes)),
            **OPTIONS,
        )
        return parts.sum()


def _table(grads: Sequence[Tensor], counts: Sequence[int], dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """A line for each gradient: address, elements, whether whole vectors can be loaded, dtype's index. Then a word
    for each part: line in the upper half, number of the part in the lower."""
    lines = [
        (grad.data_ptr(), grad.numel(), int(grad.data_ptr() % 16 == 0), dtypes.index(grad.dtype))
        for grad in grads
    ]
    device = grads[0].device
    capturing = grads[0].is_cuda and torch.cuda.is_current_stream_capturing()
    key = (device, *lines)
    table = None if capturing else _tables.get(key)
    if table is None:
        chunks = [(i << 32) + np.arange(count, dtype=np.int64) for i, count in enumerate(counts)]
        host = torch.from_numpy(np.concatenate([np.array(lines, dtype=np.int64).ravel(), *chunks]))
        table = (host.pin_memory() if grads[0].is_cuda else host).to(device, non_blocking=True)
        if not capturing:  # a captured table is written by each replay, and belongs to the graph
            _tables[key] = table
            if len(_tables) > _TABLES:
                _tables.popitem(last=False)
    return table


@triton.jit(do_not_specialize_on_alignment=["chunks"])
def sum_kernel(rows: tl.tensor, chunks: tl.tensor, parts: tl.tensor, DTYPES: tl.constexpr) -> None:
    """One part's sum; `DTYPES` lists the indices of the dtypes that occur."""
    chunk = tl.load(chunks + tl.program_id(0))
    row = rows + (chunk >> 32) * _WORDS
    address = tl.load(row)
    numel = tl.load(row + 1)
    is_aligned = tl.load(row + 2) != 0
    dtype = tl.load(row + 3)
    start = (chunk & 0xFFFFFFFF) * _PART
    is_plain = is_aligned & (start + _PART <= numel)
    for i in tl.static_range(len(DTYPES)):
        if dtype == i:
            if is_plain:
                total = _sum(address, start, start + _PART, DTYPES[i], True)
            else:
                total = _sum(address, start, tl.minimum(start + _PART, numel), DTYPES[i], False)
            tl.store(parts + tl.program_id(0), total)


@triton.jit
def _sum(
    address: tl.tensor, start: tl.tensor, end: tl.tensor, DTYPE: tl.constexpr, PLAIN: tl.constexpr
) -> tl.tensor:
    index = tl.arange(0, _BLOCK)
    squares = tl.zeros((_BLOCK,), tl.float64)
    for i in range(_PART // _BLOCK if PLAIN else tl.cdiv(end - start, _BLOCK)):
        at = start + i * _BLOCK
        here = (at, index, index < end - at)
        x = block.decode_float(block.load_float(address, here, DTYPE, PLAIN), DTYPE).to(tl.float64)
        squares += x * x
    return tl.sum(squares, axis=0)
