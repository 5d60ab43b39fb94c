"""The sum of squares of all gradients: its root is the norm that clipping needs, and it shows any overflow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.plain import is_dense

__all__ = ["sum_of_squares"]


def sum_of_squares(grads: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements of all gradients, in FP64, without a host sync.

    Equals ``sum(g.double().square().sum() for g in grads)`` but for the order of the sum, which is fixed: the
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
    # The kernels read a stretch of memory in order.
    kernel = backend.load(__name__, next(iter(devices)).type)
    result: Tensor = kernel.sum_of_squares([grad if is_dense(grad) else grad.contiguous() for grad in grads])
    return result
