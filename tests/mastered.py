"""Small models with 16-bit weights and the optimizers that move them, for the tests of `with_masters`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.pytorch.optim.with_masters import WithMasters, with_masters
from mezzo.pytorch.weights.lowering import lower_weights

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class SignOfMomentum(torch.optim.Optimizer):
    """A user's optimizer, which asks `in` whether a parameter has a state, and replaces `.data`."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "moved": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["moved"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self.state[p]["m"] = torch.zeros_like(p)
                self.state[p]["m"].lerp_(p.grad, 0.1)
                p.data = p.data - group["lr"] * self.state[p]["m"].sign()


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-3),
    "custom": SignOfMomentum,
}


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def give_gradients(low: nn.Module, wide: nn.Module | None = None, seed: int = 0, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    others = list(wide.parameters()) if wide is not None else [None] * len(list(low.parameters()))
    for p, q in zip(low.parameters(), others):
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = grad * scale
        if q is not None:
            q.grad = grad.float()


def masters(model: nn.Module, optimizer: Any) -> list[Tensor]:
    return [optimizer.master(p) for p in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b.detach()) for a, b in zip(left, right, strict=True))


def trained(name: str, steps: int = 3) -> tuple[nn.Sequential, WithMasters]:
    model = model_of()
    lower_weights(model)
    optimizer = with_masters(OPTIMIZERS[name](model.parameters()))
    for index in range(steps):
        give_gradients(model, seed=index)
        optimizer.step()
    return model, optimizer


def go_on(model: nn.Module, optimizer: Any) -> list[Tensor]:
    for index in range(3):
        give_gradients(model, seed=10 + index)
        optimizer.step()
    return masters(model, optimizer)
