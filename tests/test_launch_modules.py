"""`mezzo run` with module patterns: what runs inside a module in FP32 follows it, however deep, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launching import Ran, launcher

SCRIPT = """
import sys
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x):
        return self.deep(x * times) / times

times = 1.0 if sys.argv[1:] else 1e5

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 1))
seen = []
model[1].deep[0].register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
x = torch.randn(16, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def loss_of(x):
    return model(x).square().mean()

if sys.argv[1:] == ["model"]:
    model = torch.compile(model, backend="aot_eager")
if sys.argv[1:] == ["step"]:
    loss_of = torch.compile(loss_of, backend="aot_eager")
for _ in range(3):
    loss = loss_of(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(seen[0] if seen else "unseen", repr(loss.item()))
"""

Launch = Callable[..., Ran]


@pytest.fixture
def launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Launch:
    return launcher(tmp_path, capsys)


# policy -> formats of the inner layer's input and output
INSIDE = {
    "fp16": "(torch.float16, torch.float16)",
    "fp16,module.1=fp32": "(torch.float32, torch.float32)",
    "bf16,module.1=fp32": "(torch.float32, torch.float32)",
    "fp16,module.*=fp32": "(torch.float32, torch.float32)",
}


@pytest.mark.parametrize("policy", INSIDE)
def test_what_runs_inside_follows(policy: str, launch: Launch) -> None:
    ran = launch(SCRIPT, policy=policy)
    assert ran.status == 0
    assert ran.lines[-1].startswith(INSIDE[policy])


def test_a_policy_for_a_module_mends_what_overflows_inside_of_it(launch: Launch) -> None:
    assert any(update.skipped for update in launch(SCRIPT, policy="fp16").of("update"))
    assert not any(update.skipped for update in launch(SCRIPT, policy="fp16,module.1=fp32").of("update"))


@pytest.mark.heavy
def test_compiled_is_as_eager(launch: Launch) -> None:
    losses = [
        launch(SCRIPT, *argv, policy="fp16,module.1=fp32").lines[-1].split()[-1]
        for argv in (("eager",), ("model",), ("step",))
    ]
    assert len(set(losses)) == 1
