"""FP32 gradients of 16-bit parameters: what arrives in 16 bits is added to an FP32 `.grad` and freed.

A sum of many 16-bit gradients in 16 bits loses whatever is under half an ulp of the sum so far: in bf16 the
257th of equal terms no longer counts. PyTorch's engine keeps the sum in another format than the parameter's
where `p.grad_dtype` says so (torch 2.10), and frees each gradient that arrives once it is added. So the cost
is 4 bytes a parameter, and the largest gradient beside them while it is being added.

Where a weight is used several times in one loss (tied), its gradients wait in the engine for each other: in
FP32 too, another 4 bytes for that weight until the last one has come.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class FP32Gradients:
    """Makes the gradients of 16-bit parameters FP32, until `undo`."""

    def __init__(self) -> None:
        self._changed: dict[int, tuple[Tensor, torch.dtype | None]] = {}

    def cover(self, params: Iterable[Tensor]) -> None:
        """Let the gradients of these parameters be FP32; those that are covered, or FP32, stay as they are.

        A gradient that is there already is converted.
        """
        for param in params:
            if id(param) in self._changed or param.dtype not in SIXTEEN_BITS:
                continue
            before = param.grad_dtype
            if before is not torch.float32:
                _set(param, torch.float32)
                self._changed[id(param)] = (param, before)

    def undo(self) -> None:
        """Put every parameter's `grad_dtype` back; a gradient that is there is converted with it."""
        for param, before in self._changed.values():
            _set(param, before)
        self._changed.clear()


def _set(param: Tensor, dtype: torch.dtype | None) -> None:
    grad, param.grad = param.grad, None
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad if dtype is None else grad.to(dtype)
