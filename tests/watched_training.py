"""A small training that is watched, and what its tests ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import mezzo
from mezzo.core.ranges import Histogram, RangeRow
from mezzo.pytorch.kernels.exponents import exponents
from mezzo.pytorch.monitor.ranges import RangeWatch


def histogram(*tensors: Tensor, scale: float = 1.0) -> Histogram:
    """Of all elements of some tensors together, divided by a power of two."""
    every = torch.cat([t.detach().float().flatten() for t in tensors]) / scale
    finite = every[every.isfinite()].abs()
    return Histogram.from_bins(exponents(every).tolist(), float(finite.max()) if finite.numel() else 0.0)


class Net(nn.Module):
    """A block that is run twice, a normalisation, dropout, and an output in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.head = Head()

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.first(x)
        x = self.block(self.block(x))
        return {"out": self.head(self.drop(self.norm(x)))[0], "count": 3}


class Head(nn.Module):
    """Two outputs, of which one has no use, and a parameter of its own beside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 2))
        self.softplus = nn.Softplus()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.softplus(x @ self.weight), torch.arange(3)


SEEN = ["first", "block.0", "block.1", "norm", "drop", "head", "head.softplus"]
"""Paths of the modules of `Net` whose outputs are looked at, in the order of their calls."""


def batches(count: int, seed: int = 1) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(12, 6, generator=generator)


def trained(
    precision: str = "fp16",
    updates: int = 4,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    spike: int = -1,
    **options: Any,
) -> tuple[Net, mezzo.MixedPrecision, list[Tensor]]:
    torch.manual_seed(0)
    model = Net()
    mp = mezzo.MixedPrecision(model, optimizer(model.parameters(), lr=1e-2), precision, **options)
    losses = []
    for number, x in enumerate(batches(updates * mp.accumulate)):
        with mp.autocast():
            loss = model(x)["out"].float().square().mean()
        if number == spike:
            loss = loss * 1e30
        losses.append(mp.step(loss).loss_tensor)
    return model, mp, losses


def everything(model: nn.Module, mp: mezzo.MixedPrecision, losses: list[Tensor]) -> list[Any]:
    state = mp.optimizer.state_dict()["state"]
    held = [value for one in state.values() for value in one.values()]
    return [*model.state_dict().values(), *losses, *held, torch.get_rng_state(), torch.tensor(mp.loss_scale)]


# What a training does besides -> options of MixedPrecision.


def by_key(rows: list[RangeRow]) -> dict[tuple[str, str, str], RangeRow]:
    found = {(row.what, row.module, row.name): row for row in rows}
    assert len(found) == len(rows)
    return found


def watch_of(mp: mezzo.MixedPrecision) -> RangeWatch:
    (watch,) = (one for one in mp._observing._observers if isinstance(one, RangeWatch))
    return watch


def hooks(model: nn.Module) -> int:
    """Hooks on all modules and parameters."""
    on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return on_modules + sum(
        len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ()) for p in model.parameters()
    )
