"""Recurrent layers and cells in a region: PyTorch's numbers, shapes and random streams, and the format of the state."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_leaves

import mezzo
from mezzo.core.policy import policy
from mezzo.pytorch.dtypes import dtype_of
from mezzo.pytorch.hardware import native_formats

STEPS, BATCH, IN, WIDTH = 9, 4, 5, 7
LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *sizes, **rest: nn.RNN(*sizes, nonlinearity="relu", **rest),
}
CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn_tanh": nn.RNNCell,
    "rnn_relu": lambda *sizes, **rest: nn.RNNCell(*sizes, nonlinearity="relu", **rest),
}
SPECS = ["bf16", "fp16", "bf16,hidden=fp32", "fp16,hidden=fp32"]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@dataclass(frozen=True)
class Row:
    """A kind of layer and what its module is built with."""

    kind: str
    built: dict[str, Any] = field(default_factory=dict)

    def module(self, *sizes: int, seed: int = 0) -> nn.RNNBase:
        torch.manual_seed(seed)
        return LAYERS[self.kind](*(sizes or (IN, WIDTH)), **self.built)

    def __str__(self) -> str:
        return "-".join([self.kind, *(f"{name}={value}" for name, value in self.built.items())])


ROWS = [
    *(Row(kind) for kind in LAYERS),
    Row("lstm", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    Row("lstm", {"proj_size": 3, "num_layers": 2, "bidirectional": True}),
    Row("gru", {"num_layers": 3, "dropout": 0.4, "bidirectional": True}),
]
KINDS = pytest.mark.parametrize("kind", list(LAYERS))
NATIVE = pytest.mark.skipif(
    "bf16" not in native_formats("cpu"), reason="this CPU does not multiply bf16 itself"
)


def compute_of(spec: str) -> torch.dtype:
    return dtype_of(policy(spec).activations)


def state_of(spec: str) -> torch.dtype:
    """The format of the states that a call returns."""
    return torch.float32 if "hidden=fp32" in spec else compute_of(spec)


def inside(spec: str, run: Callable[..., Any], *args: Any) -> Any:
    """What is computed in a region. PyTorch says that oneDNN has no LSTM with projections."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LSTM with projections")
        if not spec:
            return run(*args)
        with mezzo.autocast(spec, "cpu"):
            return run(*args)


def floating(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def off(got: Tensor, truth: Tensor) -> float:
    """The distance of two tensors over the truth's length."""
    return float((got.detach().double() - truth.detach().double()).norm() / truth.detach().double().norm())


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_modules_give_what_pytorch_gives(row: Row, spec: str) -> None:
    module = row.module()
    x = torch.randn((BATCH, STEPS, IN) if module.batch_first else (STEPS, BATCH, IN))
    lengths = torch.tensor([3, 9, 1, 9])
    packed = pack_padded_sequence(x, lengths, batch_first=module.batch_first, enforce_sorted=False)
    single = x[0] if module.batch_first else x[:, 0]
    compute = compute_of(spec)
    for given in (x, packed, single):
        torch.manual_seed(1)
        truth = inside("", module, given)
        after = torch.get_rng_state()
        torch.manual_seed(1)
        output, *states = floating(inside(spec, module, given))
        assert torch.equal(torch.get_rng_state(), after)
        true_output, *true_states = floating(truth)
        assert output.dtype is compute
        assert [state.dtype for state in states] == [state_of(spec)] * len(states)
        for got, true in zip([output, *states], [true_output, *true_states], strict=True):
            torch.testing.assert_close(got.float(), true, rtol=0, atol=6 * torch.finfo(compute).eps)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@KINDS
def test_an_fp32_state_that_is_handed_on_loses_nothing(kind: str, compute: str) -> None:
    """Two halves of a sequence are the whole: truncated backpropagation rounds no state."""
    module, spec = Row(kind, {"num_layers": 2}).module(), f"{compute},hidden=fp32"
    x = torch.randn(STEPS, BATCH, IN)
    whole, ends = inside(spec, module, x)
    first, middle = inside(spec, module, x[:4])
    second, last = inside(spec, module, x[4:], middle)
    assert off(torch.cat((first, second)), whole) < 0.1 * torch.finfo(compute_of(compute)).eps
    for one, other in zip(floating(last), floating(ends), strict=True):
        assert off(one, other) < 1e-6


FORMATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("of_input", "of_weights", "of_states"), [FORMATS, FORMATS[1:] + FORMATS[:1], FORMATS[2:] + FORMATS[:2]]
)
@pytest.mark.parametrize("spec", ["fp16", "bf16,hidden=fp32"])
def test_every_input_dtype(
    spec: str, of_input: torch.dtype, of_weights: torch.dtype, of_states: torch.dtype
) -> None:
    module = Row("lstm", {"num_layers": 2, "bidirectional": True}).module()
    x = torch.randn(STEPS, BATCH, IN).to(of_input)
    states = [(torch.randn(4, BATCH, WIDTH) * 0.3).to(of_states) for _ in range(2)]
    weights = [w.detach().to(of_weights) for w in module._flat_weights]

    def run(spec: str, dtype: torch.dtype | None) -> tuple[list[Tensor], list[Tensor]]:
        leaves = [t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for t in (x, *states, *weights)]
        args = (leaves[0], leaves[1:3], leaves[3:], True, 2, 0.0, True, True, False)
        outputs = inside(spec, torch.lstm, *args)
        loss = sum((out.double() * out.double().detach().cos()).sum() for out in outputs)
        return list(outputs), list(torch.autograd.grad(loss, leaves))

    (outputs, gradients), (true_outputs, true_gradients) = run(spec, None), run("", torch.float64)
    assert [out.dtype for out in outputs] == [compute_of(spec), *[state_of(spec)] * 2]
    assert [g.dtype for g in gradients] == [of_input, *[of_states] * 2, *[of_weights] * 16]
    for got, truth in zip([*outputs, *gradients], [*true_outputs, *true_gradients], strict=True):
        assert off(got, truth) < 0.02


