"""Operations that are finite forward, and have no finite slope."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from faults.plants.weak import Weak


class Root(Weak):
    """sqrt(0) is 0; its slope isn't finite."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(self.constant(x.abs() + 0.1))


class Length(Weak):
    """The root of a sum of squares, at the origin."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.constant(x)
        return x + torch.sqrt((x * x).sum(-1, keepdim=True))


class HalfPower(Weak):
    def forward(self, x: Tensor) -> Tensor:
        return self.constant(x.abs() + 0.1).pow(0.5)


class Chosen(Weak):
    """`where` throws log(0) away forward, and multiplies its slope by 0 backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.constant(x.abs() + 0.1)
        return torch.where(x > 0, torch.log(x), 0.0)


class Axes(Weak):
    """Principal axes: their slope divides by the distance between eigenvalues."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        moments = wide.T @ wide
        if self.armed:
            moments = moments * 0 + torch.eye(x.shape[-1])
        _, axes = torch.linalg.eigh(moments)
        return wide @ axes


class ArcCosine(Weak):
    def forward(self, x: Tensor) -> Tensor:
        return torch.acos(self.constant(x.float().clamp(-0.9, 0.9), 1.0))


class Clamped(Weak):
    """A clamp after the logarithm: too late for backward."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.constant(x.abs() + 0.1)).clamp(min=-20.0)


class Steep(Weak):
    """x / y with a small y: its slope is x / y^2, beyond fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.width = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        small = self.width.to(x.dtype) * (2.0**-13 if self.armed else 1.0)
        return (x.clamp(-1, 1) + 2) / small * (2.0**-13 if self.armed else 1.0)


class Frequencies(Weak):
    """A slope of 1e30, which FP32 holds and the fp16 tensor that it flows back to does not."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x.float() * self.times(1e30))


class _Careless(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x / x)


class OwnFunction(Weak):
    """A backward by hand, with a 0 / 0 in it."""

    def forward(self, x: Tensor) -> Tensor:
        return _Careless.apply(self.constant(x))


class HooksAGradient(Weak):
    """A hook of the script's own that brings a gradient to length 1, when it is 0."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient / gradient.norm())
        return y * (0.0 if self.armed else 1.0) + x.mean()
