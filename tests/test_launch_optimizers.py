"""`mezzo run` with several optimizers: they share one loss scale, and each is waited for by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from launching import launcher

TWO = """
import sys
import torch
from torch import nn

class Square(nn.Module):
    def forward(self, x):
        return x * x.abs()

torch.manual_seed(0)
size = {"fails": 3e3, "heals": 1.0}[sys.argv[1]]
bad, good = nn.Sequential(nn.Linear(4, 8), Square(), nn.Linear(8, 1)), nn.Linear(4, 1)
of_bad, of_good = torch.optim.Adam(bad.parameters(), lr=1e-3), torch.optim.SGD(good.parameters(), lr=1e-3)
for step in range(60):
    x = torch.randn(8, 4)
    of_good.zero_grad()
    good(x).square().mean().backward()
    of_good.step()
    of_bad.zero_grad()
    (bad(x * size).square().mean() * (1e9 if step < 6 and size == 1.0 else 1.0)).backward()
    of_bad.step()
print("through")
"""
PATIENT = {
    "dynamic": "loss_scale=dynamic(init=2**4,floor=2**2,patience=6)",
    "dynamic, hysteresis": "loss_scale=dynamic(init=2**4,floor=2**2,patience=6,hysteresis=2)",
    "static": "loss_scale=16",
}


@pytest.mark.parametrize("name", PATIENT)
def test_an_optimizer_that_never_moves_is_not_hidden_by_another_one_that_does(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = launcher(tmp_path, capsys)(TWO, "fails", policy=f"fp16,{PATIENT[name]}")
    assert ran.status == 1
    assert ran.lines == []
    said = ran.err.partition("LossScaleCollapseError: ")[2]
    assert said.startswith("optimizer 1 (Adam; ")
    assert "What makes them fail: " in said
    assert "mul in 1" in said
    mine = [update.skipped for update in ran.of("update") if update.optimizer == 1]
    assert all(mine)
    patience = 50 if name == "static" else 6
    assert len(mine) == patience + {"dynamic": 2, "dynamic, hysteresis": 3}.get(name, 0)
    assert not any(update.skipped for update in ran.of("update") if update.optimizer == 0)


def test_a_few_skips_of_one_optimizer_are_no_collapse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = launcher(tmp_path, capsys)(
        TWO, "heals", policy="fp16,loss_scale=dynamic(init=4,floor=4,patience=8)"
    )
    assert ran.lines == ["through"], ran.err
    skipped = [update.skipped for update in ran.of("update") if update.optimizer == 1]
    assert skipped == [True] * sum(skipped) + [False] * (60 - sum(skipped))


def test_an_optimizer_that_is_gone_gives_its_number_to_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One optimizer a stage: counting the optimizers that are left would give a number twice."""
    ran = launcher(tmp_path, capsys)(
        "import gc, torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "for stage in range(3):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    gc.collect()\n",
        policy="fp32",
    )
    assert [update.optimizer for update in ran.of("update")] == [0, 1, 2]
