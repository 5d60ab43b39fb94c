"""Gradient accumulation: the losses between two optimizer steps, and FP32 sums of 16-bit gradients.

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

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.pytorch.step import parameters

SIXTEEN_BITS = (torch.bfloat16, torch.float16)

# The largest seed of a backward that an fp16 loss can hold.
_FP16_SEED = 2.0**15


@dataclass
class Accumulation:
    """The losses between two turns of the optimizer.

    Args:
        accumulate: how many a full one has; each is divided by it.
        seen: how many of them have been accumulated.
        scale: what each was multiplied with, 0-dim FP32; None without a loss scale.
        loss: the last of them, detached; None where it is not known.
    """

    accumulate: int
    seen: int = 0
    scale: Tensor | None = None
    loss: Tensor | None = None

    def begin(self, loss: Tensor, scale: Tensor) -> None:
        """Take the scale of this window's losses, if the loss is its first."""
        if self.seen == 0:
            # A seed of 2**16 is infinite in fp16, and would cost a skipped step before anything was computed.
            self.scale = scale.clamp(max=_FP16_SEED) if loss.dtype is torch.float16 else scale

    def seed(self, loss: Tensor) -> Tensor | None:
        """What the backward of a loss starts from, `scale / accumulate` in its dtype and shape; None for 1."""
        if self.scale is not None:
            return (self.scale.to(loss.device) / self.accumulate).to(loss.dtype).expand_as(loss)
        return torch.full_like(loss, 1.0 / self.accumulate) if self.accumulate > 1 else None

    @property
    def rescale(self) -> float:
        """`accumulate / seen`: what makes the sum of a window that is short follow the mean of its losses."""
        return self.accumulate / self.seen

    @property
    def seed_factor(self) -> Tensor | float:
        """What `seed` multiplies a loss's gradients with."""
        return (1.0 if self.scale is None else self.scale) / self.accumulate

    @property
    def gradient_factor(self) -> Tensor | float:
        """How many times the window's summed gradients are too large."""
        return (1.0 if self.scale is None else self.scale) / self.rescale


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
        for param in parameters(optimizer):
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
        for param in parameters(optimizer):
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
