"""Logits of any layout as matrices [n, classes] with classes next to each other, none large unless it is a view.

A matrix, and images whose channels come last in memory, are one view. Of others (``[N, C, d1, ...]``) a block at a
time is copied in 16 bits, so that what is held besides logits and gradient stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

BLOCK = 1 << 19
"""Elements that are copied at once: the copy is still in a cache when a kernel reads it."""


class Block(NamedTuple):
    """A part of ``[N, C, places]``.

    Args:
        samples: of the first dimension.
        places: of the last.
        rows: the same among the N * places rows that a flattened target has.
    """

    samples: slice
    places: slice
    rows: slice


def as_matrix(tensor: Tensor) -> Tensor | None:
    """``[N, C, ...]`` as a view [n, C] with classes next to each other, or None where that is not possible.

    The rows of a matrix may lie apart, as in ``logits[:, :vocabulary]``.
    """
    classes = tensor.shape[1]
    if tensor.dim() > 2:
        last = tensor.movedim(1, -1)
        return last.view(-1, classes) if last.is_contiguous() else None
    return tensor if classes == 1 or tensor.stride(1) == 1 else None


def empty_like(logits: Tensor) -> Tensor:
    """A gradient to be written: `as_matrix` finds a view of it if it found one of the logits."""
    if logits.dim() > 2 and as_matrix(logits) is not None:
        return logits.new_empty(logits.movedim(1, -1).shape).movedim(-1, 1)
    return logits.new_empty(logits.shape)


def blocks(logits: Tensor) -> Iterator[Block]:
    """Walk over all rows of ``[N, C, ...]``, in the order of a flattened target."""
    samples, classes = logits.shape[:2]
    places = logits.numel() // (samples * classes) if logits.numel() else 0
    if not places:
        return
    width = min(places, max(1, BLOCK // classes))
    depth = max(1, BLOCK // (classes * places))
    for first in range(0, samples, depth):
        last = min(first + depth, samples)
        for start in range(0, places, width):
            stop = min(start + width, places)
            rows = slice(first * places + start, (last - 1) * places + stop)
            yield Block(slice(first, last), slice(start, stop), rows)


def take(tensor: Tensor, block: Block) -> Tensor:
    """A copy [n, C] of a block."""
    part = _part(tensor, block)
    return (
        part.contiguous().view(-1, part.shape[2]) if not part.is_contiguous() else part.flatten(0, 1).clone()
    )


def put(tensor: Tensor, block: Block, rows: Tensor) -> None:
    """Write a block's rows [n, C] to where `take` has them from."""
    part = _part(tensor, block)
    part.copy_(rows.view(part.shape))


def _part(tensor: Tensor, block: Block) -> Tensor:
    flat = tensor.flatten(2) if tensor.dim() > 2 else tensor[:, :, None]
    return flat[block.samples, :, block.places].transpose(1, 2)
