"""Training under torch.compile equals training without it: numbers, formats, and how many graphs it takes.

In contexts around and inside of what is compiled, and with MixedPrecision. What a policy keeps in FP32 stays there,
backward too, where numbers lie beyond fp16.
"""

from __future__ import annotations

import functools
import importlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import mezzo
from cpu import needs_avx512
from mezzo.pytorch.autocast import active_policy, compiling

# PyTorch's own: while it imports Inductor; of what a broken step hands on; of torch.amp's mixed inputs.
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]

WORDS, WIDTH = 31, 16
STEPS, WARM = 4, 2  # nothing may be compiled after the first steps

Context = Callable[[], AbstractContextManager[Any]]
Wrap = Callable[[Any], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        count, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(count, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(count, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.randn(8, WIDTH) * 0.02)
        self.blocks = nn.Sequential(Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks(self.token(tokens) + self.position)


class Tied(nn.Module):
    """A table that is the head's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.RMSNorm(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.middle(self.token(tokens)), self.token.weight)


class LSTM(nn.Module):
    """Dynamo leaves recurrent layers to eager PyTorch, and breaks the graph at them."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.token(tokens))[0])


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
    )


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (4, 8)), torch.randint(WORDS, (4, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "cnn": (cnn, lambda: (torch.randn(4, 3, 8, 8), torch.randint(5, (4,)))),
    "gpt": (GPT, words),
    "tied": (Tied, words),
    "lstm": (LSTM, words),
}


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Trained:
    losses: list[Tensor]
    gradients: list[Tensor]  # of the first step
    start: dict[str, Tensor]
    end: dict[str, Tensor]
    graphs: int
    breaks: int
    late: int  # graphs made after the first steps


def train(name: str, backend: str | None, build: Callable[..., Any], window: int = 1) -> Trained:
    """Steps from the same weights and data. `build` makes the step, and a function for the weights afterwards."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    make, data = MODELS[name]
    model, (x, y) = make(), data()
    start = {key: value.clone() for key, value in model.state_dict().items()}
    step, weights = build(model, functools.partial(torch.compile, backend=backend) if backend else as_it_is)
    losses: list[Tensor] = []
    gradients: list[Tensor] = []
    for index in range(STEPS * window):
        losses.append(torch.as_tensor(step(x, y)).detach().clone())
        if index == 0:
            gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        if index + 1 == WARM * window:
            early = counters["stats"]["unique_graphs"]
    total, broken = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    end = {key: value.clone() for key, value in weights().items()}
    torch._dynamo.reset()
    return Trained(losses, gradients, start, end, total, broken, total - early)


# Contexts: what is compiled is the model, the loss, or a function that opens the context itself.


def as_it_is(function: Any) -> Any:
    return function


def in_context(place: str, context: Context) -> Callable[[nn.Module, Wrap], Any]:
    """A step of SGD with `torch.compile` and the context at one of these places."""
    inner, outer = place.split(" in a ")

    def build(model: nn.Module, wrap: Wrap) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inside, outside = {inner: wrap}, {outer: wrap}
        net = inside.get("model", as_it_is)(model)
        plain_loss = inside.get("loss", as_it_is)(lambda x, y: cross_entropy(net(x), y))

        @outside.get("forward", as_it_is)
        def forward(x: Tensor) -> Tensor:
            with context():
                return model(x)

        @outside.get("loss", as_it_is)
        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            if outer == "forward":
                return cross_entropy(forward(x).float(), y)
            with context():
                return plain_loss(x, y)

        @outside.get("step", as_it_is)
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(x, y)
            loss.backward()
            optimizer.step()
            return loss

        return lambda x, y: (optimizer.zero_grad(), step(x, y))[1], model.state_dict

    return build


def nightly(*row: str) -> Any:
    return pytest.param(*row, marks=pytest.mark.nightly)


OVERRIDES = "bf16,op.softmax=lower,op.gelu=fp32"
ROWS = [
    *(("gpt", f"{inner} in a context", "bf16") for inner in ("model", "loss")),
    *(nightly("gpt", f"context in a {outer}", "bf16") for outer in ("forward", "loss", "step")),
    *((model, "context in a step", "bf16") for model in ("cnn", "lstm")),
    nightly("tied", "context in a step", "bf16"),
    nightly("cnn", "loss in a context", "bf16"),
    ("lstm", "loss in a context", "bf16,hidden=fp32"),
    ("gpt", "context in a loss", OVERRIDES),
    nightly("tied", "loss in a context", "fp16"),
    ("tied", "context in a forward", "fp16"),
]


def region(spec: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if spec == "torch.amp" else mezzo.autocast(spec, "cpu")


@functools.cache
def trained(model: str, place: str, spec: str, backend: str | None) -> Trained:
    return train(model, backend, in_context(place, lambda: region(spec)))


def close(got: Trained, expected: Trained, ulp: float) -> None:
    """Eager Mezzo has kernels of its own, and rounds what an emulated attention saves; a compiler is given PyTorch's
    operations for them, and decides by itself what it saves."""
    for mine, theirs in zip(got.gradients, expected.gradients, strict=True):
        assert mine.dtype is theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2 * ulp * float(theirs.abs().max()))
    for one, other in zip(got.losses, expected.losses, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=ulp, atol=0)


@pytest.mark.parametrize(("model", "place", "spec"), ROWS)
def test_numbers_of_eager_and_no_more_graphs_than_torch_amp(model: str, place: str, spec: str) -> None:
    if model == "lstm":
        needs_avx512("torch.amp cannot run an LSTM in bf16")
    ours, theirs = (trained(model, place, which, "aot_eager") for which in (spec, "torch.amp"))
    close(ours, trained(model, place, spec, None), 2.0**-10 if spec == "fp16" else 2.0**-8)
    assert ours.losses[-1] < ours.losses[0]
    assert active_policy.label() == 0
    assert ours.late == theirs.late == 0
    if model == "lstm" and place.startswith("context in"):
        # The layer breaks the graph inside the context, and Dynamo then runs the function that opened it as it is: it
        # can resume behind a break in `torch.autocast` and in no other context manager.
        assert ours.breaks <= theirs.breaks
        assert ours.graphs <= theirs.graphs
    else:
        assert (ours.graphs, ours.breaks) == (theirs.graphs, theirs.breaks)


# Inputs of these are operands of products; of attention the first three (its log-sum-exp is FP32).
PRODUCTS = dict.fromkeys(("mm", "addmm", "bmm", "convolution", "convolution_backward")) | {
    "_scaled_dot_product_flash_attention_for_cpu": 3,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 4,
}


def operands(nodes: list[torch.fx.Node]) -> set[torch.dtype]:
    found = set()
    for node in nodes:
        name = getattr(getattr(node.target, "_schema", None), "name", "").removeprefix("aten::")
        if name in PRODUCTS:
            values = [argument.meta["val"] for argument in node.args if isinstance(argument, torch.fx.Node)]
            found |= {value.dtype for value in values[: PRODUCTS[name]]}
    return found


def compiled_graphs(model: str, contender: str, split: bool = False) -> Any:
    torch.manual_seed(0)
    make, data = MODELS[model]
    net, (x, y) = make(), data()
    if split:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        mezzo.MixedPrecision(net, optimizer, precision="bf16", masters="split").close()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with region(contender):
            return cross_entropy(net(x), y)

    return importlib.import_module("graphs").graphs_of(loss_of, x, y)


@pytest.mark.parametrize("model", ["gpt", "cnn"])
def test_backward_multiplies_what_forward_did_and_nothing_wide_is_saved(model: str, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    theirs = compiled_graphs(model, "torch.amp")
    for split in (False, True):
        ours = compiled_graphs(model, "bf16", split)
        assert operands(ours.forward) == operands(ours.backward) == {torch.bfloat16}
        assert ours.bytes_saved(torch.float32) <= theirs.bytes_saved(torch.float32)
        assert ours.bytes_saved() <= theirs.bytes_saved()


@pytest.mark.compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")
@pytest.mark.parametrize(
    ("model", "place"),
    [
        ("tied", "context in a loss"),
        nightly("gpt", "context in a loss"),
        nightly("gpt", "model in a context"),
    ],
)
def test_inductor_gives_the_eager_numbers(model: str, place: str) -> None:
    """Inductor fuses, and rounds less often in between: the format's tolerance, a few ulps of the largest gradient."""
    close(trained(model, place, "bf16", "inductor"), trained(model, place, "bf16", None), 2.0**-7)


MODES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "split": {"precision": "bf16", "masters": "split"},
    "lean": {"precision": "bf16", "masters": "split8", "state": "int8"},
    "accumulate, clip": {"precision": "bf16", "accumulate": 2, "clip_norm": 0.5},
    "split, accumulate": {"precision": "bf16", "masters": "split", "accumulate": 2},
    "fp16 scaler": {"precision": "fp16", "clip_norm": 1.0},
    "gradient release": {"precision": "bf16", "masters": "split", "release_gradients": True},
}
# The compiled pass of "gradient release" is that of "split", which has the larger model.
TRAININGS = [
    *(("gpt", mode, "loss") for mode in ("bf16", "split", "lean", "accumulate, clip", "fp16 scaler")),
    ("tied", "gradient release", "loss"),
    ("tied", "split", "model before"),
    nightly("gpt", "split", "model after"),
    ("tied", "split", "context and loss"),
    ("cnn", "fp16 scaler", "model in place"),
    nightly("gpt", "bf16", "step"),
    ("gpt", "split, accumulate", "step"),
]


def mixed_precision(mode: str, place: str) -> Callable[[nn.Module, Wrap], Any]:
    def build(model: nn.Module, wrap: Wrap) -> Any:
        handed = wrap(model) if place == "model before" else model
        optimizer = torch.optim.SGD(handed.parameters(), lr=0.1, momentum=0.9)
        mp = mezzo.MixedPrecision(handed, optimizer, **MODES[mode])
        net = wrap(model) if place == "model after" else handed
        if place == "model in place" and isinstance(wrap, functools.partial):
            model.compile(**wrap.keywords)

        at = {place: wrap}
        loss_of = at.get("loss", as_it_is)(lambda x, y: cross_entropy(net(x), y))

        @at.get("context and loss", as_it_is)
        def forward(x: Tensor, y: Tensor) -> Tensor:
            with mp.autocast():
                return loss_of(x, y)

        step = at.get("step", as_it_is)(lambda x, y: mp.step(forward(x, y)))

        def weights() -> dict[str, Tensor]:
            found = mezzo.master_state_dict(model, optimizer)
            mp.close()
            return found

        return lambda x, y: step(x, y).loss, weights

    return build


@pytest.mark.parametrize(("name", "mode", "place"), TRAININGS)
def test_compiled_equals_eager_in_one_graph(name: str, mode: str, place: str) -> None:
    """To the bit where both run the same operations; else the way from the first weights by the format's ulp.

    They don't where eager Mezzo has a kernel of its own (16-bit layer_norm) or keeps less for backward (emulation).
    """
    window, build = MODES[mode].get("accumulate", 1), mixed_precision(mode, place)
    got, expected = (train(name, backend, build, window) for backend in ("aot_eager", None))
    ulp = {"fp16 scaler": 2.0**-10}.get(mode, 2.0**-8 if "masters" in MODES[mode] else 0.0)
    torch.testing.assert_close(torch.stack(got.losses), torch.stack(expected.losses), rtol=ulp, atol=0)
    for key, value in got.end.items():
        way = float((expected.end[key] - expected.start[key]).abs().max())
        torch.testing.assert_close(value, expected.end[key], rtol=0, atol=4 * ulp * way)
    assert (got.graphs, got.breaks, got.late) == (1, int(place == "step"), 0)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


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
    """Whether each of three steps was skipped, and its loss; the weights after all."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), Large(), nn.Linear(8, 1)), torch.randn(16, 8)
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=1e-13), precision, loss_scale=1024.0)
    model = torch.compile(net, backend="aot_eager") if compiled else net
    found: list[Any] = []
    for _ in range(3):
        with mp.autocast():
            loss = model(x).square().mean()
        found.append((mp.step(loss).skipped, float(loss.detach()).hex()))
    mp.close()
    return [*found, *(param.tolist() for param in net.parameters())]


@pytest.mark.parametrize("precision", ["fp16,module.1=fp32", "fp16,op.linear=fp32", "bf16,module.1=fp32"])
def test_a_compiled_backward_pass_keeps_it_in_fp32(precision: str) -> None:
    torch._dynamo.reset()
    eager, compiled = (trained_with_large(precision, yes) for yes in (False, True))
    assert [skipped for skipped, _ in eager[:3]] == [False] * 3
    assert compiled == eager


def test_a_setting_of_the_users_stays() -> None:
    from torch._functorch import config

    users = [{"device_type": "cpu"}]
    for before, during in ((users, users), ("off", "off"), ("same_as_forward", "off")):
        with config.patch(backward_pass_autocast=before):
            compiling.begin()
            assert config.backward_pass_autocast == during
            compiling.end()
            assert config.backward_pass_autocast == before
