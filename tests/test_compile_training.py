"""MixedPrecision around compiled code equals itself around eager code, and compiles once.

What a policy keeps in FP32 stays there, backward too, where numbers lie beyond fp16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import mezzo
from compile_cases import MODELS, cross_entropy
from mezzo.pytorch.autocast import compiling

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]

MODES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "split": {"precision": "bf16", "masters": "split"},
    "lean": {"precision": "bf16", "masters": "split8", "state": "int8"},
    "accumulate, clip": {"precision": "bf16", "accumulate": 2, "clip_norm": 0.5},
    "split, accumulate": {"precision": "bf16", "masters": "split", "accumulate": 2},
    "fp16 scaler": {"precision": "fp16", "clip_norm": 1.0},
    "gradient release": {"precision": "bf16", "masters": "split", "release_gradients": True},
}
PLACES = ("model before", "model after", "model in place", "loss", "context and loss")
ROWS = [
    *(("gpt", mode, "loss") for mode in MODES),
    *(("gpt", "split", place) for place in PLACES if place != "loss"),
    ("cnn", "fp16 scaler", "model in place"),
    ("tied", "split", "context and loss"),
]
STEPS = 4


@dataclass(frozen=True)
class Trained:
    """Losses, FP32 weights at first and at the end, graphs, breaks, and graphs made after the first two steps."""

    losses: list[float]
    start: dict[str, Tensor]
    masters: dict[str, Tensor]
    graphs: int
    breaks: int
    late: int


def train(name: str, mode: str, place: str, backend: str | None) -> Trained:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    make, data = MODELS[name]
    model, (x, y) = make(), data()

    def wrap(function: Any) -> Any:
        return torch.compile(function, backend=backend) if backend else function

    start = {key: value.clone() for key, value in model.state_dict().items()}
    handed = wrap(model) if place == "model before" else model
    optimizer = torch.optim.SGD(handed.parameters(), lr=0.1, momentum=0.9)
    mp = mezzo.MixedPrecision(handed, optimizer, **MODES[mode])
    net = wrap(model) if place == "model after" else handed
    if place == "model in place" and backend:
        model.compile(backend=backend)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(net(x), y)

    loss_of = wrap(loss_of) if place == "loss" else loss_of

    def forward(x: Tensor, y: Tensor) -> Tensor:
        with mp.autocast():
            return loss_of(x, y)

    forward = wrap(forward) if place == "context and loss" else forward

    def step(x: Tensor, y: Tensor) -> Any:
        return mp.step(forward(x, y))

    step = wrap(step) if place == "step" else step
    losses, graphs = [], 0
    window = MODES[mode].get("accumulate", 1)
    for index in range(STEPS * window):
        losses.append(float(step(x, y).loss))
        if index + 1 == 2 * window:
            graphs = counters["stats"]["unique_graphs"]
    total = counters["stats"]["unique_graphs"]
    masters = {key: value.clone() for key, value in mezzo.master_state_dict(model, optimizer).items()}
    mp.close()
    return Trained(losses, start, masters, total, sum(counters["graph_break"].values()), total - graphs)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def same(got: Trained, expected: Trained, mode: str) -> None:
    """To the bit where both run the same operations; else the way from the first weights by the format's ulp.

    They don't where eager Mezzo has a kernel of its own (16-bit layer_norm) or keeps less for backward (emulation).
    """
    ulp = {"fp16 scaler": 2.0**-10}.get(mode, 2.0**-8 if "masters" in MODES[mode] else 0.0)
    assert got.losses == pytest.approx(expected.losses, rel=ulp, abs=0)
    for name, value in got.masters.items():
        way = float((expected.masters[name] - expected.start[name]).abs().max())
        torch.testing.assert_close(value, expected.masters[name], rtol=0, atol=4 * ulp * way)


@pytest.mark.parametrize(("name", "mode", "place"), ROWS)
def test_compiled_equals_eager_in_one_graph(name: str, mode: str, place: str) -> None:
    got = train(name, mode, place, "aot_eager")
    same(got, train(name, mode, place, None), mode)
    assert (got.graphs, got.breaks, got.late) == (1, 0, 0)


@pytest.mark.parametrize("mode", ["bf16", "split, accumulate"])
def test_a_step_that_is_compiled_whole(mode: str) -> None:
    got = train("gpt", mode, "step", "aot_eager")
    same(got, train("gpt", mode, "step", None), mode)
    assert (got.graphs, got.breaks, got.late) == (1, 1, 0)


class Large(nn.Module):
    """A linear layer whose input lies beyond fp16's largest number."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        with torch.no_grad():
            self.deep[0].weight.mul_(1e-6)  # so that tanh has a slope

    def forward(self, x: Tensor) -> Tensor:
        return self.deep(x.float() * 1e6)


def trained_with_large(precision: str, compiled: bool) -> list[Any]:
    """Whether each of three steps was skipped, its loss, and the weights after all."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Large(), nn.Linear(8, 1))
    x = torch.randn(16, 8)
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=1e-13), precision, loss_scale=1024.0)
    model = torch.compile(net, backend="aot_eager") if compiled else net
    found: list[Any] = []
    for _ in range(3):
        with mp.autocast():
            loss = model(x).square().mean()
        found.append((mp.step(loss).skipped, float(loss.detach()).hex()))
    mp.close()
    return [*found, *(param.detach().clone() for param in net.parameters())]


@pytest.mark.parametrize("precision", ["fp16,module.1=fp32", "fp16,op.linear=fp32", "bf16,module.1=fp32"])
def test_a_compiled_backward_pass_keeps_it_in_fp32(precision: str) -> None:
    torch._dynamo.reset()
    eager, compiled = trained_with_large(precision, False), trained_with_large(precision, True)
    assert [skipped for skipped, _ in eager[:3]] == [False] * 3
    assert compiled[:3] == eager[:3]
    assert all(torch.equal(one, other) for one, other in zip(compiled[3:], eager[3:], strict=True))


def test_a_setting_of_the_users_stays() -> None:
    from torch._functorch import config

    for before, after in (
        ([{"device_type": "cpu"}], [{"device_type": "cpu"}]),
        ("off", "off"),
        ("same_as_forward", "off"),
    ):
        with config.patch(backward_pass_autocast=before):
            compiling.begin()
            assert config.backward_pass_autocast == after
            compiling.end()
            assert config.backward_pass_autocast == before
