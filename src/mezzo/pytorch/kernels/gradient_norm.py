"""The sum of squares of all gradients: its root is the norm that clipping needs, and it shows any overflow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.plain import is_dense

__all__ = ["sum_of_squares"]

BLOCK = 1 << 14
"""Elements that one FP64 sum of the reference covers: below the size from which PyTorch shares a sum out to threads."""


def sum_of_squares(grads: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements of all gradients, in FP64, without a host sync.

    Equals ``sum(g.double().square().sum() for g in grads)`` but for the order of the sum, which on a CPU is fixed: the
    result does not depend on the number of threads. It is NaN or infinite if and only if some element is, since
    the square of a finite FP32 is far from FP64's largest: one pass gives the norm and the finite check.

    Args:
        grads: FP32, bf16 or fp16 tensors of any shape and strides, on one device.

    Returns:
        0-dim FP64 on their device; the CPU's 0 for no gradients at all.

    Raises:
        UsageError: gradients on more than one device.
    """
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    devices = {grad.device for grad in grads}
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"sum_of_squares(): gradients on {named}. Give those of one device at a time.")
    # A stretch of memory is read in order.
    dense = [grad if is_dense(grad) else grad.contiguous() for grad in grads]
    if backend.implementation(dense[0].device.type) != "numba":
        return reference(dense)
    from mezzo.pytorch.kernels import cpu_reductions

    return cpu_reductions.sum_of_squares(dense)


@torch.no_grad()
def reference(grads: Sequence[Tensor]) -> Tensor:
    """In PyTorch operations: on a CPU in blocks that no number of threads changes, elsewhere as few as possible."""
    if grads[0].device.type != "cpu":
        norms = torch._foreach_norm([grad for grad in grads if grad.numel()], 2, torch.float64)
        return torch.stack(norms).square().sum() if norms else grads[0].new_zeros((), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for grad in grads:
        elements = grad.as_strided((grad.numel(),), (1,))
        for start in range(0, elements.numel(), BLOCK):
            total += elements[start : start + BLOCK].to(torch.float64).square().sum()
    return total
