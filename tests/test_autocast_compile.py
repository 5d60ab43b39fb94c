"""Policies under torch.compile: around the call and inside the function, changed, nested, checkpointed."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.amp import autocast as amp
from mezzo.core.policy import policy
from mezzo.pytorch.autocast import active_policy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW = "bf16,op.softmax=lower"

# PyTorch's own, while it imports Inductor.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")

NEEDS_GPP = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")
INDUCTOR = pytest.param("inductor", marks=[pytest.mark.nightly, pytest.mark.compiler, NEEDS_GPP])
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])

WEIGHT = torch.linspace(-1, 1, 64).reshape(8, 8)
X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert active_policy.label() == 0


def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = x @ WEIGHT
    return hidden, torch.softmax(hidden, -1)


def formats(outputs) -> list[torch.dtype]:
    return [output.dtype for output in outputs]


class Holder:
    """A training loop's object with its own context."""

    policy = policy("bf16")

    def autocast(self):
        return mezzo.autocast(self.policy, "cpu")


holder = Holder()


def with_method(x):
    with holder.autocast():
        return body(x)


def with_torchs_arguments(x):
    with mezzo.autocast("cpu", dtype=BF16), mezzo.autocast("cpu", BF16, cache_enabled=False):
        return body(x)


def other_forms(x):
    found = []
    for context in (amp("cpu"), amp("cpu", dtype=FP16), mezzo.autocast("cpu", LOW), mezzo.autocast("cpu")):
        with context:
            found += body(x)
    return found


decorated = mezzo.autocast("bf16", "cpu")(body)


def several(x):
    with mezzo.autocast("bf16", "cpu"):
        one = body(x)
        with mezzo.autocast(LOW, "cpu"):
            two = body(x)
        with mezzo.autocast("bf16", "cpu", enabled=False):
            three = body(x)
        four = body(x)
    return *one, *two, *three, *four, *body(x)


@BACKENDS
@pytest.mark.parametrize("function", [with_method, with_torchs_arguments, other_forms, decorated, several])
def test_a_context_inside_a_compiled_function(function, backend):
    """The whole graph, the eager context's formats and values, and its gradients."""
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    got, expected = torch.compile(function, fullgraph=True, backend=backend)(x), function(y)
    near = 2e-2 if backend == "inductor" else 0.0
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near)
    for outputs in (got, expected):
        sum(out.float().square().sum() for out in outputs).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=5e-2, atol=5e-2)


def test_a_disabled_context_of_an_absent_device_in_a_compiled_function():
    ops = ("exp", "log", "sum", "prod", "cumsum", "cosh", "sinh", "tan", "acos", "asin")
    own = "fp16,op.asin=lower"
    for spec in (*(f"bf16,op.{op}=lower" for op in ops), own):  # enough for a label on several devices
        with mezzo.autocast(spec, "cpu"):
            state = active_policy.label_state(active_policy.label())
    used = [device for device, dtype in state[2:] if dtype is not None]

    def function(x):
        with mezzo.autocast(own, "cpu"), mezzo.autocast(used[0], enabled=False):
            return body(x)

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert formats(compiled(X)) == formats(function(X)) == [torch.float16, FP32]


@BACKENDS
def test_a_context_around_a_compiled_call_and_its_change(backend):
    compiled = torch.compile(body, fullgraph=True, backend=backend)
    expected = {"bf16": [BF16, FP32], LOW: [BF16, BF16], "fp16": [FP16, FP32], "fp32": [FP32, FP32]}
    for spec in ("bf16", LOW, "bf16", "fp16", "fp32", LOW):
        with mezzo.autocast(spec, "cpu"):
            assert formats(compiled(X)) == expected[spec], spec
    with torch.autocast("cpu", dtype=BF16):
        assert formats(compiled(X)) == [BF16, BF16]  # PyTorch's own table
    assert formats(compiled(X)) == [FP32, FP32]


def test_a_graph_compiled_in_an_open_context_holds_pytorchs_own_functions():
    """One that held a function of Mezzo's would not be kept in AOTAutograd's cache."""
    found = []

    def backend(graph, inputs):
        found.extend(node.target for node in graph.graph.nodes if "grad_enabled" in str(node.target))
        return graph

    @torch.compile(backend=backend)
    def partly_without_gradients(x):
        with torch.no_grad():
            fixed = x.exp()
        return x * fixed

    genuine = torch._C._set_grad_enabled
    with mezzo.autocast("bf16", "cpu"):
        partly_without_gradients(X)
        assert torch._C._set_grad_enabled is not genuine  # again in place, for the context
    assert torch._C._set_grad_enabled is genuine
    assert found == [genuine, genuine]


def test_many_policies_in_one_graph():
    """Labels of several digits, some of them new while the function is being traced."""
    ops = ("tan", "sinh", "cosh", "asin", "acos", "expm1", "log1p", "log2", "exp2", "erfinv")

    def function(x):
        found = []
        for op in ops:
            with mezzo.autocast(f"bf16,op.{op}=lower", "cpu"):
                found += [getattr(torch, op)(x), torch.exp(x)]
        return found

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert formats(compiled(torch.full((4,), 0.5, dtype=BF16))) == [BF16, FP32] * len(ops)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_in_a_compiled_function(use_reentrant):
    def function(x):
        with mezzo.autocast(LOW, "cpu"):
            return checkpoint(lambda x: torch.mul(*body(x)), x, use_reentrant=use_reentrant)

    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    got, expected = torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(y)
    assert got.dtype is expected.dtype
    got.float().sum().backward()
    expected.float().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)


def test_a_context_made_outside_breaks_the_graph():
    context = mezzo.autocast("bf16", "cpu")

    def function(x):
        with context:
            return body(x)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?i)context"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(X)
    torch._dynamo.reset()
    assert formats(torch.compile(function, backend="aot_eager")(X)) == [BF16, FP32]
