"""Window: the losses between two turns of the optimizer, and what each one's backward starts from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The largest seed of a backward that an fp16 loss can hold.
_FP16_SEED = 2.0**15


@dataclass
class Window:
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

    def begin(self, loss: Tensor, scale: Tensor | None) -> None:
        """Take the scale of this window's losses, if the loss is its first."""
        if self.seen == 0 and scale is not None:
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
