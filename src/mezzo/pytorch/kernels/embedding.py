"""`embedding` and `embedding_bag` over a 16-bit table, with a gradient that is summed in FP32 and rounded once.

On a CPU PyTorch sums the gradients of a token's occurrences in the table's format, and a bf16 sum stops growing at 256
times the addend; it also rounds a bag's sum before it divides by the count. Here only the rows that occur are FP32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.dtypes import SIXTEEN_BITS
from mezzo.pytorch.kernels.plain import is_plain

_aten = torch.ops.aten
_MAX = 2  # a mode of `embedding_bag`, whose last output is the row of each maximum


def embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``aten.embedding(weight.float(), indices, ...).to(weight.dtype)``, with ATen's arguments."""
    if not _sums_rows(weight, sparse):
        rows: Tensor = _aten.embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)
    elif is_plain(weight):
        rows = _Embedding.apply(weight, indices, padding_idx, scale_grad_by_freq)  # type: ignore[no-untyped-call,unused-ignore]
    else:
        rows = _aten.embedding(weight.float(), indices, padding_idx, scale_grad_by_freq).to(weight.dtype)
    return rows


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    *rest: Any,
) -> Any:
    """``aten.embedding_bag(weight.float(), indices, ...)`` with its output in the format of `weight`."""
    dtype, samples = weight.dtype, per_sample_weights
    if samples is not None and samples.dtype is not dtype:
        dtype = torch.promote_types(samples.dtype, dtype)
        weight, samples = weight.to(dtype), samples.to(dtype)
    if not _sums_rows(weight, sparse) or not indices.numel():
        return _aten.embedding_bag(weight, indices, offsets, scale_grad_by_freq, mode, sparse, samples, *rest)
    samples = None if samples is None else samples.float()
    found, places, table = None, indices, weight
    if is_plain(weight, samples):
        found, places = indices.unique(return_inverse=True)
        places, table = places.to(indices.dtype), _aten.embedding(weight, found)
        if rest[1:] and rest[1] is not None:
            padding = (found == rest[1] % weight.shape[0]).nonzero()
            rest = (rest[0], int(padding) if len(padding) else None)
    wide, *others = _aten.embedding_bag(
        table.float(), places, offsets, scale_grad_by_freq, mode, sparse, samples, *rest
    )
    if found is not None and mode == _MAX:
        others[-1] = found[others[-1]] * (others[1] > 0)[:, None]  # 0 for an empty bag
    return (wide.to(dtype), *others)


def _sums_rows(weight: Tensor, sparse: bool) -> bool:
    """Whether backward sums the gradients of 16-bit rows."""
    return weight.dtype in SIXTEEN_BITS and not sparse and weight.requires_grad and torch.is_grad_enabled()


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rest = (weight.shape[0], padding_idx, scale_grad_by_freq)
        rows: Tensor = _aten.embedding(weight, indices, padding_idx, scale_grad_by_freq)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        (grad,) = grads
        if (torch.is_grad_enabled() and grad.requires_grad) or not is_plain(grad):
            # A second derivative or a batch of gradients: PyTorch's op has both.
            wide = _aten.embedding_dense_backward(grad.float(), indices, *ctx.rest)
            return wide.to(grad.dtype), None, None, None
        return _summed(grad, indices, *ctx.rest), None, None, None


def _summed(grad: Tensor, indices: Tensor, rows: int, padding_idx: int, scale_grad_by_freq: bool) -> Tensor:
    """The table's gradient in the format of `grad`; each row is summed in order, in FP32."""
    found, place, counts = indices.reshape(-1).unique(return_inverse=True, return_counts=True)
    columns = grad.shape[-1]
    sums = grad.new_zeros((len(found), columns), dtype=torch.float32)
    sums.index_add_(0, place, grad.reshape(-1, columns).float())
    if scale_grad_by_freq:
        sums /= counts[:, None]
    result = grad.new_zeros((rows, columns))
    result[found] = sums.to(grad.dtype)
    if padding_idx >= 0:
        result[padding_idx] = 0
    return result
