"""The sum of squares of all gradients: its root is the norm for clipping, and it shows any overflow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.plain import is_dense

BLOCK = 1 << 14
"""Elements per FP64 sum of the reference: below the size from which PyTorch splits a sum between threads."""


def sum_of_squares(grads: Sequence[Tensor]) -> Tensor:
    """The FP64 sum of squares of one device's gradients: NaN or infinite if and only if some element is."""
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    devices = {grad.device for grad in grads}
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"sum_of_squares(): the gradients are on {named}. Call it once per device.")
    dense = [grad if is_dense(grad) else grad.contiguous() for grad in grads]
    if backend.implementation(dense[0].device.type) != "numba":
        return reference(dense)
    from mezzo.pytorch.kernels.gradient_norm import cpu

    return cpu.sum_of_squares(dense)


@torch.no_grad()
def reference(grads: Sequence[Tensor]) -> Tensor:
    """In PyTorch operations: on a CPU in blocks that no number of threads changes, elsewhere as few as possible."""
    if grads[0].device.type != "cpu":
        norms = torch._foreach_norm([grad for grad in grads if grad.numel()], 2, torch.float64)
        return torch.stack(norms).square().sum() if norms else grads[0].new_zeros((), dtype=torch.float64)
    blocks = (block for grad in grads for block in grad.as_strided((grad.numel(),), (1,)).split(BLOCK))
    return sum((block.double().square().sum() for block in blocks), torch.zeros((), dtype=torch.float64))
