"""MixedPrecision(release_gradients=True): the step inside backward, beside the same step after it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
from alive import bytes_alive
from mezzo.core.errors import UsageError
from mezzo.pytorch.memory import PeakTensorBytes
from training_steps import (  # noqa: F401
    INF,
    batch,
    everything,
    network,
    nobody_owns_anything,
    run,
    same,
    who_decides,
)

MODES = {
    "fp32": ("bf16", {"state": None}),
    "split": ("bf16", {"masters": "split"}),
    "split8 int8": ("bf16", {"masters": "split8", "state": "int8"}),
    "masters fp16": ("fp16", {"masters": "fp32"}),
    "fp16": ("fp16", {}),
}


def made(mode: str, *, release: bool = True, model: nn.Module | None = None, **arguments: Any) -> Any:
    precision, modes = MODES[mode]
    model = network() if model is None else model
    return mezzo.MixedPrecision(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        precision,
        release_gradients=release,
        **(modes | arguments),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_equals_the_step_after_backward(
    mode: str, clip_norm: float | None, accumulate: int, decides: str
) -> None:
    """With overflows in between: same weights, states, scales and buffers to the last bit."""
    factors = [1.0, 1.0, INF, 1.0, 1.0, 1.0] if MODES[mode][0] == "fp16" else [1.0] * 6
    scale = mezzo.DynamicLossScale(init=2.0**8) if MODES[mode][0] == "fp16" else None
    arguments = {"clip_norm": clip_norm, "accumulate": accumulate, "loss_scale": scale}
    told = {}
    trained = {}
    for release in (False, True):
        trained[release] = mp = made(mode, release=release, **arguments)
        told[release] = [run(mp, index, factor) for index, factor in enumerate(factors)]
    left, right = trained[False], trained[True]
    # torch's AdamW over FP32 weights stays torch's own without release.
    if mode in ("fp32", "fp16"):
        left, right = [[p.detach() for p in mp.model.parameters()] for mp in (left, right)]
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(left, right))
    else:
        assert same(everything(left), everything(right))
    assert [r.skipped for r in told[True]] == [r.skipped for r in told[False]]
    assert trained[True].loss_scale == trained[False].loss_scale
    assert all(p.grad is None for p in trained[True].model.parameters())
    if clip_norm is not None:
        norms = [[r.grad_norm for r in told[release] if r.stepped] for release in (True, False)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


class Wide(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.heavy
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_peak_is_weights_states_and_the_largest_gradient(clip_norm: float | None) -> None:
    """Lean AdamW: 2 + 1 + 2 * (1 + 2/64) bytes, and 2 more of one layer in eight; kept gradients: 2 of all."""
    peaks = {}
    for release in (True, False):
        alive = bytes_alive()
        torch.manual_seed(0)
        model = Wide(8)
        mp = made("split8 int8", model=model, release=release, clip_norm=clip_norm)
        x = torch.randn(2, 256)

        def step(mp: Any = mp, model: nn.Module = model, x: Tensor = x) -> None:
            with mp.autocast():
                loss = model(x).float().square().mean()
            assert mp.step(loss).stepped

        step()
        gc.collect()
        peak = PeakTensorBytes()
        peak.start()
        step()
        step()
        peaks[release] = (peak.stop().peak_bytes - alive) / sum(p.numel() for p in model.parameters())
        mp.close()
        del mp, model, step
        gc.collect()
    print(f"bytes a parameter at the peak: released {peaks[True]:.3f}, kept {peaks[False]:.3f}")
    assert peaks[True] <= 5.07 + 2 / 8 + 0.25
    assert peaks[False] >= 7.06


def test_two_networks() -> None:
    generator, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    mp_g, mp_d = made("split", model=generator), made("split", model=judge, clip_norm=1.0)
    noise = torch.randn(5, 3)
    for _ in range(2):
        with mp_d.autocast():
            loss = judge(generator(noise)).float().mean()
        before = [p.detach().clone() for p in generator.parameters()]
        assert mp_d.step(loss).stepped
        assert same([p.detach() for p in generator.parameters()], before)
        with mp_g.autocast():
            loss = -judge(generator(noise)).float().mean()
        before = [p.detach().clone() for p in judge.parameters()]
        assert mp_g.step(loss).stepped
        assert same([p.detach() for p in judge.parameters()], before)


def test_graphs_that_can_not_be_released_are_refused_and_nothing_moves() -> None:
    model = network()
    mp = made("split", model=model)
    run(mp)
    before = everything(mp)
    with mp.autocast():
        loss = model(batch()[0]).float().mean()
    with pytest.raises(UsageError, match="retain_graph"):
        mp.step(loss, retain_graph=True)
    assert same(everything(mp)[: len(list(model.parameters()))], before[: len(list(model.parameters()))])
    again = made("split")
    x = batch()[0].requires_grad_()
    with again.autocast():
        loss = checkpoint(again.model, x, use_reentrant=True).float().mean()
    before = [p.detach().clone() for p in again.model.parameters()]
    with pytest.raises(UsageError, match="use_reentrant=False"):
        again.step(loss)
    assert same([p.detach() for p in again.model.parameters()], before)
    kept = made("split")
    with kept.autocast():
        loss = checkpoint(kept.model, batch()[0], use_reentrant=False).float().mean()
    assert kept.step(loss).stepped


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_sparse_gradient_is_refused_by_name(clip_norm: float | None) -> None:
    model = nn.Embedding(6, 2, sparse=True)
    mp = made("split", model=model, clip_norm=clip_norm)
    before = model.weight.detach().clone()
    with pytest.raises(UsageError, match="sparse"):
        mp.step(model(torch.tensor([1, 1, 3])).float().sum())
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_a_loss_of_nothing_is_refused_and_training_goes_on() -> None:
    mp = made("split", clip_norm=1.0)
    with pytest.raises(UsageError, match="depends on no parameter"):
        mp.step(torch.ones((), requires_grad=True) * 2)
    assert run(mp).stepped


def test_open_windows_are_saved() -> None:
    mp = made("split", accumulate=3)
    run(mp, 0)
    twin = made("split", accumulate=3)
    twin.model.load_state_dict(mp.model.state_dict())
    twin.optimizer.load_state_dict(mp.optimizer.state_dict())
    twin.load_state_dict(mp.state_dict())
    for index in (1, 2):
        for each in (mp, twin):
            result = run(each, index)
    assert result.stepped
    assert same(everything(mp), everything(twin))
