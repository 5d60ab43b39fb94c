"""The sum of squares as PyTorch operations: on a CPU in blocks that no number of threads changes, elsewhere in as few
kernels as PyTorch makes of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mezzo.pytorch.kernels.optimizer_step.reference import flat

BLOCK = 1 << 14
"""Elements that one FP64 sum covers: below the size from which PyTorch shares a sum out among threads."""


@torch.no_grad()
def sum_of_squares(grads: Sequence[Tensor]) -> Tensor:
    """Sum the squares of each block, then the blocks' sums in order; see `gradient_norm.sum_of_squares`."""
    if grads[0].device.type != "cpu":
        norms = torch._foreach_norm([grad for grad in grads if grad.numel()], 2, torch.float64)
        return torch.stack(norms).square().sum() if norms else grads[0].new_zeros((), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for grad in grads:
        elements = flat(grad)
        for start in range(0, elements.numel(), BLOCK):
            block = elements[start : start + BLOCK].to(torch.float64)
            total += (block * block).sum()
    return total