def gradients_of(module: nn.RNNBase, x: Tensor, slope: Tensor, spec: str, dtype: torch.dtype) -> list[Tensor]:
    twin, leaf = copy.deepcopy(module).to(dtype), x.to(dtype, copy=True).requires_grad_()
    if spec == "torch.autocast":
        with torch.autocast("cpu", torch.bfloat16):
            out = twin(leaf)[0]
    else:
        out = inside(spec, twin, leaf)[0]
    leaves = [leaf, *twin.parameters()]
    return list(torch.autograd.grad((out.float() * slope).sum(), leaves))


@pytest.mark.heavy
@pytest.mark.parametrize(("kind", "built"), [("lstm", {}), ("gru", {"num_layers": 2, "bidirectional": True})])
def test_gradients_are_no_further_off_than_pytorchs(kind: str, built: dict[str, Any]) -> None:
    """Against FP64, the mean error of the seeds for each tensor: an FP32 state and fp16 against torch.autocast in bf16,
    and bf16 against PyTorch's bf16 layer (torch.autocast keeps the state of a GRU on a CPU in FP32).
    """
    seeds = 8
    runs = [
        ("torch.autocast", torch.float32),
        ("", torch.bfloat16),
        ("bf16,hidden=fp32", torch.float32),
        ("fp16", torch.float32),
        ("bf16", torch.float32),
    ]
    errors: dict[int, list[float]] = {}
    for seed in range(seeds):
        module = Row(kind, built).module(24, 32, seed=seed)
        x, slope = torch.randn(48, 16, 24), torch.randn(48, 16, 32 * (1 + module.bidirectional))
        truth = gradients_of(module, x, slope, "", torch.float64)
        for number, (spec, dtype) in enumerate(runs):
            found = gradients_of(module, x, slope, spec, dtype)
            for name, (got, true) in enumerate(zip(found, truth, strict=True)):
                errors.setdefault(name, [0.0] * len(runs))[number] += off(got, true) / seeds
    for name, (autocast, layer, fp32_state, fp16, bf16) in errors.items():
        assert max(fp32_state, fp16) <= autocast, (name, autocast, fp32_state, fp16)
        assert bf16 <= layer, (name, layer, bf16)


@pytest.mark.parametrize("spec", ["fp16", "bf16,hidden=fp32"])
@KINDS
def test_nan_and_infinity_stay_in_their_sequence(kind: str, spec: str) -> None:
    module = Row(kind).module()
    x = torch.randn(STEPS, 3, IN)
    clean = inside(spec, module, x)[0]
    x[4, 0, 0] = float("nan")
    x[4, 1, 0] = float("inf")
    found = inside(spec, module, x)[0]
    assert found[4:, 0].isnan().all()
    assert torch.equal(found[:4], clean[:4])
    assert torch.equal(found[:, 2], clean[:, 2])
    assert torch.equal(found[4:, 1].isnan(), module(x)[0][4:, 1].isnan())


def chain(cell: nn.Module, xs: Tensor, state: Any = None) -> list[Tensor]:
    """The states that a loop of cells goes through, h and c in turn."""
    seen = []
    for x in xs:
        state = cell(x, state)
        seen += floating(state)
    return seen


