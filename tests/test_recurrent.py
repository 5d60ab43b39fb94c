"""Recurrent layers and cells in a region: PyTorch's numbers, shapes and random streams, and the format of the state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_leaves

import mezzo
from mezzo.core.policy import policy
from mezzo.pytorch.dtypes import dtype_of

STEPS, BATCH, IN, WIDTH = 9, 4, 5, 7
LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *sizes, **rest: nn.RNN(*sizes, nonlinearity="relu", **rest),
}
SPECS = ["bf16", "fp16", "bf16,hidden=fp32"]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def layer(kind: str, *sizes: int, seed: int = 0, **built: Any) -> nn.RNNBase:
    torch.manual_seed(seed)
    return LAYERS[kind](*(sizes or (IN, WIDTH)), **built)


ROWS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in LAYERS),
    ("lstm", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    ("lstm", {"proj_size": 3, "num_layers": 2, "bidirectional": True}),
    ("gru", {"num_layers": 3, "dropout": 0.4, "bidirectional": True}),
]
KINDS = pytest.mark.parametrize("kind", list(LAYERS))


def formats_of(spec: str) -> tuple[torch.dtype, torch.dtype]:
    """Of the outputs and the states that a call returns."""
    compute = dtype_of(policy(spec).activations)
    return compute, torch.float32 if "hidden=fp32" in spec else compute


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
    return float((got.detach().double() - truth.detach().double()).norm() / truth.detach().double().norm())


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("kind", "built"), ROWS, ids=str)
def test_modules_give_what_pytorch_gives(kind: str, built: dict[str, Any], spec: str) -> None:
    module = layer(kind, **built)
    x = torch.randn((BATCH, STEPS, IN) if module.batch_first else (STEPS, BATCH, IN))
    lengths = torch.tensor([3, 9, 1, 9])
    packed = pack_padded_sequence(x, lengths, batch_first=module.batch_first, enforce_sorted=False)
    single = x[0] if module.batch_first else x[:, 0]
    compute, of_state = formats_of(spec)
    for given in (x, packed, single):
        torch.manual_seed(1)
        truth = inside("", module, given)
        after = torch.get_rng_state()
        torch.manual_seed(1)
        output, *states = floating(inside(spec, module, given))
        assert torch.equal(torch.get_rng_state(), after)
        true_output, *true_states = floating(truth)
        assert output.dtype is compute
        assert {state.dtype for state in states} == {of_state}
        for got, true in zip([output, *states], [true_output, *true_states], strict=True):
            torch.testing.assert_close(got.float(), true, rtol=0, atol=6 * torch.finfo(compute).eps)


@KINDS
def test_an_fp32_state_that_is_handed_on_loses_nothing(kind: str) -> None:
    """Two halves of a sequence are the whole: truncated backpropagation rounds no state."""
    module, spec = layer(kind, num_layers=2), "bf16,hidden=fp32"
    x = torch.randn(STEPS, BATCH, IN)
    whole, ends = inside(spec, module, x)
    first, middle = inside(spec, module, x[:4])
    second, last = inside(spec, module, x[4:], middle)
    assert off(torch.cat((first, second)), whole) < 0.1 * torch.finfo(torch.bfloat16).eps
    for one, other in zip(floating(last), floating(ends), strict=True):
        assert off(one, other) < 1e-6


# Why a state is kept in FP32: what a step adds to a state 256 times larger is lost in bf16.

LONG = 4000
GROWTH = 2.0**-10  # of an LSTM's cell at each step: more than half an ulp of bf16 up to 0.25
RATE = 2.0**-11  # of the way to 1 that a GRU's state goes at each step
REACHED = {"lstm": LONG * GROWTH, "gru": 1 - (1 - RATE) ** LONG}  # by arithmetic


@torch.no_grad()
def counted(kind: str, spec: str) -> float:
    """The state of one unit that adds at each step, whatever comes in."""

    def logit(p: float) -> float:
        return float(torch.tensor(p, dtype=torch.float64).logit())

    module = LAYERS[kind](1, 1)
    for parameter in module.parameters():
        parameter.zero_()
    if kind == "lstm":  # c + GROWTH: input gate open as far as that, forget gate wide open, candidate 1
        module.bias_ih_l0.copy_(torch.tensor([logit(GROWTH), 30.0, 10.0, 0.0]))
    else:  # h + RATE * (1 - h): update gate, candidate 1
        module.bias_ih_l0.copy_(torch.tensor([0.0, logit(1 - RATE), 10.0]))
    return float(floating(inside(spec, module, torch.zeros(LONG, 1, 1)))[-1])


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_an_fp32_state_counts_on(kind: str) -> None:
    """The biases are rounded, as every factor is."""
    for compute in ("bf16", "fp16"):
        assert counted(kind, f"{compute},hidden=fp32") == pytest.approx(REACHED[kind], rel=0.02)
