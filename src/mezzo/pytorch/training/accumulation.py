"""FP32 gradients of 16-bit parameters: what arrives in 16 bits is added to an FP32 `.grad` and freed.

A sum of many 16-bit gradients in 16 bits loses whatever is under half an ulp of the sum so far: in bf16 the
257th of equal terms no longer counts. PyTorch's engine keeps the sum in another format than the parameter's
where `p.grad_dtype` says so (torch 2.10), and frees each gradient that arrives once it is added. So the cost
is 4 bytes a parameter, and the largest gradient beside them while it is being added.

Where a weight is used several times in one loss (tied), its gradients wait in the engine for each other: in
FP32 too, another 4 bytes for that weight until the last one has come.

DistributedDataParallel averages gradients in buckets of the parameters' own format, behind the engine's back.
There the sums are kept apart, and each loss's averaged 16-bit gradients are added to them after its backward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.pytorch.scaling import gradients

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class Gradients:
    """Gradients as PyTorch keeps them, in `.grad` and in the parameter's format."""

    def cover(self, optimizer: Optimizer) -> None:
        """Prepare an optimizer's parameters for a window's first backward."""

    def take(self, optimizer: Optimizer) -> None:
        """Add up what one loss's backward has left in `.grad`."""

    def give(self) -> None:
        """Put the sums into `.grad`, for the optimizer's turn."""

    def clear(self) -> None:
        """Forget sums that are kept apart."""

    def of(self, param: Tensor) -> Tensor | None:
        """A parameter's gradient so far."""
        return param.grad

    def put(self, param: Tensor, grad: Tensor | None) -> None:
        """Go on from a gradient that `of` gave."""
        param.grad = grad

    def undo(self) -> None:
        """Leave the parameters as they were before `cover`."""


class FP32Gradients(Gradients):
    """The engine keeps the gradients of 16-bit parameters in FP32."""

    def __init__(self) -> None:
        self._changed: dict[int, tuple[Tensor, torch.dtype | None]] = {}

    def cover(self, optimizer: Optimizer) -> None:
        """Let the gradients of those in 16 bits be FP32; a gradient that is there already is converted."""
        for param in gradients.parameters(optimizer):
            if id(param) not in self._changed and param.dtype in SIXTEEN_BITS:
                self._changed[id(param)] = (param, param.grad_dtype)
                _set(param, torch.float32)

    def undo(self) -> None:
        """Put every parameter's `grad_dtype` back; a gradient that is there is converted with it."""
        for param, before in self._changed.values():
            _set(param, before)
        self._changed.clear()


class FP32Sums(Gradients):
    """FP32 sums beside the 16-bit gradients of DistributedDataParallel, which need their own 2 bytes."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def take(self, optimizer: Optimizer) -> None:
        """Add the 16-bit gradients to the sums, and let go of them."""
        for param in gradients.parameters(optimizer):
            grad = param.grad
            if grad is None or param.dtype not in SIXTEEN_BITS:
                continue
            kept = self._sums.get(id(param))
            if kept is None:
                self._sums[id(param)] = (param, grad.to(torch.float32))
            else:
                kept[1].add_(grad)
            param.grad = None

    def give(self) -> None:
        """Make each sum its parameter's gradient."""
        for param, total in self._sums.values():
            _set(param, torch.float32)
            param.grad = total

    def clear(self) -> None:
        """Forget the sums, and let `.grad` be of the parameter's format again."""
        for param, _ in self._sums.values():
            param.grad = None
            _set(param, param.dtype)
        self._sums.clear()

    def of(self, param: Tensor) -> Tensor | None:
        """A parameter's sum so far; the gradient itself of an FP32 one."""
        kept = self._sums.get(id(param))
        return param.grad if kept is None else kept[1]

    def put(self, param: Tensor, grad: Tensor | None) -> None:
        """Go on from a sum that `of` gave."""
        if grad is None or param.dtype not in SIXTEEN_BITS:
            param.grad = grad
        else:
            self._sums[id(param)] = (param, grad.to(torch.float32))

    def undo(self) -> None:
        """Forget the sums."""
        self.clear()


def _set(param: Tensor, dtype: torch.dtype | None) -> None:
    grad, param.grad = param.grad, None
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad if dtype is None else grad.to(dtype)
