"""The label of the active policy: checkpointing, and compile caches shared between processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.core.policy import policy
from mezzo.pytorch.autocast import active_policy, compiling

LOW = "bf16,op.softmax=lower"


class Block:
    """A layer that notes which formats and policy it meets, forward and recomputed."""

    def __init__(self) -> None:
        self.weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        self.seen: list[tuple[torch.dtype, torch.dtype, str]] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ self.weight
        probabilities = torch.softmax(hidden, -1)
        self.seen.append((hidden.dtype, probabilities.dtype, str(active_policy.current_policy("cpu"))))
        return (probabilities * hidden).exp()


def an_input() -> torch.Tensor:
    return torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_sees_the_forwards_policy(use_reentrant):
    """Of one dtype, and none; nested; while another is active; in another thread. Gradients are the plain block's."""
    blocks = {spec: (Block(), Block()) for spec in ("bf16", LOW, "fp16")}
    inner, outer, outside = Block(), Block(), Block()
    total = checkpoint(outside, an_input(), use_reentrant=use_reentrant).sum()
    inputs = {}
    for spec, (block, plain) in blocks.items():
        x, y = inputs[spec] = an_input(), an_input()
        with mezzo.autocast(spec):
            total = total + checkpoint(block, x, use_reentrant=use_reentrant).float().sum()
            total = total + plain(y).float().sum()

    def both(x):
        with mezzo.autocast(LOW):
            low = checkpoint(inner, x, use_reentrant=use_reentrant)
        return outer(low.float())

    with mezzo.autocast("bf16"):
        total = total + checkpoint(both, an_input(), use_reentrant=use_reentrant).float().sum()

    def backward() -> None:
        with mezzo.autocast("bf16,op.exp=lower"):
            total.backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    for spec, (block, plain) in blocks.items():
        assert block.seen == plain.seen * 2
        assert [policy for _, _, policy in block.seen] == [spec] * 2
        x, y = inputs[spec]
        assert torch.equal(x.grad, y.grad)
        assert torch.equal(block.weight.grad, plain.weight.grad)
    for block, policies in ((outside, {"None"}), (inner, {LOW}), (outer, {"bf16"})):
        assert {policy for _, _, policy in block.seen} == policies
    assert outside.seen[0] == outside.seen[1]
    assert active_policy.label() == 0


def test_a_binding_holds_a_policy_for_each_device(monkeypatch):
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "bf16,fp16")
    first = active_policy.successor(0, "cuda", policy("bf16"))
    both = active_policy.successor(first, "cpu", policy(LOW))
    assert dict(active_policy.binding_of(both)) == {"cuda": policy("bf16"), "cpu": policy(LOW)}
    assert active_policy.successor(both, "cpu", None) == first
    assert active_policy.successor(first, "cuda", None) == 0
    with active_policy.rebound(both):
        assert active_policy.label() == both
    with mezzo.autocast(LOW, "cpu"):
        assert active_policy.current_policy("cuda") is None


@pytest.mark.usefixtures("forked")
def test_exhaustion_is_an_error():
    code = (
        "import torch, mezzo\n"
        "from mezzo.pytorch.autocast import active_policy\n"
        "from mezzo.core.policy import policy\n"
        "active_policy._devices = active_policy.label_devices()[:2]\n"
        "for n in range(6): active_policy.successor(0, 'cpu', policy(f'bf16,loss_scale={2 ** n}'))\n"
        "try: active_policy.successor(0, 'cpu', policy('bf16,loss_scale=1024'))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("UnsupportedPrecisionError")
    assert "6 different policies" in printed


def test_the_cache_tag_follows_the_policies_and_keeps_the_users_own():
    from torch.compiler import config

    tags = []
    with config.patch(cache_key_tag="mine"):
        for spec in ("bf16", "bf16", "bf16,op.acos=lower,op.asin=lower"):
            active_policy.successor(0, "cpu", policy(spec))
            compiling.begin()
            tags.append(config.cache_key_tag)
            compiling.end()
        assert config.cache_key_tag == "mine"
    assert tags[0] == tags[1] != tags[2]
    assert tags[0].startswith("minemezzo:")


_CACHED = """
import sys, torch, mezzo
from torch._dynamo.utils import counters

spec = sys.argv[1]
weight = torch.linspace(-1, 1, 64).reshape(8, 8).bfloat16()

def outside(x):
    return x @ weight

def inside(x):
    with mezzo.autocast(spec):
        return outside(x)

x = torch.linspace(-1, 1, 32).reshape(4, 8).bfloat16()
with mezzo.autocast(spec):
    out = torch.compile(outside, fullgraph=True)(x)
hits = counters["aot_autograd"]["autograd_cache_hit"]
formats = [out.dtype, torch.compile(inside, fullgraph=True)(x).dtype, torch.compile(outside)(x).dtype]
print(*(str(dtype).removeprefix("torch.") for dtype in formats), hits)
"""


@pytest.mark.nightly
@pytest.mark.compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")
def test_processes_that_share_a_compile_cache_never_cross(tmp_path: Path) -> None:
    """The same label means another policy in each process: the graph on disk must not be used for both.

    Each process compiles with a context around the call, in the function, and without one.
    """
    script = tmp_path / "train.py"
    script.write_text(_CACHED)
    fast = {"TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    environment = {**os.environ, **fast, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}

    def run(spec: str) -> str:
        command = [sys.executable, str(script), spec]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-2000:]
        return result.stdout.strip()

    assert run("bf16") == "bfloat16 bfloat16 bfloat16 0"
    # The same label and Dynamo graph, and no hit.
    assert run("bf16,op.matmul=fp32") == "float32 float32 bfloat16 0"
    assert run("bf16") == "bfloat16 bfloat16 bfloat16 1"  # its own graph is found again
