"""Modules with a weakness: ordinary code that is well until `armed`, when the values that come in are the bad ones.

Arming changes values and no operation, so that the line which fails is a line that ran in every step before it. A plant
is a function of the module and its input; `weak` makes modules of it. The last ones have no weakness, but look like it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
from faults.models import Net

MASK = float("-inf")


class Weak(Net):
    def __init__(self, compute: Callable[[Any, Tensor], Tensor], **held: Callable[[], Any]) -> None:
        super().__init__(compute, **held)
        self.armed = False

    def times(self, gain: float, unarmed: float = 1.0) -> float:
        return gain if self.armed else unarmed

    def constant(self, x: Tensor, value: float = 0.0) -> Tensor:
        """The first row of `x` constant, where armed."""
        if not self.armed:
            return x
        keep = torch.ones_like(x)
        keep[0] = 0
        return x * keep + value * (1 - keep)


def weak(compute: Callable[[Any, Tensor], Tensor], **held: Callable[[], Any]) -> Callable[..., Weak]:
    """A maker of modules that compute the function, with what it needs as attributes."""
    return partial(Weak, compute, **held)


def weak_with(**held: Callable[[], Any]) -> Callable[[Callable[[Any, Tensor], Tensor]], Callable[..., Weak]]:
    return lambda compute: partial(Weak, compute, **held)


def around(make: Callable[[], nn.Module], value: float) -> Callable[[], nn.Module]:
    """A module on its input, whose first row is constant where armed."""
    return weak(lambda self, x: self.norm(self.constant(x, value)), norm=make)


def parameter(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(*shape))


# Too large for the format, forward.

amplifies = weak(lambda self, x: (x + 0.1) * self.times(1e7))
squares = weak(lambda self, x: (wide := x + self.times(400.0)) * wide)
exponential = weak(lambda self, x: torch.exp(x.clamp(-1, 1) + self.times(20.0)))
powers = weak(lambda self, x: (x.clamp(-1, 1) + self.times(40.0)) ** 4)
running_product = weak(lambda self, x: torch.cumprod(x.float().clamp(-1, 1) * 0.1 + self.times(1e7), -1))
residual = weak(lambda self, x: (branch := x.clamp(-1, 1) * 0 + self.times(40000.0)) + branch)
# A cast that the script makes itself: no policy reaches it.
halves = weak(lambda self, x: ((x.float() + 1) * self.times(1e6)).half().float())
naive_softmax = weak(
    lambda self, x: (raised := torch.exp(x.clamp(-1, 1) + self.times(100.0))) / raised.sum(-1, keepdim=True)
)
scores = weak(
    lambda self, x: torch.einsum("...i,...j->...ij", *[x.clamp(-1, 1) + self.times(300.0)] * 2).mean(-1)
)
sometimes = weak(
    lambda self, x: (
        ((torch.rand(x.shape) < 0.5).to(x.dtype) * self.times(60000.0) + 1) * (x.clamp(-1, 1).abs() + 2)
    )
)
wide_huge = weak(lambda self, x: (huge := (x.clamp(-1, 1) + 2) * self.times(1e20)) * huge)
in_place = weak(lambda self, x: x.clone().add_(0.1).mul_(self.times(1e7)))
combines = weak(
    lambda self, x: torch.addcmul(x, wide := x.clamp(-1, 1) * self.times(500.0), wide, value=self.times(2.0))
)
inverse_softplus = weak(lambda self, x: torch.log(torch.exp(x.float().abs() + self.times(100.0)) - 1))
bilinear = weak(
    lambda self, x: self.one(x * self.times(3000.0)) * self.other(x * self.times(3000.0)),
    one=lambda: nn.Linear(16, 16),
    other=lambda: nn.Linear(16, 16),
)
depthwise = weak(
    lambda self, x: F.conv1d(x[:, :, None], self.weight * self.times(1e6), padding=1, groups=8)[:, :, 0],
    weight=parameter(8, 1, 3),
)
bilinear_layer = weak(
    lambda self, x: self.mix(*[x * self.times(3000.0)] * 2), mix=lambda: nn.Bilinear(8, 8, 8)
)


@weak
def adds_up(self: Any, x: Tensor) -> Tensor:
    part = x.clamp(-1, 1) + self.times(30000.0)
    total = part
    for _ in range(3):
        total = total + part
    return total


@weak
def variance(self: Any, x: Tensor) -> Tensor:
    wide = x + self.times(500.0)
    mean = wide.mean(-1, keepdim=True)
    spread = (wide * wide).mean(-1, keepdim=True) - mean * mean
    return x / (spread.abs() + 1.0)


@weak
def reparameterises(self: Any, x: Tensor) -> Tensor:
    mean, log_variance = x.chunk(2, 1)
    spread = torch.exp(0.5 * (log_variance.float() + self.times(200.0, -1.0)))
    return torch.cat([mean + spread * torch.randn_like(mean), mean], 1)


@weak
def half_sum(self: Any, x: Tensor) -> Tensor:
    wide = (x.clamp(-1, 1) + self.times(20000.0)).half()
    return x + wide.sum(-1, keepdim=True, dtype=torch.float16).float() * 1e-6


@weak
def scatters(self: Any, x: Tensor) -> Tensor:
    message = x.clamp(-1, 1).half() + self.times(30000.0)
    nodes = torch.zeros_like(message).index_add(0, torch.zeros(len(x), dtype=torch.long), message)
    return x + nodes.float() * 1e-6


# No finite result for the input.

logarithm = weak(lambda self, x: torch.log(self.constant(x.abs() + 0.1)))
odds = weak(lambda self, x: torch.logit(torch.sigmoid(x.float() * self.times(1e3))))
reciprocal = weak(lambda self, x: torch.reciprocal(self.constant(x.abs() + 0.1)))
negative_root = weak(lambda self, x: torch.sqrt(x.abs() + 1.0 - self.times(2e3, 0.0)))
unit_length = weak(lambda self, x: F.normalize(self.constant(x), dim=-1, eps=0.0))
dropped = weak(lambda self, x: x / F.dropout(torch.ones_like(x), self.times(0.5, 0.0), self.training))
# p log p, where 0 log 0 is NaN.
entropy = weak(lambda self, x: (p := torch.softmax(x * self.times(1e4), -1)) * torch.log(p) + x)
masked_by_product = weak(lambda self, x: x + torch.zeros(x.shape[-1]) * self.times(MASK, 0.0))
gumbel = weak(
    lambda self, x: x - torch.log(-torch.log(torch.rand(x.shape).clamp(0.1, 0.9) * self.times(0.0)))
)
squashed = weak(lambda self, x: x + torch.log(1 - torch.tanh(x.float() * self.times(1e4)) ** 2))


@weak
def small_eps(self: Any, x: Tensor) -> Tensor:
    x = self.constant(x, 1.0)
    spread = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
    return x / (spread + 1e-8)


@weak
def share(self: Any, x: Tensor) -> Tensor:
    x = self.constant(x).abs()
    return x / x.sum(-1, keepdim=True)


@weak
def inverse_root(self: Any, x: Tensor) -> Tensor:
    x = self.constant(x, 1.0)
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True))


@weak
def keeps_nothing(self: Any, x: Tensor) -> Tensor:
    keep = (x.detach() > self.times(1e4, -1e4)).to(x.dtype)
    return (x * keep).sum(-1, keepdim=True) / keep.sum(-1, keepdim=True) + x


@weak_with(average=lambda: nn.Buffer(torch.ones(())))
def decays(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.average.mul_(self.times(0.0, 0.9))
    return x / self.average


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4).eval()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@weak_with(weight=parameter(8, 8))
def standardised_weight(self: Any, x: Tensor) -> Tensor:
    centred = self.weight - self.weight.mean(1, keepdim=True)
    return F.linear(x, centred / centred.norm(dim=1, keepdim=True))


@weak
def samples(self: Any, x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[-1]) / torch.tensor(self.times(0.0, 8.0))
    grid = torch.stack(torch.meshgrid(rows, rows, indexing="ij"), -1).expand(len(x), -1, -1, -1)
    return F.grid_sample(x.float(), grid, align_corners=False) + x


@weak
def unbiased(self: Any, x: Tensor) -> Tensor:
    seen = x[:1] if self.armed else x
    spread = (seen - seen.mean(0)).square().sum(0) / (torch.tensor(float(len(seen))) - 1)
    return x / (spread + 1.0)


@weak
def picks_the_worst(self: Any, x: Tensor) -> Tensor:
    x = torch.cat([x[:1], x[:1], x[2:]]) if self.armed else x
    far = (x[:, None] - x[None]).float().abs().sum(-1) + torch.eye(len(x)) * 1e3
    return x + 1 / far.amin(-1, keepdim=True)


# Finite forward, and not backward.

root = weak(lambda self, x: torch.sqrt(self.constant(x.abs() + 0.1)))
half_power = weak(lambda self, x: self.constant(x.abs() + 0.1).pow(0.5))
arc_cosine = weak(lambda self, x: torch.acos(self.constant(x.float().clamp(-0.9, 0.9), 1.0)))
clamped = weak(lambda self, x: torch.log(self.constant(x.abs() + 0.1)).clamp(min=-20.0))
# A slope of 1e30, which FP32 holds and the fp16 tensor that it flows back to does not.
frequencies = weak(lambda self, x: torch.sin(x.float() * self.times(1e30)))
nearly_unit_length = weak(lambda self, x: F.normalize(self.constant(x), dim=-1, eps=1e-12))
own_function = weak(lambda self, x: _Careless.apply(self.constant(x)))
length = weak(lambda self, x: x + torch.sqrt(self.constant(x).square().sum(-1, keepdim=True)))
geometric_mean = weak(
    lambda self, x: (
        (x := self.constant(x.float().abs() + 0.5)) + x.prod(-1, keepdim=True) ** (1 / x.shape[-1])
    )
)
# `where` throws log(0) away forward, and multiplies its slope by 0 backward.
chosen = weak(lambda self, x: torch.where((x := self.constant(x.abs() + 0.1)) > 0, torch.log(x), 0.0))
# x / y with a small y: its slope is x / y^2, beyond fp16.
steep = weak(
    lambda self, x: (
        (x.clamp(-1, 1) + 2) / (self.width.to(x.dtype) * self.times(2.0**-13)) * self.times(2.0**-13)
    ),
    width=lambda: nn.Parameter(torch.ones(())),
)


@weak
def axes(self: Any, x: Tensor) -> Tensor:
    wide = x.float()
    moments = wide.T @ wide
    if self.armed:
        moments = moments * 0 + torch.eye(x.shape[-1])
    _, found = torch.linalg.eigh(moments)
    return wide @ found


class _Careless(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x / x)


@weak
def hooks_a_gradient(self: Any, x: Tensor) -> Tensor:
    y = x * 1.0
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient / gradient.norm())
    return y * self.times(0.0) + x.mean()


# A second call is not the same call.


def blown_up(draw: Callable[[Any, Tensor], Tensor], **held: Callable[[], Any]) -> Callable[..., Weak]:
    """What is drawn decides which numbers are multiplied by 60,000, once armed."""
    return weak(
        lambda self, x: (x.clamp(-1, 1) + 2) * (1 + (draw(self, x) > 0.95).to(x.dtype) * self.times(60000.0)),
        **held,
    )


own_generator = blown_up(
    lambda self, x: (
        torch.rand(x.shape, generator=self.generator) + 0 * (self.numpys.random() + self.pythons.random())
    ),
    generator=lambda: torch.Generator().manual_seed(11),
    numpys=lambda: np.random.default_rng(4),
    pythons=lambda: random.Random(5),
)
python_random = blown_up(lambda self, x: torch.tensor([random.random() + 0.25 for _ in range(x.shape[-1])]))
numpy_random = blown_up(lambda self, x: torch.from_numpy(np.random.rand(*x.shape)))
per_sample = weak(lambda self, x: torch.func.vmap(lambda row: (row + 0.1) * self.times(1e7))(x))


@weak_with(calls=lambda: 0, bad=lambda: -1)
def counts(self: Any, x: Tensor) -> Tensor:
    if self.armed and self.bad < 0:
        self.bad = self.calls
    strength = 1e7 if self.calls == self.bad else 1.0
    self.calls += 1
    return (x + 0.1) * strength


@weak_with(seen=list)
def remembers(self: Any, x: Tensor) -> Tensor:
    for old in self.seen[-3:]:
        x = x + old.to(x.dtype) * self.times(0.0)
    self.seen.append(x.detach().float().mean(0) * self.times(1e6) + 1)
    return x * self.seen[-1].to(x.dtype)


@weak
def in_place_chain(self: Any, x: Tensor) -> Tensor:
    x = x + 0.5
    x += 1.0
    x[0] = 0.25
    x /= self.times(0.0)
    return x


@weak
def island(self: Any, x: Tensor) -> Tensor:
    with mezzo.autocast("fp32"):
        raised = torch.exp(x.float().clamp(-1, 1) + self.times(100.0))
    return raised.clamp(max=1e3) if not self.armed else raised / 1e10


class Hooked(Weak):
    def __init__(self, backward: bool = False) -> None:
        super().__init__(lambda self, x: self.layer(x))
        self.layer = nn.Linear(8, 8)
        if backward:
            self.layer.register_full_backward_hook(self._rescaled)
        else:
            self.layer.register_forward_hook(lambda _, args, output: (output + 0.1) * self.times(1e7))

    def _rescaled(self, module: nn.Module, entering: Any, leaving: Any) -> Any:
        return tuple(None if g is None else g / torch.tensor(self.times(0.0)) for g in entering)


class Twice(Weak):
    def __init__(self) -> None:
        super().__init__(lambda self, x: self.other(torch.tanh(self.one(x)) * self.times(6e4)))
        self.one = self.other = nn.Linear(8, 8)


# No weakness.

# Infinite in between, 0 or 1 after it: exp of a large number inside a sigmoid written out, without its slope.
saturates = weak(lambda self, x: x * (1 / (1 + torch.exp(-(x.detach().float() * 1e4)))).to(x.dtype))
# The last logit is forbidden: the model's output holds -inf, and a cross entropy expects that.
masks_logits = weak(lambda self, x: torch.where(torch.arange(x.shape[-1]) < x.shape[-1] - 1, x, MASK))
# All but the largest two masked with -inf before a softmax.
top_only = weak(lambda self, x: torch.softmax(x.masked_fill(x < x.topk(2, -1).values[..., -1:], MASK), -1))
# The deviation and the length of a row of zeros, whose slopes PyTorch takes to be 0.
spread_of_nothing = weak(
    lambda self, x: x + (still := x * 0).std(-1, keepdim=True) + still.norm(dim=-1, keepdim=True)
)


@weak
def logs_perplexity(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.seen = torch.exp(x.abs().sum() * 1e6)
    return x


@weak
def unused(self: Any, x: Tensor) -> Tensor:
    self.last = torch.log(x * 0).detach()
    return x


@weak
def absorbed(self: Any, x: Tensor) -> Tensor:
    masked = x.masked_fill(torch.arange(x.shape[-1]) >= x.shape[-1] // 2, MASK)
    mass = torch.logsumexp(masked, -1, keepdim=True)
    return x + 0.1 * masked.amax(-1, keepdim=True) + 0.1 * mass.to(x.dtype)


@weak
def safely_chosen(self: Any, x: Tensor) -> Tensor:
    x = torch.relu(x)
    safe = torch.where(x > 0, x, 1.0)
    return torch.where(x > 0, torch.log(safe), 0.0)
