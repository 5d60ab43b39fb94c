"""`mezzo run` on scripts that compile: eager numbers, the plain script's graphs, statistics of skipped steps."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from run_scripts import Ran

# PyTorch's own: while it imports Inductor; of what a broken step hands on.
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

SCRIPT = """
import json, sys
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

place, huge = sys.argv[1], [int(word) for word in sys.argv[2:]]
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.batch, self.layer, self.two = (
            nn.Linear(12, 24), nn.BatchNorm1d(24), nn.LayerNorm(24), nn.Linear(24, 5))

    def forward(self, x):
        return self.two(F.gelu(self.layer(self.batch(self.one(x)))))

model, x, y = Net(), torch.randn(8, 12), torch.randint(5, (8,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
wrap = torch.compile(backend="aot_eager")
net = wrap(model) if place == "model" else model
if place == "model in place":
    model.compile(backend="aot_eager")


def loss_of(x, y):
    return F.cross_entropy(net(x), y)


loss_of = wrap(loss_of) if place == "loss" else loss_of
kept = optimizer.step
update = {"optimizer": wrap(kept), "kept step": kept}.get(place, lambda: optimizer.step())


def step(x, y):
    optimizer.zero_grad()
    loss = loss_of(x, y)
    loss.backward()
    update()
    return loss


if place == "step":
    step = wrap(step)
losses, means = [], []
for index in range(6):
    losses.append(step(x * 1e6 if index in huge else x, y).item())
    means.append(model.batch.running_mean.tolist())
    if index == 2:
        graphs = counters["stats"]["unique_graphs"]
total = counters["stats"]["unique_graphs"]
print(json.dumps({"losses": losses, "graphs": total, "late": total - graphs, "means": means,
    "breaks": sum(counters["graph_break"].values()), "weights": model.two.weight.tolist()}))
"""
PLACES = ("model", "model in place", "loss", "step", "optimizer")
Launch = Callable[..., Any]


def counting_from_zero() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture(name="launch")
def _launch(launch: Launch) -> Iterator[Launch]:
    """A run, and what the script printed."""

    def afresh(*words: Any, policy: str) -> tuple[Ran, dict[str, Any]]:
        counting_from_zero()
        ran = launch(SCRIPT, *map(str, words), policy=policy)
        assert ran.status == 0, ran.err
        return ran, json.loads(ran.lines[-1])

    yield afresh
    torch._dynamo.reset()


@functools.cache
def plainly(place: str) -> dict[str, Any]:
    """What the script prints without Mezzo."""
    counting_from_zero()
    out = io.StringIO()
    with mock.patch("sys.argv", ["script.py", place]), contextlib.redirect_stdout(out):
        exec(compile(SCRIPT, "plain", "exec"), {"__name__": "__main__"})
    return json.loads(out.getvalue())


@pytest.mark.parametrize(
    ("place", "policy", "bad"), [*((place, "fp16", [4]) for place in PLACES), ("step", "bf16", [])]
)
def test_numbers_of_eager_and_graphs_of_the_plain_script(
    place: str, policy: str, bad: list[int], launch: Launch
) -> None:
    """The fifth input overflows fp16. What its forward pass made of the running statistics is taken back."""
    plain = plainly(place)
    (ran, ours), (_, eager) = launch(place, *bad, policy=policy), launch("none", *bad, policy=policy)
    moved = [index not in bad for index in range(6)]
    assert [update.moved for update in ran.of("update")] == moved
    for means in (ours["means"], eager["means"]):
        assert [one != other for one, other in itertools.pairwise(means)] == moved[1:]
    if place == "optimizer":  # compiled, its multiply-adds may be fused
        assert ours["losses"] == pytest.approx(eager["losses"], rel=1e-5, nan_ok=True)
        # The step is written down, which breaks the graph once more. The optimizer's graph is the same.
    else:
        assert str(ours["losses"]) == str(eager["losses"])  # NaN is NaN
        assert ours["means"] == eager["means"]
    assert ours["losses"][:4] != plain["losses"][:4]  # it did run in 16 bits
    breaks = plain["breaks"] + (place == "optimizer")
    assert (ours["graphs"], ours["breaks"], ours["late"]) == (plain["graphs"], breaks, 0)


@pytest.mark.parametrize("place", ["model in place", "kept step", "loss", "step"])
def test_stored_weights(place: str, launch: Launch) -> None:
    """Called from plain Python, a model's weights become bf16 before the compiler sees them; else they stay FP32.

    A step that the script took from its optimizer before that is Mezzo's afterwards, with the masters.
    """
    stored = place in ("model in place", "kept step")
    ran, printed = launch(place, policy="bf16,masters=split")
    _, eager = launch("none", policy="bf16,masters=split" if stored else "bf16")
    key = "weights" if stored else "losses"
    assert printed[key] == eager[key]
    note = "weights bf16 (4 of 8 parameters), masters split"
    assert (note if stored else "the weights of Net stay FP32: a compiled function calls it") in ran.notes