@pytest.mark.parametrize("spec", SPECS)
@KINDS
def test_a_loop_of_cells_gives_what_pytorch_gives(kind: str, spec: str) -> None:
    cell = CELLS[kind](IN, WIDTH)
    xs = torch.randn(STEPS, BATCH, IN)
    assert floating(inside(spec, cell, xs[0, 0]))[0].shape == (WIDTH,)  # without a batch

    def run(spec: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        twin, leaf = copy.deepcopy(cell).to(dtype), xs.to(dtype, copy=True).requires_grad_()
        seen = inside(spec, chain, twin, leaf)
        loss = sum((t.double() * t.detach().double().cos()).sum() for t in seen)
        return seen, list(torch.autograd.grad(loss, [leaf, *twin.parameters()]))

    (got, gradients), (truth, true_gradients) = run(spec, torch.float32), run("", torch.float64)
    eps = torch.finfo(compute_of(spec)).eps
    for state, true in zip(got, truth, strict=True):
        assert state.dtype is state_of(spec)
        assert off(state, true) < 4 * eps
        if "hidden=fp32" in spec and kind != "rnn_relu":  # whose state may be one product
            assert not torch.equal(state, state.to(compute_of(spec)).float())
    for gradient, true in zip(gradients, true_gradients, strict=True):
        assert gradient.dtype is torch.float32
        assert off(gradient, true) < 6 * eps


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize(("kind", "spec"), [("lstm", "fp16"), ("gru", "bf16,hidden=fp32")])
def test_compiled(kind: str, spec: str) -> None:
    """Once as Dynamo does it, which leaves the layer out of its graph, and once with the layer in it.

    With gradients PyTorch's own LSTM can't be in a graph ("expected all tensors ... to be Tensors").
    """
    module = Row(kind, {"num_layers": 2}).module()
    x = torch.randn(STEPS, BATCH, IN)

    def run(x: Tensor) -> Any:
        with mezzo.autocast(spec, "cpu"):
            return module(x * 1.0)

    truth = floating(run(x))
    for in_graph in (False, True):
        torch._dynamo.reset()
        with (
            torch._dynamo.config.patch(allow_rnn=in_graph),
            torch.set_grad_enabled(not in_graph or kind == "gru"),
        ):
            found = floating(torch.compile(run, backend="aot_eager", fullgraph=in_graph)(x))
            if found[0].requires_grad:
                module.zero_grad()
                found[0].float().square().sum().backward()
                assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
        assert [t.dtype for t in found] == [t.dtype for t in truth]
        for got, true in zip(found, truth, strict=True):
            torch.testing.assert_close(got, true, rtol=0, atol=0.02)


# Why a state is kept in FP32: what a step adds to a state 256 times larger is lost in bf16.

LONG = 4000
GROWTH = 2.0**-10  # of an LSTM's cell at each step: more than half an ulp of bf16 up to 0.25
RATE = 2.0**-11  # of the way to 1 that a GRU's state goes at each step


def logit(p: float) -> float:
    return float(torch.tensor(p, dtype=torch.float64).logit())


def counter(kind: str) -> nn.RNNBase:
    """A layer of one unit that adds at each step, whatever comes in."""
    module = LAYERS[kind](1, 1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        if kind == "lstm":  # c + GROWTH: input gate open as far as that, forget gate wide open, candidate 1
            module.bias_ih_l0.copy_(torch.tensor([logit(GROWTH), 30.0, 10.0, 0.0]))
        elif kind == "gru":  # h + RATE * (1 - h): update gate, candidate 1
            module.bias_ih_l0.copy_(torch.tensor([0.0, logit(1 - RATE), 10.0]))
        else:  # h + GROWTH
            module.weight_hh_l0.fill_(1.0)
            module.bias_ih_l0.fill_(GROWTH)
    return module


@torch.no_grad()
def counted(kind: str, spec: str, steps: int = LONG) -> float:
    """The state after so many steps."""
    return float(floating(inside(spec, counter(kind), torch.zeros(steps, 1, 1)))[-1])


def reached(kind: str, steps: int) -> float:
    """Where a counter is after so many steps by arithmetic."""
    return steps * GROWTH if kind == "lstm" else 1 - (1 - RATE) ** steps


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_an_fp32_state_counts_on(kind: str, compute: str) -> None:
    """The biases are rounded, as every factor is."""
    spec = f"{compute},hidden=fp32"
    assert counted(kind, spec) == pytest.approx(reached(kind, LONG), rel=0.02)


@NATIVE
@pytest.mark.parametrize("spec", ["bf16", "bf16,hidden=compute"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_rounded_state_sticks(kind: str, spec: str) -> None:
    assert counted(kind, spec) < 0.5 * reached(kind, LONG)
    assert counted(kind, spec) == counted(kind, spec, 2 * LONG)  # for good


def test_the_page_runs() -> None:
    """`docs/recurrent.md`, block after block."""
    page = (Path(__file__).parents[1] / "docs" / "recurrent.md").read_text()
    blocks = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    assert len(blocks) == 3
    exec("\n".join(blocks), {})
