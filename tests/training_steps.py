"""Small networks, batches and steps for the tests of MixedPrecision."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from bad_steps import INF as INF
from bad_steps import same as same
from mezzo.pytorch import loss_scaler
from mezzo.pytorch.memory import PeakTensorBytes

NAN = float("nan")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the CPU an accelerator, which must not be waited for."""
    monkeypatch.setattr(loss_scaler, "reading_is_free", lambda tensor: False)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def training(optimizer: str, precision: str, model: nn.Module | None = None, **arguments: Any) -> Any:
    model = network() if model is None else model
    return mezzo.MixedPrecision(model, OPTIMIZERS[optimizer](model.parameters()), precision, **arguments)


def batch(seed: int = 0, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randint(0, 2, (size,), generator=generator)


def run(mp: Any, seed: int = 0, factor: float = 1.0, size: int = 16) -> Any:
    x, y = batch(seed, size)
    with mp.autocast():
        loss = nn.functional.cross_entropy(mp.model(x), y)
    return mp.step(loss * factor)


def everything(mp: Any) -> list[Tensor]:
    """Parameters, buffers and the optimizer's state, copied."""
    state = mp.optimizer.state_dict()["state"]
    kept = [value for key in sorted(state) for _, value in sorted(state[key].items())]
    tensors = (*mp.model.parameters(), *mp.model.buffers(), *kept)
    return [t.detach().clone() for t in tensors if t is not None]


def peak_bytes(mp: Any, x: Tensor, losses: int = 1) -> float:
    """Peak bytes per parameter over two windows of losses, after a first one."""

    def window() -> None:
        for _ in range(losses):
            with mp.autocast():
                loss = mp.model(x).float().square().mean()
            mp.step(loss)

    window()
    gc.collect()
    peak = PeakTensorBytes()
    peak.start()
    window()
    window()
    return peak.stop().peak_bytes / sum(p.numel() for p in mp.model.parameters())


class Broken(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("out of memory")


class Ops(TorchDispatchMode):
    """Notes the ops that run, as `aten.cat.default`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Waits(Ops):
    @property
    def seen(self) -> Counter[str]:
        """The ops that would make the host wait for an accelerator."""
        waiting = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")
        return Counter(op for op in (name.split(".")[1] for name in self.names) if op.startswith(waiting))
