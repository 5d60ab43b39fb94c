"""Peak tensor bytes against sizes worked out by hand and the CPU allocator's own events; mezzo.keep_memory()."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from alive import bytes_alive
from mezzo.pytorch import keep_memory as module
from mezzo.pytorch import memory
from mezzo.pytorch.memory import PeakTensorBytes, _AllocatorCounter

KB = 1024


@pytest.fixture(autouse=True)
def _as_if_nothing_were_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have compiled something, and the counter would read another stream."""
    if "dynamo" not in request.fixturenames:
        monkeypatch.setattr(memory, "_something_is_compiled", lambda: False)


@pytest.fixture(autouse=True)
def _no_garbage() -> Iterator[None]:
    """Cycles that other tests left behind hold tensors: none is freed between two counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def peak_above_start(work: Callable[[], object]) -> int:
    """The peak less what was alive before: other tests' tensors may live in this process."""
    before = bytes_alive()
    peak = PeakTensorBytes("cpu")
    peak.start()
    kept = work()
    found = peak.stop().peak_bytes - before
    del kept
    return found


def freed_before_the_next() -> None:
    for _ in range(5):
        a = torch.ones(256)
        del a


def resized() -> object:
    a = torch.ones(256)
    a.resize_(1024)
    return a.add_(1)


def saved_for_backward() -> object:
    # x (kept), exp's result (saved by autograd and held by nothing else), sin's result: 1 KB each; the sum.
    x = torch.ones(256, requires_grad=True)
    return x.exp().sin().sum(), x


SIZES: dict[str, tuple[Callable[[], object], int]] = {
    "one tensor": (lambda: torch.ones(256), KB),
    "views": (lambda: [a := torch.ones(256), a.view(16, 16), a[:10], a.t(), a.detach()], KB),
    "freed before the next": (freed_before_the_next, KB),
    "in place": (lambda: torch.ones(256).mul_(2).add_(1), KB),
    "resized": (resized, 4 * KB),
    "saved for backward": (saved_for_backward, 3 * KB + 4),
    # NumPy's memory is seen when it is read.
    "from numpy": (lambda: [a := torch.from_numpy(np.ones(256, dtype=np.float32)), a.view(16, 16)], KB),
}


@pytest.mark.parametrize("name", SIZES)
def test_known_sizes(name: str) -> None:
    work, expected = SIZES[name]
    assert peak_above_start(work) == expected


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_step_of_an_mlp_by_hand(dtype: torch.dtype, size: int) -> None:
    """Two linear layers, no bias, a ReLU between, B rows of width W: the peak is in the 1st one's dW."""
    B, W = 8, 64
    first, second = (torch.nn.Linear(W, W, bias=False, dtype=dtype) for _ in range(2))
    x = torch.randn(B, W, dtype=dtype)

    def step() -> object:
        h = first(x).relu_()  # saved for the second layer and for ReLU: one storage
        y = second(h)
        y.backward(torch.ones_like(y))
        return None

    weight, activation = W * W * size, B * W * size
    # Both weights and x were alive before. In backward's last op there are h and y (named by `step`), the
    # gradient handed to backward (autograd holds it), h's gradient after the ReLU, and both weights'
    # gradients.
    assert peak_above_start(step) == 2 * weight + 4 * activation


def test_the_allocator_agrees() -> None:
    """Two independent counts of the same step: storages by weak reference, and the allocator's events."""
    layers = (torch.nn.Linear(100, 200), torch.nn.GELU(), torch.nn.LayerNorm(200), torch.nn.Linear(200, 10))
    model, x = torch.nn.Sequential(*layers), torch.randn(32, 100)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    storages, allocator = PeakTensorBytes(), _AllocatorCounter()
    storages.start()
    step()
    by_storage = storages.stop().peak_bytes
    allocator.start()
    step()
    assert allocator.stop() == pytest.approx(by_storage, rel=0.02)  # it alone sees scratch inside an op


@pytest.fixture
def dynamo() -> Iterator[None]:
    def forget() -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

    forget()
    yield
    forget()


@pytest.mark.heavy
@pytest.mark.usefixtures("dynamo")
def test_watching_does_not_keep_dynamo_from_compiling_and_compiled_code_is_counted() -> None:
    @torch.compile(backend="eager")
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    x = torch.ones(1024)
    peak = PeakTensorBytes()
    peak.start()
    f(x)
    assert peak.stop().how == "tensor bytes"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    peak.start()
    before = torch.ones(1)  # 4 bytes
    first = peak.stop()
    assert first.how == "tensor bytes (allocator events)"
    peak.start()
    f(x)
    assert peak.stop().peak_bytes == first.peak_bytes + 2 * 4 * KB
    del before


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def test_stop_inside_a_mode_of_the_users_leaves_it_in_force() -> None:
    peak = PeakTensorBytes()
    peak.start()
    with Passing() as theirs:
        peak.stop()
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is theirs
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_higher_order_ops_still_run() -> None:
    peak = PeakTensorBytes()
    peak.start()
    try:
        out = torch.cond(torch.tensor(True), torch.sin, torch.cos, (torch.ones(3),))
    finally:
        peak.stop()
    assert torch.equal(out, torch.ones(3).sin())


# mezzo.keep_memory(): freed memory is used again, and where that can't be told, nothing is claimed.


STEP = """
import resource, torch, mezzo
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(9 << 20)  # 36 MiB, above the 32 that malloc keeps of its own accord
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def settled():
    for _ in range(3):  # malloc lays out eight or nine such blocks before it comes back to the first
        faults()
    return faults()
print(settled(), mezzo.keep_memory(), settled())
"""


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_blocks_are_made_of_the_same_pages_again() -> None:
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    many, kept, few = done.stdout.split()
    if kept != "True":
        pytest.skip("the C library is not glibc, or malloc is another's")
    pages = 8 * (36 << 20) // 4096
    assert int(few) < pages // 100
    assert int(many) >= pages


def test_other_c_libraries_and_allocators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_replaced", lambda: True)
    assert module.keep_memory() is False
    monkeypatch.setattr(module.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(module, "_is_replaced", lambda: False)
    assert module.keep_memory() is False
