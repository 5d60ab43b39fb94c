"""The policy's identity: labels, checkpointing, compile caches shared between processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.core.errors import UnsupportedPrecisionError
from mezzo.core.policy import policy
from mezzo.pytorch.autocast import active_policy, compiling

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW = "bf16,op.softmax=lower"
VARIANTS = pytest.mark.parametrize("use_reentrant", [True, False])


class Block:
    """A layer that notes which formats it meets, forward and recomputed."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.randn(8, 8, generator=generator).requires_grad_()
        self.seen: list[tuple[torch.dtype, torch.dtype, str]] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ self.weight
        probabilities = torch.softmax(hidden, -1)
        self.seen.append((hidden.dtype, probabilities.dtype, str(active_policy.current_policy("cpu"))))
        return (probabilities * hidden).exp()

    def gradient(self, use_reentrant: bool | None, spec: str) -> torch.Tensor:
        x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
        with mezzo.autocast(spec):
            out = self(x) if use_reentrant is None else checkpoint(self, x, use_reentrant=use_reentrant)
        return (
            torch.autograd.grad(out.sum(), [x, self.weight])
            if not use_reentrant
            else _backward(out, x, self.weight)
        )


def _backward(out, *leaves):
    for leaf in leaves:
        leaf.grad = None
    out.sum().backward()
    return [leaf.grad for leaf in leaves]


@VARIANTS
@pytest.mark.parametrize("spec", ["bf16", LOW, "fp16"])
def test_recomputation_sees_the_forwards_policy(use_reentrant, spec):
    plain, checkpointed = Block(), Block()
    expected = plain.gradient(None, spec)
    got = checkpointed.gradient(use_reentrant, spec)
    assert checkpointed.seen == plain.seen * 2
    for mine, theirs in zip(got, expected):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert active_policy.label() == 0


@VARIANTS
def test_two_policies_of_one_dtype_alive_in_one_backward(use_reentrant):
    blocks = {spec: Block() for spec in ("bf16", LOW, "fp16")}
    x = torch.randn(4, 8, requires_grad=True)
    total = torch.zeros(())
    for spec, block in blocks.items():
        with mezzo.autocast(spec):
            total = total + checkpoint(block, x, use_reentrant=use_reentrant).float().sum()
    with mezzo.autocast("bf16,op.exp=lower"):  # a third one in force while backward runs
        total.backward()
    for spec, block in blocks.items():
        assert [entry[2] for entry in block.seen] == [spec, spec]
        assert block.seen[0] == block.seen[1]


@VARIANTS
def test_checkpoints_outside_a_region_stay_outside(use_reentrant):
    block = Block()
    x = torch.randn(4, 8, requires_grad=True)
    out = checkpoint(block, x, use_reentrant=use_reentrant)
    with mezzo.autocast("bf16"):
        out.sum().backward()
    assert [str(entry) for entry in block.seen] == [str((FP32, FP32, "None"))] * 2


@VARIANTS
def test_nested_checkpoints(use_reentrant):
    inner, outer = Block(), Block()

    def both(x):
        with mezzo.autocast(LOW):
            low = checkpoint(inner, x, use_reentrant=use_reentrant)
        return outer(low.float())

    x = torch.randn(4, 8, requires_grad=True)
    with mezzo.autocast("bf16"):
        out = checkpoint(both, x, use_reentrant=use_reentrant)
    out.sum().backward()
    assert {entry[2] for entry in inner.seen} == {LOW}
    assert {entry[2] for entry in outer.seen} == {"bf16"}


def test_backward_in_another_thread_recomputes_under_the_policy():
    import threading

    block = Block()
    x = torch.randn(4, 8, requires_grad=True)
    with mezzo.autocast(LOW):
        out = checkpoint(block, x, use_reentrant=False).sum()
    thread = threading.Thread(target=out.backward)
    thread.start()
    thread.join()
    assert [entry[2] for entry in block.seen] == [LOW, LOW]


