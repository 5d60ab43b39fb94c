"""Faults of other mixed-precision software, and that Mezzo does not have them: autocast, detectors, scripts, emulators.

A test's docstring says what the peer does. Where the peer is torch, its fault is shown first.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from bad_steps import INF
from mezzo.pytorch.autocast.plan import plan
from run_scripts import launcher
from training_steps import Waits, nobody_owns_anything  # noqa: F401

THEIRS = {"bf16": torch.bfloat16, "fp16": torch.float16}


# torch.autocast


@pytest.mark.parametrize("compute", THEIRS)
def test_one_script_has_one_table_on_every_device(compute: str) -> None:
    """torch.autocast CPU: its op list differs from CUDA's: one script, two numerics."""
    x = torch.randn(4, 4)
    with torch.autocast("cpu", THEIRS[compute]):
        assert torch.exp(x.to(THEIRS[compute])).dtype is THEIRS[compute]  # on CUDA it is FP32
    policy = mezzo.policy(f"{compute},hidden=fp32")
    cpu, cuda = plan(policy, "cpu"), plan(policy, "cuda")
    assert {op: row.rule for op, row in cpu.items()} == {op: row.rule for op, row in cuda.items()}
    with mezzo.autocast(compute, "cpu"):
        assert torch.exp(x.to(THEIRS[compute])).dtype is torch.float32


LOOP = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 4)
y = x @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
losses = []
for step in range(20):
    loss = nn.functional.mse_loss(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses)
"""


def losses_of(context: Any, source: str = LOOP) -> list[float]:
    names: dict[str, Any] = {"print": lambda found: names.update(found=found)}
    with context:
        exec(compile(source, "loop", "exec"), names)
    found: list[float] = names["found"]
    return found


def test_one_context_around_a_whole_run_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """naive zero-code autocast: one context for the whole run: weights freeze at their first cast."""
    frozen = losses_of(torch.autocast("cpu", torch.bfloat16))
    assert len(set(frozen)) == 1
    for losses in (
        losses_of(mezzo.autocast("bf16", "cpu")),
        json.loads(launcher(tmp_path, capsys)(LOOP, policy="bf16").lines[-1]),
        json.loads(launcher(tmp_path, capsys)(LOOP, policy="fp16").lines[-1]),
    ):
        assert losses[-1] < 0.1 * losses[0]


def test_a_sigmoid_before_a_bce_loss_does_not_stick() -> None:
    """bf16 sigmoid, then BCELoss: the sigmoid rounds to exactly 1, the loss sticks at 50 to 100."""
    logit, target = torch.tensor([7.0]), torch.tensor([0.0])
    theirs = logit.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        stuck = nn.functional.binary_cross_entropy(torch.sigmoid(theirs).float(), target)
    assert stuck.item() == 100.0

    for compute in THEIRS:
        ours = logit.to(THEIRS[compute]).requires_grad_()
        with mezzo.autocast(compute, "cpu"):
            loss = nn.functional.binary_cross_entropy(torch.sigmoid(ours), target)
        assert loss.item() == pytest.approx(7.0009, rel=1e-3)
        loss.backward()
        assert ours.grad is not None
        assert ours.grad.item() == pytest.approx(1.0, rel=1e-2)  # stuck, it would be 0


# Detectors


class Rooted(nn.Module):
    """Nothing wrong with its forward pass; the slope of a root at 0 is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x).sqrt() + x


def rooted(**arguments: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Rooted()), nn.Linear(4, 2))
    return model, mezzo.MixedPrecision(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16", **arguments
    )


def taken(model: nn.Module, mp: Any, x: Tensor) -> Any:
    with mp.autocast():
        loss = model(x).float().square().mean()
    return mp.step(loss)


def test_what_overflows_in_backward_is_found_and_the_run_goes_on() -> None:
    """DebugUnderflowOverflow (transformers): forward only, stops the run, syncs every op."""
    model, mp = rooted(trace=True)
    x = torch.randn(8, 4)
    result = taken(model, mp, x)
    assert result.skipped
    assert (result.finding.direction, result.finding.module) == ("backward", "1.1")
    model[1][1] = nn.Identity()
    assert taken(model, mp, x).stepped
    mp.close()

    # A step that is not skipped is not traced: deeper models cause no more waits.
    waited = []
    for depth in (1, 10):
        other = nn.Sequential(nn.Linear(4, 4), *[nn.Tanh() for _ in range(depth)], nn.Linear(4, 2))
        mp = mezzo.MixedPrecision(
            other, torch.optim.AdamW(other.parameters(), fused=True), "fp16", trace=True
        )
        for _ in range(3):
            taken(other, mp, x)
        with Waits() as waits:
            assert taken(other, mp, x).stepped
        waited.append(waits.seen.total())
        mp.close()
    assert waited[0] == waited[1]


def test_infinities_are_found_and_probing_is_no_fault() -> None:
    """detect_anomaly: NaN only, not inf; slow; blames loss-scale probing."""
    weight = torch.zeros(2, requires_grad=True)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        weight.sqrt().sum().backward()  # says nothing
    assert weight.grad is not None
    assert weight.grad.eq(INF).all()

    model, mp = rooted(trace=True)
    assert taken(model, mp, torch.randn(8, 4)).finding.alarms
    mp.close()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mp = mezzo.MixedPrecision(
        model, optimizer, "fp16", trace=True, loss_scale=mezzo.DynamicLossScale(init=2.0**24)
    )
    result = taken(model, mp, 100 * torch.randn(8, 4))
    assert result.skipped
    assert result.finding.cause == "loss scale"
    assert not result.finding.alarms


# Scripts and emulators


def test_a_script_that_updates_weights_itself_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """scripts that update weights themselves: `p.data.add_(p.grad, ...)` with a scaled backward and no optimizer:
    diverges, or never ends."""
    source = (
        LOOP.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n", "")
        .replace("optimizer.zero_grad()", "model.zero_grad()")
        .replace("optimizer.step()", "[p.data.add_(p.grad, alpha=-0.1) for p in model.parameters()]")
    )
    assert "optim" not in source
    plain = losses_of(nullcontext(), source)
    launched = json.loads(launcher(tmp_path, capsys)(source, policy="fp16").lines[-1])
    assert launched == pytest.approx(plain, rel=0.05, abs=1e-2)
    assert launched[-1] < 0.1 * launched[0]


def test_master_weights_are_not_overwritten_by_their_rounded_copies() -> None:
    """emulators: fp32 copies overwritten."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    before = layer.weight.detach().clone()
    for policy in ("bf16", "fp16", "tf32", "fp8"):
        with mezzo.autocast(policy, "cpu"):
            layer(torch.randn(2, 4)).float().sum().backward()
        assert torch.equal(layer.weight.detach(), before), policy
