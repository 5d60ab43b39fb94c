"""Training under torch.compile equals training without it: numbers, formats, and how many graphs it takes."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mezzo
from compile_cases import MODELS, PLACES, Trained, cross_entropy, train
from mezzo.pytorch.autocast import active_policy

# PyTorch's own: while it imports Inductor; of what a broken step hands on; of torch.amp's mixed inputs.
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]

OVERRIDES = "bf16,op.softmax=lower,op.gelu=fp32"
ROWS = [
    *(("gpt", place, "bf16") for place in PLACES),
    *(
        (model, place, "bf16")
        for model in ("cnn", "tied", "lstm")
        for place in ("loss in a context", "context in a step")
    ),
    *(("gpt", place, OVERRIDES) for place in ("model in a context", "context in a loss")),
    *(("mlp", place, "fp16") for place in ("loss in a context", "context in a forward")),
]
# One ulp of the format: eager Mezzo has kernels of its own (norms, cross entropy), and rounds what an emulated
# attention saves; a compiler is given PyTorch's operations for them, and decides by itself what it saves.
ULP = {"bf16": 2.0**-8, OVERRIDES: 2.0**-8, "fp16": 2.0**-10}


@functools.cache
def trained(model: str, place: str, spec: str, backend: str | None) -> Trained:
    if spec == "torch.amp":
        return train(model, place, lambda: torch.autocast("cpu", torch.bfloat16), backend)
    return train(model, place, lambda: mezzo.autocast(spec, "cpu"), backend)


def close(got: Trained, expected: Trained, ulp: float) -> None:
    for mine, theirs in zip(got.gradients, expected.gradients, strict=True):
        assert mine.dtype is theirs.dtype
        largest = float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2 * ulp * largest)
    for one, other in zip(got.losses, expected.losses, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=ulp, atol=0)


@pytest.mark.parametrize(("model", "place", "spec"), ROWS)
def test_numbers_of_eager_and_no_more_graphs_than_torch_amp(model: str, place: str, spec: str) -> None:
    ours, theirs = (trained(model, place, which, "aot_eager") for which in (spec, "torch.amp"))
    close(ours, trained(model, place, spec, None), ULP[spec])
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
PRODUCTS = {"mm": None, "addmm": None, "bmm": None, "convolution": None, "convolution_backward": None} | {
    "_scaled_dot_product_flash_attention_for_cpu": 3,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 4,
}


def operands(node: torch.fx.Node) -> list[torch.dtype] | None:
    """Formats of what a product multiplies; None for any other operation."""
    name = node.target._schema.name.removeprefix("aten::") if hasattr(node.target, "_schema") else ""
    if name not in PRODUCTS:
        return None
    values = [argument.meta["val"] for argument in node.args if isinstance(argument, torch.fx.Node)]
    return [value.dtype for value in values[: PRODUCTS[name]]]


@functools.cache
def benchmark_graphs() -> Any:
    """The benchmarks' module of that name, whose folder is no package."""
    file = Path(__file__).parents[1] / "benchmarks" / "graphs.py"
    spec = importlib.util.spec_from_file_location("benchmark_graphs", file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_graphs"] = module  # dataclasses look themselves up there
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


@functools.cache
def compiled_graphs(model: str, contender: str) -> Any:
    torch.manual_seed(0)
    make, data = MODELS[model]
    net, (x, y) = make(), data()
    if contender == "split":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        mp = mezzo.MixedPrecision(net, optimizer, precision="bf16", masters="split")
        mp.close()
    context = functools.partial(mezzo.autocast, "bf16", "cpu")
    if contender == "torch.amp":
        context = functools.partial(torch.autocast, "cpu", torch.bfloat16)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with context():
            return cross_entropy(net(x), y)

    return benchmark_graphs().graphs_of(loss_of, x, y)


@pytest.mark.parametrize("contender", ["mezzo", "split"])
@pytest.mark.parametrize("model", ["gpt", "cnn"])
def test_backward_multiplies_what_forward_multiplied_and_nothing_wide_is_saved(
    model: str, contender: str
) -> None:
    ours, theirs = compiled_graphs(model, contender), compiled_graphs(model, "torch.amp")
    for nodes in (ours.forward, ours.backward):
        formats = [found for node in nodes if (found := operands(node)) is not None]
        assert formats
        assert all(set(found) == {torch.bfloat16} for found in formats)
    assert ours.bytes_saved(torch.float32) <= theirs.bytes_saved(torch.float32)
    assert ours.bytes_saved() <= theirs.bytes_saved()


@pytest.mark.compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")
@pytest.mark.parametrize("place", ["model in a context", "context in a loss"])
def test_inductor_gives_the_eager_numbers(place: str) -> None:
    """Inductor fuses, and rounds less often in between: the format's tolerance, a few ulps of the largest gradient."""
    close(trained("gpt", place, "bf16", "inductor"), trained("gpt", place, "bf16", None), 2.0**-7)
