"""Faults of other mixed-precision software, and that Mezzo does not have them: autocast, scripts, emulators.

A test's docstring says what the peer does. Where the peer is torch, its fault is shown first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from run_scripts import launcher

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


def losses_of(context: Any) -> list[float]:
    names: dict[str, Any] = {"print": lambda found: names.update(found=found)}
    with context:
        exec(compile(LOOP, "loop", "exec"), names)
    return names["found"]


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

    for compute, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        ours = logit.to(dtype).requires_grad_()
        with mezzo.autocast(compute, "cpu"):
            loss = nn.functional.binary_cross_entropy(torch.sigmoid(ours), target)
        assert loss.item() == pytest.approx(7.0009, rel=1e-3)
        assert torch.autograd.grad(loss, ours)[0].item() == pytest.approx(
            1.0, rel=1e-2
        )  # stuck, it would be 0


def test_master_weights_are_not_overwritten_by_their_rounded_copies() -> None:
    """emulators: fp32 copies overwritten."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    before = layer.weight.detach().clone()
    for policy in ("bf16", "fp16", "tf32", "fp8"):
        with mezzo.autocast(policy, "cpu"):
            layer(torch.randn(2, 4)).float().sum().backward()
        assert torch.equal(layer.weight.detach(), before), policy
