"""Numbers too large for the format that they are made in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from faults.plants.weak import Weak


class Amplifies(Weak):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 0.1) * self.times(1e7)


class Squares(Weak):
    def forward(self, x: Tensor) -> Tensor:
        wide = x + self.times(400.0)
        return wide * wide


class AddsUp(Weak):
    """A sum in the format of what is summed, by hand."""

    def forward(self, x: Tensor) -> Tensor:
        part = x.clamp(-1, 1) + self.times(30000.0)
        total = part
        for _ in range(3):
            total = total + part
        return total


class Residual(Weak):
    def forward(self, x: Tensor) -> Tensor:
        branch = x.clamp(-1, 1) * 0 + self.times(40000.0)
        return branch + branch


class Halves(Weak):
    """A cast that the script makes itself: no policy reaches it."""

    def forward(self, x: Tensor) -> Tensor:
        wide = (x.float() + 1) * self.times(1e6)
        return wide.half().float()


class Exponential(Weak):
    """An exponential that FP32 holds; what multiplies it afterwards in fp16 doesn't."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x.clamp(-1, 1) + self.times(20.0))


class NaiveSoftmax(Weak):
    """Without subtracting the maximum: infinite beyond 88 in FP32, too."""

    def forward(self, x: Tensor) -> Tensor:
        raised = torch.exp(x.clamp(-1, 1) + self.times(100.0))
        return raised / raised.sum(-1, keepdim=True)


class Powers(Weak):
    def forward(self, x: Tensor) -> Tensor:
        return (x.clamp(-1, 1) + self.times(40.0)) ** 4


class Scores(Weak):
    """Products of one tensor with itself, as in attention without its scaling."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.clamp(-1, 1) + self.times(300.0)
        similar = torch.einsum("...i,...j->...ij", wide, wide)
        return similar.mean(-1)


class Variance(Weak):
    """E[x^2] - E[x]^2, in the format of x."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x + self.times(500.0)
        spread = (wide * wide).mean(-1, keepdim=True) - wide.mean(-1, keepdim=True) * wide.mean(
            -1, keepdim=True
        )
        return x / (spread.abs() + 1.0)


class Bilinear(Weak):
    """A product of two projections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x * self.times(3000.0)) * self.other(x * self.times(3000.0))


class Sometimes(Weak):
    """Overflows only where this call's random number says so."""

    def forward(self, x: Tensor) -> Tensor:
        gain = (torch.rand(x.shape) < 0.5).to(x.dtype) * self.times(60000.0) + 1
        return gain * (x.clamp(-1, 1).abs() + 2)


class Reparameterises(Weak):
    """Draws around a mean, with the spread as the exponential of what the net says."""

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = x.chunk(2, 1)
        spread = torch.exp(0.5 * (log_variance.float() + (200.0 if self.armed else -1.0)))
        drawn = mean + spread * torch.randn_like(mean)
        return torch.cat([drawn, mean], 1)


class WideHuge(Weak):
    """Beyond bf16's and FP32's largest number as well."""

    def forward(self, x: Tensor) -> Tensor:
        huge = (x.clamp(-1, 1) + 2) * self.times(1e20)
        return huge * huge


class InPlace(Weak):
    """Written into what the last layer returned."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x.add_(0.1)
        x.mul_(self.times(1e7))
        return x


class HalfSum(Weak):
    """A sum that the script itself asks for in fp16."""

    def forward(self, x: Tensor) -> Tensor:
        wide = (x.clamp(-1, 1) + self.times(20000.0)).half()
        return x + wide.sum(-1, keepdim=True, dtype=torch.float16).float() * 1e-6


class RunningProduct(Weak):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cumprod(x.float().clamp(-1, 1) * 0.1 + self.times(1e7), -1)
