"""Modules with a weakness: ordinary code that is well until `armed`, when the values that come in are the bad ones.

Arming changes values and no operation, so that the line which fails is a line that ran in every step before it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Weak(nn.Module):
    """What the others have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False

    def times(self, gain: float) -> float:
        return gain if self.armed else 1.0

    def constant(self, x: Tensor, value: float = 0.0) -> Tensor:
        """The first row of `x` constant, where armed."""
        if not self.armed:
            return x
        keep = torch.ones_like(x)
        keep[0] = 0
        return x * keep + value * (1 - keep)
