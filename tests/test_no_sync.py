"""A training step asks the device nothing: no `_local_scalar_dense`, no `nonzero`, no copy to the host.

Counted by a dispatch mode on a CPU, with `reading_is_free` saying no. Mezzo's optimizers run without the kernel that
moves the rows (its CPU form reads two numbers; CUDA's is a launch). Not shown: what a CUDA library does inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.training import mixed_precision
from training_steps import Waits, as_on_an_accelerator, network

FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch AdamW": lambda params: torch.optim.AdamW(params, fused=True),
    "torch SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "Mezzo AdamW": lambda params: mezzo.optim.AdamW(params),
    "Mezzo SGD": lambda params: mezzo.optim.SGD(params, lr=0.1, momentum=0.9),
}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip_norm and value": {"clip_norm": 1.0, "clip_value": 0.1},
    "accumulate, clip_norm": {"accumulate": 2, "clip_norm": 1.0},
}


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host doesn't read, and the kernel at the end of a step of Mezzo's optimizers is left out."""
    for other in list(mixed_precision._ALIVE):  # of other tests: steps of several networks do wait
        other.close()
    as_on_an_accelerator(monkeypatch)
    monkeypatch.setenv("MEZZO_KERNELS", "reference")
    monkeypatch.setattr(FusedOptimizer, "_stepper", lambda *_: lambda groups, **numbers: None)


def _losses(mp: mezzo.MixedPrecision, net: nn.Module) -> list[Any]:
    results = []
    for _ in range(2):
        with mp.autocast():
            loss = nn.functional.mse_loss(net(torch.randn(16, 4)), torch.randn(16, 2))
        results.append(mp.step(loss))
    return results


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_no_step_of_the_short_loop_waits(precision: str, make: Any, mode: dict[str, Any]) -> None:
    net = network()
    mp = mezzo.MixedPrecision(net, make(net.parameters()), precision, **mode)
    _losses(mp, net)
    with Waits() as waits:
        results = _losses(mp, net)
    assert not waits.seen
    assert results[-1].updated
    with Waits() as waits:  # it is the reading of a result that waits
        assert results[-1].loss > 0
    assert waits.seen == {"_local_scalar_dense": 1}
    mp.close()


@pytest.mark.usefixtures("as_on_cuda")
def test_networks_that_are_trained_no_more_make_no_step_wait() -> None:
    former = [nn.Sequential(network(), nn.BatchNorm1d(2)) for _ in range(2)]
    for net in former:
        mp = mezzo.MixedPrecision(net, torch.optim.AdamW(net.parameters(), fused=True), "fp16")
        with mp.autocast():
            net(torch.randn(16, 4))
        mixed_precision._ALIVE.discard(mp)
        del mp
    test_no_step_of_the_short_loop_waits("fp16", FUSED["torch AdamW"], {})


def _scaled_step(scaling: Any, net: nn.Module, optimizer: torch.optim.Optimizer, clip: Any = None) -> None:
    with mezzo.autocast("fp16", "cpu"):
        loss = nn.functional.mse_loss(net(torch.randn(16, 4)), torch.randn(16, 2))
    scaling.scale(loss).backward()
    if clip is not None:
        clip()
    scaling.step(optimizer)
    scaling.update()
    optimizer.zero_grad()


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("clips", [False, True], ids=["plain", "clipped"])
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_no_step_with_the_scaler_waits_over_a_fused_optimizer(make: Any, clips: bool) -> None:
    net = network()
    optimizer, scaling = make(net.parameters()), mezzo.GradScaler()
    clip = (lambda: scaling.clip_grad_norm_(optimizer, 1.0)) if clips else None
    for _ in range(2):
        _scaled_step(scaling, net, optimizer, clip)
    with Waits() as waits:
        _scaled_step(scaling, net, optimizer, clip)
    assert not waits.seen
    with Waits() as waits:
        assert not scaling.was_skipped(optimizer)
    assert waits.seen == {"_local_scalar_dense": 1}


def _own_waits() -> Counter[str]:
    """What the optimizer's own step does on a CPU: torch keeps the step counts of some on the host."""
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    for _ in range(2):
        net(torch.randn(16, 4)).sum().backward()
        with Waits() as waits:
            optimizer.step()
    return waits.seen


@pytest.mark.parametrize("way", ["scaler", "short"])
def test_any_other_optimizer_costs_one_wait_for_the_skip(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_an_accelerator(monkeypatch)
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    if way == "scaler":
        scaling = mezzo.GradScaler()
        _scaled_step(scaling, net, optimizer)
        with Waits() as waits:
            _scaled_step(scaling, net, optimizer)
    else:
        mp = mezzo.MixedPrecision(net, optimizer, "fp16", accumulate=2)
        _losses(mp, net)
        with Waits() as waits:
            _losses(mp, net)
        mp.close()
    # The skip, and what the optimizer's own step reads: torch.amp waits as often.
    assert waits.seen - _own_waits() == {"_local_scalar_dense": 1}


def test_records_are_read_together(tmp_path: Any) -> None:
    from mezzo.core import records
    from mezzo.pytorch.training.result import EVERY

    net, path = network(), tmp_path / "run.jsonl"
    writer = records.RecordWriter(path)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    mp = mezzo.MixedPrecision(net, optimizer, "bf16", records=writer)

    def step() -> Counter[str]:
        with mp.autocast():
            loss = nn.functional.mse_loss(net(torch.randn(16, 4)), torch.randn(16, 2))
        with Waits() as waits:
            mp.step(loss)
        return waits.seen

    seen = [sum(step().values()) for _ in range(EVERY + 2)]
    assert [count > 0 for count in seen] == [False] * (EVERY - 1) + [True, False, False]
    assert len(list(records.read(path))) == 2 * EVERY
    mp.close()
    assert [r.kind for r in records.read(path)] == ["loss", "update"] * (EVERY + 2)
    writer.close()
