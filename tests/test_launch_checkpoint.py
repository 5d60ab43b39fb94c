"""A script that checkpoints a model's outermost call itself: the recomputation is the same region again."""

from __future__ import annotations

from pathlib import Path

import pytest

from launching import launcher

SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    x = torch.randn(16, 4, requires_grad=True)
    how = sys.argv[1]
    out = model(x) if how == "plain" else checkpoint(model, x, use_reentrant=how == "reentrant")
    out.square().sum().backward()
    optimizer.step()
    print(out.dtype, *(p.double().sum().item().hex() for p in (x.grad, *model.parameters())))
"""


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "fp16,loss_scale=2**20"])
def test_a_checkpointed_call_is_the_plain_call(
    policy: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = launcher(tmp_path, capsys)
    ran = launch(SCRIPT, how, policy=policy)
    assert ran.status == 0, ran.err
    assert ran.lines == launch(SCRIPT, "plain", policy=policy).lines
    assert "mezzo: 3 calls of Sequential" in ran.err  # a recomputation is no call of the script's
