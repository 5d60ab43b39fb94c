"""Operations without a finite result for what comes in, forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.plants.weak import Weak


class SmallEps(Weak):
    """1e-8 is 0 in fp16."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.constant(x, 1.0)
        spread = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
        return x / (spread + 1e-8)


class Share(Weak):
    """Its share of a sum that may be 0."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.constant(x).abs()
        return x / x.sum(-1, keepdim=True)


class InverseRoot(Weak):
    def forward(self, x: Tensor) -> Tensor:
        x = self.constant(x, 1.0)
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True))


class Normal(Weak):
    """A normalisation without eps, over a constant row."""

    def __init__(self, norm: nn.Module, value: float = 1.0) -> None:
        super().__init__()
        self.norm = norm
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.constant(x, self.value))


class UnitLength(Weak):
    def __init__(self, eps: float = 0.0) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.constant(x), dim=-1, eps=self.eps)


class Logarithm(Weak):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.constant(x.abs() + 0.1))


class Entropy(Weak):
    """p log p, where 0 log 0 is NaN."""

    def forward(self, x: Tensor) -> Tensor:
        p = torch.softmax(x * self.times(1e4), -1)
        return p * torch.log(p) + x


class Odds(Weak):
    def forward(self, x: Tensor) -> Tensor:
        return torch.logit(torch.sigmoid(x.float() * self.times(1e3)))


class Reciprocal(Weak):
    def forward(self, x: Tensor) -> Tensor:
        return torch.reciprocal(self.constant(x.abs() + 0.1))


class NegativeRoot(Weak):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x.abs() + 1.0 - (2e3 if self.armed else 0.0))


class KeepsNothing(Weak):
    """The mean over what a mask keeps, when it keeps nothing."""

    def forward(self, x: Tensor) -> Tensor:
        keep = (x.detach() > (1e4 if self.armed else -1e4)).to(x.dtype)
        return (x * keep).sum(-1, keepdim=True) / keep.sum(-1, keepdim=True) + x


class MaskedByProduct(Weak):
    """0 times -inf."""

    def forward(self, x: Tensor) -> Tensor:
        closed = torch.zeros(x.shape[-1])
        penalty = closed * (float("-inf") if self.armed else 0.0)
        return x + penalty


class Dropped(Weak):
    """Divided by what dropout may have set to 0; which elements, the generator decides."""

    def forward(self, x: Tensor) -> Tensor:
        return x / F.dropout(torch.ones_like(x), 0.5 if self.armed else 0.0, self.training)


class Decays(Weak):
    """Divides by a running average that sinks to 0: a state that has gone stale."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.0 if self.armed else 0.9)
        return x / self.average


class Frozen(Weak):
    """A BatchNorm in eval mode inside a model that trains: what it holds is what it uses."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels).eval()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class StandardisedWeight(Weak):
    """A layer whose weight is standardised in every call: 0 / 0 once all of a row's elements are equal."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        centred = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(x, centred / centred.norm(dim=1, keepdim=True))
