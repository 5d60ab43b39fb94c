"""MixedPrecision: gradients of 16-bit weights are accumulated in FP32, and what that takes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
from alive import bytes_alive
from mezzo.pytorch.memory import PeakTensorBytes
from training_modes import made
from training_steps import (  # noqa: F401
    INF,
    NAN,
    OPTIMIZERS,
    batch,
    everything,
    network,
    nobody_owns_anything,
    run,
    same,
    who_decides,
)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_accumulated_gradients_are_fp32_and_lose_nothing(precision: str) -> None:
    """300 equal gradients of 1: a bf16 sum stops at 256; fp16's would be scaled past its largest number."""
    model = nn.Linear(1, 1, bias=False)
    mp = mezzo.MixedPrecision(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        precision,
        weights="masters",
        accumulate=300,
        loss_scale=2.0**16,
    )
    mp._fused.set_master(model.weight, torch.zeros(1, 1))
    for _ in range(299):
        mp.step((model.weight * torch.ones(1, 1, dtype=model.weight.dtype)).float().sum())
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float32
    result = mp.step(model.weight.float().sum())
    assert result.moved
    # 2**16 / 300 is rounded where a 16-bit gradient begins.
    assert result.grad_norm == pytest.approx(1.0, rel=2**-8)
    assert float(mp._fused.master(model.weight)) == pytest.approx(-1.0, rel=2**-8)
    mp.close()
    assert model.weight.grad_dtype is model.weight.dtype


def test_close_and_deletion_put_the_gradients_format_back() -> None:
    model = network()
    mp = made("split", model, accumulate=2)
    run(mp)
    assert model[0].weight.grad.dtype is torch.float32
    mp.close()
    assert model[0].weight.grad.dtype is torch.bfloat16
    assert model[0].weight.grad_dtype is torch.bfloat16
    model.zero_grad()
    second = mezzo.MixedPrecision(model, mp._fused, "bf16", accumulate=2)
    assert model[0].weight.grad_dtype is torch.float32
    del second
    assert model[0].weight.grad_dtype is torch.bfloat16
    assert model[0].weight.dtype is torch.bfloat16


class Tied(nn.Module):
    """Eight layers of 256 x 256, of which the last four are the first four again where tied."""

    def __init__(self, *, tied: bool, checkpointed: bool) -> None:
        super().__init__()
        layers = [nn.Linear(256, 256, bias=False) for _ in range(4 if tied else 8)]
        self.layers = nn.ModuleList(layers)
        self._twice = 2 if tied else 1
        self._checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self._twice):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self._checkpointed else layer(x)
                x = torch.tanh(x)
        return x


def peak_bytes(accumulate: int, *, tied: bool = False, checkpointed: bool = False, **arguments: Any) -> float:
    """Bytes a parameter, at the peak of two windows after the first."""
    others = bytes_alive()
    torch.manual_seed(0)
    model = Tied(tied=tied, checkpointed=checkpointed)
    mp = mezzo.MixedPrecision(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", accumulate=accumulate, **arguments
    )
    x = torch.randn(2, 256)

    def window() -> None:
        for _ in range(accumulate):
            with mp.autocast():
                loss = model(x).float().square().mean()
            mp.step(loss)

    window()
    gc.collect()
    peak = PeakTensorBytes()
    peak.start()
    window()
    window()
    bytes_ = peak.stop().peak_bytes - others
    mp.close()
    return bytes_ / sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_peak_of_gradient_accumulation(tied: bool, checkpointed: bool) -> None:
    """Split SGD: 2 weight, 2 remainder, 2 gradient; or 4 for FP32 sums and 6 for the layer that arrives."""
    layer = 1 / (4 if tied else 8)
    spare = 0.25  # activations and seeds
    arguments: dict[str, Any] = {"tied": tied, "checkpointed": checkpointed, "weights": "split"}
    # A tied weight's first gradient waits for its second in the engine, which casts it to FP32 first.
    assert 6.0 <= peak_bytes(1, **arguments) <= 6.0 + (4 * layer if tied else 0.0) + spare
    assert 8.0 <= peak_bytes(4, **arguments) <= 8.0 + (4 + 8 * layer if tied else 6 * layer) + spare
