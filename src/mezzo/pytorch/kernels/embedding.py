"""`embedding` and `embedding_bag` over a 16-bit table, with a gradient that is summed in FP32 and rounded once.

A CPU adds up the gradients of a token's occurrences in the table's own format: from 256 times what is added, a
bf16 sum stands still (`benchmarks/weight_gradients.py` has figures). The forward is PyTorch's own. The
backward sums the rows that occur in FP32 and rounds each once: no FP32 gradient of the whole table is made.

An FP32 or FP64 table, a sparse gradient (it is not summed before the optimizer coalesces it), and a table that
needs no gradient are left to PyTorch. Under `torch.func`, in compilers, and for tensor subclasses, the same is
made of casts around the op, which all of these know how to take apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.plain import is_plain

_HALVES = (torch.float16, torch.bfloat16)


def embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """The rows of a table, as `aten.embedding` gives them.

    Naive code::

        aten.embedding(weight.float(), indices, ...).to(weight.dtype)

    Args:
        weight: [rows, columns].
        indices: integers of any shape.
        padding_idx: a row whose gradient stays zero; negative for none.
        scale_grad_by_freq: divide each occurrence's gradient by the token's count.
        sparse: PyTorch's own gradient, a sparse one.

    Returns:
        [..., columns], of the table's format.
    """
    if not _is_ours(weight, sparse):
        rows: Tensor = torch.ops.aten.embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)
        return rows
    if not is_plain(weight):
        wide = torch.ops.aten.embedding(weight.float(), indices, padding_idx, scale_grad_by_freq)
        rows = wide.to(weight.dtype)
        return rows
    rows = _Embedding.apply(weight, indices, padding_idx, scale_grad_by_freq)  # type: ignore[no-untyped-call,unused-ignore]
    return rows


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Sums, means or maxima of bags of rows, as `aten.embedding_bag` gives them; see `embedding`.

    With `per_sample_weights` it is the naive code, of which the table's FP32 copy is held for backward.
    """
    if per_sample_weights is not None and per_sample_weights.dtype is not weight.dtype:
        widest = torch.promote_types(per_sample_weights.dtype, weight.dtype)
        weight, per_sample_weights = weight.to(widest), per_sample_weights.to(widest)
    rest = (scale_grad_by_freq, mode, sparse)
    tail = (include_last_offset, padding_idx)
    if not _is_ours(weight, sparse):
        return torch.ops.aten.embedding_bag(weight, indices, offsets, *rest, per_sample_weights, *tail)
    if per_sample_weights is not None or not is_plain(weight):
        samples = None if per_sample_weights is None else per_sample_weights.float()
        wide, *others = torch.ops.aten.embedding_bag(weight.float(), indices, offsets, *rest, samples, *tail)
        return (wide.to(weight.dtype), *others)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return _EmbeddingBag.apply(  # type: ignore[no-untyped-call,unused-ignore]
        weight, indices, offsets, scale_grad_by_freq, mode, include_last_offset, padding
    )


def _is_ours(weight: Tensor, sparse: bool) -> bool:
    return weight.dtype in _HALVES and not sparse and weight.requires_grad and torch.is_grad_enabled()


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rest = (weight.shape[0], padding_idx, scale_grad_by_freq)
        rows: Tensor = torch.ops.aten.embedding(weight, indices, padding_idx, scale_grad_by_freq)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        (grad,) = grads
        # For a second derivative, and for a batch of gradients: by what has them itself.
        if (torch.is_grad_enabled() and grad.requires_grad) or not is_plain(grad):
            wide = torch.ops.aten.embedding_dense_backward(grad.float(), indices, *ctx.rest)
            return wide.to(grad.dtype), None, None, None
        return _summed(grad, indices, *ctx.rest), None, None, None


def _summed(grad: Tensor, indices: Tensor, rows: int, padding_idx: int, scale_grad_by_freq: bool) -> Tensor:
    """The table's gradient, of the format of the one that arrives; each row summed in order, in FP32."""
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


class _EmbeddingBag(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        indices: Tensor,
        offsets: Tensor,
        scale_grad_by_freq: bool,
        mode: int,
        include_last_offset: bool,
        padding_idx: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, bag_of, bag_size, largest = torch.ops.aten._embedding_bag(
            weight, indices, offsets, scale_grad_by_freq, mode, False, None, include_last_offset, padding_idx
        )
        ctx.mark_non_differentiable(bag_of, bag_size, largest)
        ctx.save_for_backward(indices, offsets, bag_of, bag_size, largest)
        ctx.rest = (weight.shape[0], scale_grad_by_freq, mode, padding_idx)
        return out, bag_of, bag_size, largest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, scale_grad_by_freq, mode, padding_idx = ctx.rest
        wide = torch.ops.aten._embedding_bag_backward(
            grads[0].float(),
            *ctx.saved_tensors,
            rows,
            scale_grad_by_freq,
            mode,
            False,
            None,
            padding_idx,
        )
        return wide.to(grads[0].dtype), *[None] * 6
