"""Collapse is loud: skips without end are an error that names what fails, and what it leaves is a state to resume from.

For `MixedPrecision`, for `GradScaler` and for a script under `mezzo run`: train, feed NaN until the error, save what is
there, load it into new objects (a new process, for all that they know), and go on with good data.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from bad_steps import is_finite, same
from faults.models import Net as Computes
from mezzo.core.errors import LossScaleCollapseError, UsageError
from training_steps import NAN, network

pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows

SCALES = {
    "dynamic": lambda: mezzo.DynamicLossScale(init=2.0**10, floor=1.0, patience=4),
    "dynamic, hysteresis": lambda: mezzo.DynamicLossScale(init=2.0**10, floor=1.0, patience=3, hysteresis=2),
    "static": lambda: mezzo.StaticLossScale(2.0**10, patience=6),
}


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(step))
    return x, (x[:, 0] > 0).long()


def reloaded(state: Any) -> Any:
    """As from a file, and without running code from it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def parts(name: str, **arguments: Any) -> tuple[nn.Module, Any, Any]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    mp = mezzo.MixedPrecision(model, optimizer, "fp16", loss_scale=SCALES[name](), **arguments)
    return model, optimizer, mp


def step(mp: Any, number: int, factor: float = 1.0) -> Any:
    x, y = data(number)
    with mp.autocast():
        loss = nn.functional.cross_entropy(mp.model(x * factor), y)
    return mp.step(loss)


@pytest.mark.parametrize(("name", "params"), [*((name, "fp32") for name in SCALES), ("dynamic", "fp16")])
def test_training_resumes_from_what_a_collapse_leaves(name: str, params: str, decides: str) -> None:
    model, optimizer, mp = parts(name, params=params)
    for number in range(3):
        assert step(mp, number).stepped
    before = reloaded([model.state_dict(), optimizer.state_dict()])
    with pytest.raises(LossScaleCollapseError, match=r"\d steps (were|in a row)"):
        [step(mp, 0, NAN) for _ in range(60)]
    assert all(p.grad is None for p in model.parameters())
    saved = reloaded([model.state_dict(), optimizer.state_dict(), mp.state_dict()])
    assert same(saved[:2], before)
    mp.close()

    model, optimizer, mp = parts(name, params=params)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    mp.load_state_dict(saved[2])
    assert mp.loss_scale == 2.0**10  # not at the floor, from where it would take long to come back
    results = [step(mp, number) for number in range(3, 43)]
    assert all(result.stepped for result in results)
    assert sum(r.loss for r in results[-5:]) < 0.7 * sum(r.loss for r in results[:5])
    assert is_finite([model.state_dict(), optimizer.state_dict()])
    assert step(mp, 0, NAN).skipped  # and one bad step is not the end again

    # As if the bad stretch had never been: from a checkpoint of before it, to the bit.
    mp.close()
    twin, adamw, other = parts(name, params=params)
    twin.load_state_dict(before[0])
    adamw.load_state_dict(before[1])
    for number in range(3, 43):
        step(other, number)
    assert same(twin.state_dict(), model.state_dict())


def test_a_grad_scaler_resumes_from_what_a_collapse_leaves() -> None:
    def made() -> tuple[nn.Module, Any, mezzo.GradScaler]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
        return model, optimizer, mezzo.GradScaler(init_scale=2.0**10, floor=1.0, patience=4)

    def train(number: int, factor: float = 1.0) -> None:
        x, y = data(number)
        optimizer.zero_grad()
        with mezzo.autocast("fp16"):
            loss = nn.functional.cross_entropy(model(x * factor), y)
        gradients.scale(loss).backward()
        gradients.step(optimizer)
        gradients.update()

    model, optimizer, gradients = made()
    train(0)
    before = reloaded([list(model.parameters()), optimizer.state_dict()])
    with pytest.raises(LossScaleCollapseError, match=r"scaler\.update\(1024\)"):
        [train(0, NAN) for _ in range(60)]
    saved = reloaded([list(model.parameters()), optimizer.state_dict()])
    assert same(saved, before)
    state = reloaded(gradients.state_dict())
    model, optimizer, gradients = made()
    gradients.load_state_dict(state)
    train(1)
    assert gradients.get_scale() == 2.0**10
    train(0, NAN)
    assert gradients.was_skipped(optimizer)


SCRIPT = """
import sys
import torch
from torch import nn
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
try:
    for step in range(200):
        if step == 3:
            torch.save([model.state_dict(), optimizer.state_dict()], sys.argv[1])
        out = model(torch.randn(32, 4) * (float("nan") if step >= 3 else 1.0))
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
finally:
    torch.save([model.state_dict(), optimizer.state_dict()], sys.argv[2])
"""


def test_a_script_can_save_what_it_had_before_the_collapse(launch: Any, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("before.pt", "after.pt")]
    ran = launch(SCRIPT, *files, policy="fp16")
    assert ran.status == 1
    assert "LossScaleCollapseError" in ran.err
    assert [update.moved for update in ran.of("update")][:4] == [True] * 3 + [False]
    before, after = map(torch.load, files)
    assert same(before, after)


def test_a_training_whose_fault_is_mended_goes_on_in_place(decides: str) -> None:
    _, _, mp = parts("dynamic")
    assert step(mp, 0).stepped
    with pytest.raises(LossScaleCollapseError, match=r"mp\.reset_loss_scale\(\)"):
        [step(mp, 0, NAN) for _ in range(60)]
    mp.reset_loss_scale()
    assert mp.loss_scale == 2.0**10
    assert step(mp, 0, NAN).skipped  # one more bad step is not the end again
    assert all(step(mp, number).stepped for number in range(1, 5))


def test_without_a_loss_scale_there_is_none_to_begin_anew() -> None:
    model = network()
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    with pytest.raises(UsageError, match=r"bf16. has no loss scale.*loss_scale="):
        mp.reset_loss_scale()


def test_an_open_window_keeps_the_scale_that_it_began_with() -> None:
    _, _, mp = parts("dynamic", accumulate=2)
    for number in (0, 1):
        step(mp, number, NAN)
    assert mp.loss_scale == 2.0**9
    step(mp, 2)
    mp.reset_loss_scale()
    result = step(mp, 3)
    assert result.stepped
    assert result.loss_scale == 2.0**9
    assert mp.loss_scale == 2.0**10


def test_training_warns_of_the_first_overflow_that_the_loss_scale_does_not_fix(recwarn: Any) -> None:
    fragile = Computes(lambda self, x: x / (x - x))
    for model, warned in ((nn.Sequential(nn.Linear(4, 4), fragile), 1), (nn.Linear(4, 4), 0)):
        scale = mezzo.DynamicLossScale(init=2.0**60, ceiling=2.0**60)  # too large: a normal search
        mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters()), "fp16", loss_scale=scale)
        recwarn.clear()
        results = [step(mp, 0) for _ in range(3)]
        assert all(result.skipped for result in results)
        assert ("Try: " in results[0].reason) == bool(warned), results[0].reason
        told = [one for one in recwarn if "was skipped" in str(one.message)]
        assert len(told) == warned
        assert [one.filename for one in told] == [step.__code__.co_filename] * warned
        for one in told:
            assert "in 1 (" in str(one.message)
            assert str(one.message).endswith("Later ones are only in mp.findings, of 20 places at most.")
            assert f"Try: {results[0].finding.remedies[0]}" in str(one.message)
