"""Gradients that autograd leaves undefined: hooks and backward functions are given None, and nothing breaks.

A node of several outputs runs when one of them got a gradient, and a custom function's backward may return None.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from run_scripts import Ran

pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows

SCRIPT = """
import json, sys, torch
from torch import nn

class Sink(torch.autograd.Function):  # hands gradients on as they come, as DistributedDataParallel's does
    @staticmethod
    def forward(ctx, *values):
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)
    @staticmethod
    def backward(ctx, *grads):
        return grads

class First(torch.autograd.Function):  # no gradient for the second
    @staticmethod
    def forward(ctx, value, other):
        return value * 2 + other.sum() * 0
    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None

class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.gain = kind, 1.0
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.unused = nn.Parameter(torch.ones(4))
        self.cell = nn.LSTMCell(4, 4) if kind == "states" else None
    def forward(self, x):
        x, kind = x * self.gain, self.kind
        h = self.a(x)
        if kind == "inside":
            h, _ = Sink.apply(h, self.b(h))
        elif kind == "second":
            h = First.apply(h, self.b(h))
        elif kind == "weight":
            h = First.apply(h, self.unused)
        elif kind == "states":
            state, cell = self.cell(h)
            state, cell = Sink.apply(state, cell)
            h = First.apply(h, state) + cell
        return self.c(torch.tanh(h)), self.b(h)

kind, overflows = sys.argv[1], sys.argv[2] == "overflows"
torch.manual_seed(0)
model = Net(kind)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    model.gain = 1e30 if overflows and step == 2 else 1.0
    x = torch.ones(2, 4, requires_grad=kind == "input")
    optimizer.zero_grad()
    used, other = model(x)
    if kind in ("output", "inside"):
        used, other = Sink.apply(used, other)
    elif kind == "consumer":
        used = First.apply(used, other)
    elif kind == "input":
        used = First.apply(used, x)
    used.square().mean().backward()
    optimizer.step()
print(json.dumps([p.tolist() for p in model.parameters()]))
"""

# policy, other keywords of the request, whether a batch overflows
MODES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "fp16": ("fp16,loss_scale=128", {}, False),
    "fp16, traced": ("fp16,loss_scale=128", {}, True),
    "fp16, watched": ("fp16,loss_scale=128", {"watch": 1, "watch_all": True}, True),
    "bf16, watched": ("bf16", {"watch": 1}, False),
    "sensitivity": ("fp32", {"sensitivity": True}, False),
    "tf32": ("tf32", {}, False),
}


@pytest.mark.parametrize("kind", ["output", "consumer", "inside", "second", "weight", "input", "states"])
def test_a_run_goes_on_past_undefined_gradients(
    kind: str, launch: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = launch(SCRIPT, kind, "no", policy="fp32")
    assert plain.status == 0, plain.err
    expected = list(map(torch.tensor, json.loads(plain.lines[-1])))
    for mode, (policy, keywords, overflows) in MODES.items():
        ran = launch(SCRIPT, kind, "overflows" if overflows else "no", policy=policy, **keywords)
        assert ran.status == 0, (mode, ran.err)
        assert "after an error" not in ran.err, mode
        assert [update.skipped for update in ran.of("update")] == [False, False, overflows, False], mode
        if overflows:
            assert ran.of("overflow")[0].finding.alarms, mode
        else:
            for wanted, found in zip(expected, map(torch.tensor, json.loads(ran.lines[-1]))):
                assert (wanted - found).norm() <= 0.01 * wanted.norm() + 1e-3, mode
