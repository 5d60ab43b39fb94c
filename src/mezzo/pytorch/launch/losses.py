"""A loss outside the model: what its FP32 copy of the logits takes, so that a note can say it.

A model's outputs leave its region as FP32, because the script expects them so; a cross entropy of the script's own then
keeps FP32 logits and their log-softmax for backward. Inside the model's forward, in the region, it reads the
16-bit logits and keeps no copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WORTH_TELLING = 2**20
"""Bytes from which on a note says what the copy takes."""

# How far below the loss a cross entropy is looked for: sums and means of a few of them, scalings, selections.
_NODES = 64
# What only shows a tensor in another shape, between the logits and the loss.
_SHAPES = (
    *("View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "Slice", "Select", "T", "Alias"),
    *("Squeeze", "Unsqueeze", "Clone"),
)


def fp32_logits(loss: Tensor) -> int:
    """Bytes of the FP32 logits and log-softmaxes that `loss` keeps, of logits that were 16 bits; 0 for none.

    Reads autograd's graph and computes nothing.
    """
    found = 0
    queue: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while queue and len(seen) < _NODES:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "LogSoftmaxBackward0":
            result = node._saved_result
            if result.dtype is torch.float32 and _was_16_bits(node):
                found += 2 * int(result.nbytes)
            continue
        queue += [parent for parent, _ in node.next_functions]
    return found


def _was_16_bits(node: Any) -> bool:
    """Whether what the log-softmax read was a 16-bit tensor, widened."""
    for _ in range(8):
        before, node = node, next((parent for parent, _ in node.next_functions if parent is not None), None)
        if node is None:
            return False
        if before.name() == "ToCopyBackward0":
            return node._input_metadata[0].dtype in (torch.bfloat16, torch.float16)
        if node.name() != "ToCopyBackward0" and node.name().removesuffix("Backward0") not in _SHAPES:
            return False
    return False
