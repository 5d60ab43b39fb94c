"""Faults of other mixed-precision software, each found by running it, and that Mezzo does not have them: loss scales.

A test's docstring says what the peer does. Where the peer is torch, which is here, its fault is shown first.
`test_peer_faults_autocast.py` has those of autocast and emulators.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from bad_steps import INF, is_finite
from mezzo.core.errors import LossScaleCollapseError
from mezzo.core.loss_scale import DynamicLossScale, Observation
from run_scripts import launcher
from test_loss_scale import on_device
from training_steps import nobody_owns_anything, who_decides  # noqa: F401


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, -2.0]))


def train(scaler: Any, optimizer: torch.optim.Optimizer, weight: nn.Parameter, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    scaler.scale((weight * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


# torch.amp.GradScaler, Keras's LossScaleOptimizer, TF2, flax, mpx, jmp


def test_torch_grad_scaler_has_no_floor() -> None:
    """After 144 overflows in a row the scale is 2^-128, its inverse inf, and the first good step writes inf into the
    weights with found_inf = 0; after 166 the scale is 0 for ever. No warning."""
    weight, theirs = parameter(), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(144):
        train(theirs, optimizer, weight, INF)
    assert theirs.get_scale() == 2.0**-128
    train(theirs, optimizer, weight)
    assert not is_finite(weight)
    for _ in range(22):
        train(theirs, optimizer, weight, INF)
    assert theirs.get_scale() == 0.0

    weight, ours = parameter(), mezzo.GradScaler(patience=10**6)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(200):
        train(ours, optimizer, weight, INF)
        assert math.isfinite(1.0 / ours.get_scale())
    assert ours.get_scale() == 2.0**-14
    train(ours, optimizer, weight)
    assert torch.equal(weight.detach(), torch.tensor([1.0, -2.0]) - 0.1)

    loud = mezzo.GradScaler()
    for _ in range(30 + 50 - 1):  # to the floor, and the patience there
        train(loud, optimizer, weight, INF)
    with pytest.raises(LossScaleCollapseError):
        train(loud, optimizer, weight, INF)


@pytest.mark.parametrize("form", ["pure", "host", "device"])
def test_keras_s_scale_reaches_zero_and_infinity(form: str) -> None:
    """Keras 3.15 LossScaleOptimizer: 200 overflows -> scale 0.0, next finite step writes -inf; with growth every step
    the scale reaches inf and never comes back. jmp: under jit the minimum scale falls back to 1."""
    scale: Any = DynamicLossScale(growth_interval=1, patience=10**6)
    scaler: Any = None if form == "pure" else on_device(scale, form)

    def after(found: bool, steps: int) -> float:
        nonlocal scale
        for _ in range(steps):
            if scaler is None:
                scale = scale.next(Observation(found))
            else:
                scaler.update(torch.tensor(float(found)))
        return float(scale.scale if scaler is None else scaler.scale)

    assert after(True, 200) == 2.0**-14
    assert after(False, 400) == 2.0**24
    assert after(True, 1) == 2.0**23


def test_a_floor_of_one_leaves_models_stuck(decides: str) -> None:
    """TF2 / tf-keras: floor fixed at 1: models whose fp16 gradients overflow even unscaled are stuck (keras 16100:
    about 1 M steps)."""

    def trained(**bounds: Any) -> tuple[float, bool]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        scale = DynamicLossScale(init=2.0, patience=50, **bounds)
        mp = mezzo.MixedPrecision(model, optimizer, "fp16", loss_scale=scale)
        moved = False
        for _ in range(20):
            with mp.autocast():
                loss = (model(torch.full((8, 4), 500.0)).float() * 100.0).sum()  # a gradient of 400,000
            moved = mp.step(loss).stepped
        last = mp.loss_scale
        mp.close()
        return last, moved

    assert trained(floor=1.0) == (1.0, False)
    assert trained() == (2.0**-3, True)


def test_an_fp16_loss_does_not_overflow_at_once(decides: str) -> None:
    """flax DynamicScale: an fp16 loss x 65536 overflows at once."""
    model = nn.Linear(2, 1)
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16", clip_norm=math.inf)
    result = mp.step(model(torch.ones(1, 2)).half().mean())
    assert result.stepped
    assert result.grad_norm == pytest.approx(3**0.5)

    scaler = mezzo.GradScaler()
    with mezzo.autocast("fp16"):
        loss = nn.functional.mse_loss(model(torch.ones(1, 2)), torch.full((1, 1), 3.0))
    assert loss.dtype is torch.float32
    assert scaler.scale(loss).isfinite()


@pytest.mark.parametrize("make", ["GradScaler", "MixedPrecision"])
def test_a_growth_step_unscales_with_the_scale_that_was_used(make: str, decides: str) -> None:
    """mpx 0.1.8: on a growth step unscales with the new scale."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = mezzo.GradScaler(init_scale=2.0, growth_interval=1)
    scale = DynamicLossScale(init=2.0, growth_interval=1)
    mp = None if make == "GradScaler" else mezzo.MixedPrecision(model, optimizer, "fp16", loss_scale=scale)
    for step in range(1, 6):
        loss = (model.weight * torch.tensor([1.0, -3.0])).sum()
        if mp is None:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            assert mp.step(loss).loss_scale == 2.0**step
        assert model.weight.detach().tolist() == [[-1.0 * step, 3.0 * step]]
    assert (scaler.get_scale() if mp is None else mp.loss_scale) == 2.0**6


# torch.amp's loop


def batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


BAD, GOOD = torch.full((8, 4), 1e30), torch.linspace(-1, 1, 32).reshape(8, 4)


def test_running_statistics_survive_a_skipped_step(
    decides: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch.amp: BatchNorm running statistics become inf/NaN on a skipped step (issue 90342)."""
    model, scaler = batch_norm(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.float16):
        loss = model(BAD).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert is_finite(list(model.parameters()))
    assert not is_finite(list(model.buffers()))

    model = batch_norm()
    before = copy.deepcopy(model.state_dict())
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16")
    with mp.autocast():
        loss = model(BAD).float().sum()
    assert mp.step(loss).skipped
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    ran = launcher(tmp_path, capsys)(
        """
        import torch
        from torch import nn
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [buffer.clone() for buffer in model.buffers()]
        model(torch.full((8, 4), 1e30)).sum().backward()
        optimizer.step()
        print(all(map(torch.equal, before, model.buffers())))
        """,
        policy="fp16",
    )
    assert (ran.lines, ran.of("update")[0].moved) == (["True"], False)


def test_a_skip_is_said(decides: str) -> None:
    """torch.amp: step() does not say that it skipped (67590, 152279)."""
    weight = parameter()
    optimizer, theirs = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu")
    theirs.scale((weight * INF).sum()).backward()
    skipped = theirs.step(optimizer)
    theirs.update()
    optimizer.zero_grad()
    theirs.scale(weight.sum()).backward()
    moved = theirs.step(optimizer)
    assert (skipped, moved) == (None, None)  # the same for both

    ours = mezzo.GradScaler()
    train(ours, optimizer, weight, INF)
    assert ours.was_skipped(optimizer)
    train(ours, optimizer, weight)
    assert not ours.was_skipped(optimizer)

    model = nn.Linear(2, 1)
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16")
    results = [mp.step(model(torch.ones(1, 2)).sum() * factor) for factor in (INF, 1.0)]
    assert [(r.skipped, r.stepped) for r in results] == [(True, False), (False, True)]
    assert "NaN or infinite at loss scale 65536" in results[0].reason
    assert results[1].reason == ""
