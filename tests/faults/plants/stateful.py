"""Weaknesses behind a state that a repeated call does not find as it was, and in calls that are not plain ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import mezzo
from faults.plants.weak import Weak


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
