"""Infinities that are nobody's business: what must raise no alarm."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
