"""Losses whose gradients overflow on request, and steps over them, for the tests of GradScaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

INF, NAN = float("inf"), float("nan")

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([1.0, -2.0, 3.0])), nn.Parameter(torch.tensor([[0.5]]))]


def loss_of(params: list[nn.Parameter], event: float) -> Tensor:
    """A loss whose gradient is 3 everywhere, but for one element: 3 * event."""
    weights = torch.tensor([event, 1.0, 1.0])
    return 3.0 * ((params[0] * weights).sum() + params[1].sum())


def flat(optimizer: torch.optim.Optimizer) -> list[Any]:
    state = optimizer.state_dict()["state"]
    return [value for key in sorted(state) for _, value in sorted(state[key].items())]


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(left, right)
    )


def train(scaler: Any, optimizer: torch.optim.Optimizer, params: list[nn.Parameter], event: float) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(params, event)).backward()
    scaler.step(optimizer)
    scaler.update()


def state_after(scaler: Any, events: list[float]) -> dict[str, Any]:
    params = parameters()
    optimizer = OPTIMIZERS["sgd"](params)
    for event in events:
        train(scaler, optimizer, params, event)
    state: dict[str, Any] = scaler.state_dict()
    return state