def test_labels_are_distinct_and_never_reused():
    specs = [
        f"bf16,op.{op}={rule}"
        for op in ("tan", "sinh", "cosh")
        for rule in ("lower", "promote", "internal_fp32")
    ]
    labels = {spec: active_policy.successor(0, "cpu", policy(spec)) for spec in specs}
    assert len(set(labels.values())) == len(specs)
    assert all(label % 3 for label in labels.values())
    for spec, label in labels.items():
        assert active_policy.successor(0, "cpu", policy(spec)) == label
        with active_policy.rebound(label):
            assert active_policy.label() == label
            assert active_policy.binding_of(active_policy.label()) == (("cpu", policy(spec)),)
    assert active_policy.label() == 0


def test_a_binding_holds_a_policy_for_each_device(monkeypatch):
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "bf16,fp16")
    first = active_policy.successor(0, "cuda", policy("bf16"))
    both = active_policy.successor(first, "cpu", policy(LOW))
    assert dict(active_policy.binding_of(both)) == {"cuda": policy("bf16"), "cpu": policy(LOW)}
    assert active_policy.successor(both, "cpu", None) == first
    assert active_policy.successor(first, "cuda", None) == 0
    with mezzo.autocast(LOW, "cpu"):
        assert active_policy.current_policy("cuda") is None


def test_exhaustion_says_so(tmp_path):
    code = (
        "import torch, mezzo\n"
        "from mezzo.pytorch.autocast import active_policy\n"
        "from mezzo.core.policy import policy\n"
        "import mezzo.pytorch.autocast.context\n"
        "active_policy._devices = active_policy.label_devices()[:2]\n"
        "for n in range(6): active_policy.successor(0, 'cpu', policy(f'bf16,loss_scale={2 ** n}'))\n"
        "try: active_policy.successor(0, 'cpu', policy('bf16,loss_scale=1024'))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.startswith(
        f"{UnsupportedPrecisionError.__name__} mezzo.autocast: this process has used 6 different"
    )


def test_the_cache_tag_follows_the_policies_and_keeps_the_users_own():
    from torch.compiler import config

    def tag_after(text):
        active_policy.successor(0, "cpu", policy(text))
        compiling.begin()
        try:
            return config.cache_key_tag
        finally:
            compiling.end()

    with config.patch(cache_key_tag="mine"):
        first = tag_after("bf16")
        assert first.startswith("minemezzo:")
        assert tag_after("bf16") == first
        assert tag_after("bf16,op.acos=lower,op.asin=lower") != first
        assert config.cache_key_tag == "mine"
    assert config.cache_key_tag == ""


_CACHED = """
import sys, torch, mezzo
from torch._dynamo.utils import counters

spec = sys.argv[1]
weight = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()

def outside(x):
    return torch.softmax(x @ weight, -1)

def inside(x):
    with mezzo.autocast(spec):
        return outside(x)

x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
with mezzo.autocast(spec):
    out = torch.compile(outside, fullgraph=True)(x)
out.float().sum().backward()
hits = counters["aot_autograd"]["autograd_cache_hit"]
formats = [out.dtype, torch.compile(inside, fullgraph=True)(x).dtype, torch.compile(outside)(x).dtype]
print(*(str(dtype).removeprefix("torch.") for dtype in formats), hits)
"""


@pytest.mark.heavy
@pytest.mark.compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")
def test_processes_that_share_a_compile_cache_never_cross(tmp_path):
    """The same label means another policy in each process: the graph on disk must not be taken for one's own.

    Each process compiles with the region around the call, with the region in the function, and without a region.
    """
    script = tmp_path / "train.py"
    script.write_text(_CACHED)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def run(spec: str) -> str:
        command = [sys.executable, str(script), spec]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-2000:]
        return result.stdout.strip()

    assert run("bf16") == "float32 float32 float32 0"
    assert run(LOW) == "bfloat16 bfloat16 float32 0"  # same label, same Dynamo graph, and no hit
    assert run("bf16") == "float32 float32 float32 1"  # its own graph is found again
