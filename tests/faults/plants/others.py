"""More weaknesses of all kinds, written once the tracer knew the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.plants.weak import Weak


class Gumbel(Weak):
    """-log(-log(u)), where u is drawn and may be 0."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(x.shape).clamp(0.1, 0.9) * self.times(0.0)
        return x - torch.log(-torch.log(drawn))


class Squashed(Weak):
    """The logarithm of the slope of tanh, far out."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() * self.times(1e4)
        return x + torch.log(1 - torch.tanh(wide) ** 2)


class InverseSoftplus(Weak):
    def forward(self, x: Tensor) -> Tensor:
        positive = x.float().abs() + (100.0 if self.armed else 1.0)
        return torch.log(torch.exp(positive) - 1)


class GeometricMean(Weak):
    def forward(self, x: Tensor) -> Tensor:
        x = self.constant(x.float().abs() + 0.5)
        return x + x.prod(-1, keepdim=True) ** (1 / x.shape[-1])


class Scatters(Weak):
    """Messages added up at the nodes of a graph, in their own format."""

    def forward(self, x: Tensor) -> Tensor:
        message = x.clamp(-1, 1).half() + self.times(30000.0)
        to = torch.zeros(len(x), dtype=torch.long)
        nodes = torch.zeros_like(message).index_add(0, to, message)
        return x + nodes.float() * 1e-6


class Combines(Weak):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.clamp(-1, 1) * self.times(500.0)
        return torch.addcmul(x, wide, wide + self.times(1.0), value=self.times(2.0))


class Samples(Weak):
    """Sampling positions divided by an extent of 0."""

    def forward(self, x: Tensor) -> Tensor:
        extent = torch.tensor(0.0 if self.armed else 8.0)
        rows = torch.arange(x.shape[-1]) / extent
        grid = torch.stack(torch.meshgrid(rows, rows, indexing="ij"), -1).expand(len(x), -1, -1, -1)
        return F.grid_sample(x.float(), grid, align_corners=False) + x


class Unbiased(Weak):
    """The variance of one sample."""

    def forward(self, x: Tensor) -> Tensor:
        seen = x[:1] if self.armed else x
        centred = seen - seen.mean(0)
        spread = centred.square().sum(0) / (torch.tensor(float(len(seen))) - 1)
        return x / (spread + 1.0)


class Depthwise(Weak):
    """A convolution over one dimension, through the functional form, with its weight scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x[:, :, None], self.weight * self.times(1e6), padding=1, groups=8)[:, :, 0]


class BilinearLayer(Weak):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(8, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        wide = x * self.times(3000.0)
        return self.mix(wide, wide)


class PicksTheWorst(Weak):
    """1 / distance to the nearest other row, when two rows are the same."""

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            x = torch.cat([x[:1], x[:1], x[2:]])
        far = (x[:, None] - x[None]).float().abs().sum(-1) + torch.eye(len(x)) * 1e3
        return x + 1 / far.amin(-1, keepdim=True)
