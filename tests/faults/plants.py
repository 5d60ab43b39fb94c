"""Modules with a weakness: ordinary code that is well until `armed`, when the values that come in are the bad ones.

Arming changes values and no operation, so that the line which fails is a line that ran in every step before it. The
last ones have no weakness, and look as if they had.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo


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


class OwnGenerator(Weak):
    """Drawn from a generator of the module's own: one row in a hundred is blown up, once armed."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(11)

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(x.shape, generator=self.generator)
        return (x.clamp(-1, 1) + 2) * (1 + (drawn > 0.95).to(x.dtype) * self.times(60000.0))


class PythonRandom(Weak):
    """The branch is Python's own dice."""

    def forward(self, x: Tensor) -> Tensor:
        gains = [self.times(60000.0) if random.random() > 0.7 else 1.0 for _ in range(x.shape[-1])]
        return (x.clamp(-1, 1) + 2) * torch.tensor(gains).to(x.dtype)


class NumpyRandom(Weak):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.rand(*x.shape)).to(x.dtype)
        return (x.clamp(-1, 1) + 2) * (1 + (noise > 0.95).to(x.dtype) * self.times(60000.0))


class Counts(Weak):
    """A schedule by the number of calls; one of them is far too strong."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.bad = -1

    def forward(self, x: Tensor) -> Tensor:
        if self.armed and self.bad < 0:
            self.bad = self.calls
        strength = 1e7 if self.calls == self.bad else 1.0
        self.calls += 1
        return (x + 0.1) * strength


class Remembers(Weak):
    """A list of what it has seen, which it multiplies with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for old in self.seen[-3:]:
            x = x + old.to(x.dtype) * self.times(0.0)
        self.seen.append(x.detach().float().mean(0) * self.times(1e6) + 1)
        return x * self.seen[-1].to(x.dtype)


class PerSample(Weak):
    """A function transform inside of forward."""

    def forward(self, x: Tensor) -> Tensor:
        gain = self.times(1e7)
        return torch.func.vmap(lambda row: (row + 0.1) * gain)(x)


class InPlaceChain(Weak):
    """One tensor written again and again."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5
        x += 1.0
        x[0] = 0.25
        x /= 0.0 if self.armed else 1.0
        return x


class Island(Weak):
    """A piece that the script itself keeps in FP32."""

    def forward(self, x: Tensor) -> Tensor:
        with mezzo.autocast("fp32"):
            raised = torch.exp(x.float().clamp(-1, 1) + self.times(100.0))
        return raised.clamp(max=1e3) if not self.armed else raised / 1e10


class Hooked(Weak):
    """A hook of the script's that rewrites what a module returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.register_forward_hook(lambda module, args, output: (output + 0.1) * self.times(1e7))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class HookedBackward(Weak):
    """A full backward hook that divides by the gradient's own mean, which is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.register_full_backward_hook(self._rescaled)

    def _rescaled(self, module: nn.Module, entering: Any, leaving: Any) -> Any:
        return tuple(None if g is None else g / self.divisor() for g in entering)

    def divisor(self) -> Tensor:
        return torch.tensor(0.0 if self.armed else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Twice(Weak):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.other = self.one

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(x)) * self.times(6e4))
