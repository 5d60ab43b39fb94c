"""Modules with a weakness: ordinary code that is well until `armed`, when the values that come in are the bad ones.

Arming changes values and no operation, so that the line which fails is a line that ran in every step before it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
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


# ------------------------------------------------------------------------------ too large for the format


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


# ----------------------------------------------------------------------------- no finite result: forward


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


# ---------------------------------------------------------------------------- no finite result: backward


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


# ------------------------------------------------------------------ infinite, and none of its business


class LogsPerplexity(nn.Module):
    """A number for the progress bar, infinite and without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen = torch.exp(x.abs().sum() * 1e6)
        return x


class Unused(nn.Module):
    """Computes infinities that nobody uses."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = torch.log(x * 0).detach()
        return x


class Absorbed(nn.Module):
    """Infinities that `amax` and `logsumexp` take in and never hand on."""

    def forward(self, x: Tensor) -> Tensor:
        open_ = torch.arange(x.shape[-1]) < x.shape[-1] // 2
        best = x.masked_fill(~open_, float("-inf")).amax(-1, keepdim=True)
        mass = torch.logsumexp(x.masked_fill(~open_, float("-inf")), -1, keepdim=True)
        return x + 0.1 * best + 0.1 * mass.to(x.dtype)


class SafelyChosen(nn.Module):
    """The logarithm of a value that `where` has made safe before it: the right way."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        safe = torch.where(x > 0, x, 1.0)
        return torch.where(x > 0, torch.log(safe), 0.0)


class Saturates(nn.Module):
    """Infinite in between, 0 or 1 after it: exp of a large number inside a sigmoid written out, without its slope."""

    def forward(self, x: Tensor) -> Tensor:
        gate = 1 / (1 + torch.exp(-(x.detach().float() * 1e4)))
        return x * gate.to(x.dtype)


class MasksLogits(nn.Module):
    """The last logit is forbidden: the model's output holds -inf, and a cross entropy takes it for what it is."""

    def forward(self, x: Tensor) -> Tensor:
        allowed = torch.arange(x.shape[-1]) < x.shape[-1] - 1
        return torch.where(allowed, x, float("-inf"))


class SpreadOfNothing(nn.Module):
    """The deviation and the length of a row of zeros, whose slopes PyTorch takes to be 0."""

    def forward(self, x: Tensor) -> Tensor:
        still = x * 0
        return x + still.std(-1, keepdim=True) + still.norm(dim=-1, keepdim=True)
