"""What a training step costs: ops that it dispatches, counted beside torch.amp's, and none that makes the host wait.

Both are counted by a dispatch mode on a CPU, for waits with `reading_is_free` saying no. There Mezzo's optimizers run
without the kernel that moves the rows (its CPU form reads two numbers; CUDA's is a launch). Not shown: what a CUDA
library does inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo.pytorch.autocast import active_policy
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.training import mixed_precision
from training_steps import Ops, Waits, as_on_an_accelerator, network

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both formats count as native: emulated fp16 dispatches more, and that is not what is counted here."""
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "bf16,fp16")


def _net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return net, torch.optim.AdamW(net.parameters(), fused=True)


def _loss(net: nn.Module) -> torch.Tensor:
    return nn.functional.mse_loss(net(torch.ones(3, 4)), torch.ones(3, 2))


def _loop(region: Callable[[], Any], scaler: Any = None) -> Callable[[], object]:
    net, optimizer = _net()

    def step() -> None:
        with region():
            loss = _loss(net)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    return step


def _short(**keywords: Any) -> Callable[[], object]:
    net, optimizer = _net()
    mp = mezzo.MixedPrecision(net, optimizer, "bf16", **keywords)

    def step() -> None:
        with mp.autocast():
            loss = _loss(net)
        mp.step(loss)

    return step


def _ops(step: Callable[[], object]) -> Counter[str]:
    for _ in range(2):
        step()
    with Ops() as ops:
        step()
    return Counter(ops.names)


@pytest.mark.usefixtures("native")
def test_a_step_in_bf16_dispatches_what_torch_amp_does() -> None:
    expected = _ops(_loop(lambda: torch.autocast("cpu", BF16)))
    assert _ops(_loop(lambda: mezzo.autocast("bf16", "cpu"))) == expected
    short = _ops(_short())
    assert short - expected == {"aten.detach.default": 1}  # the loss that the result tells
    split = _ops(_short(masters="split"))
    assert split["aten._to_copy.default"] < expected["aten._to_copy.default"]


@pytest.mark.usefixtures("native")
def test_a_step_in_fp16_dispatches_little_more_than_torch_amp_does() -> None:
    """More by the counts that floor and patience need: a handful of 0-dim ops, whatever the model's size."""
    expected = _ops(_loop(lambda: torch.autocast("cpu", FP16), torch.amp.GradScaler("cpu")))
    ours = _ops(_loop(lambda: mezzo.autocast("fp16", "cpu"), mezzo.GradScaler("cpu")))
    assert sum((ours - expected).values()) <= 10
    for name in ("aten._amp_foreach_non_finite_check_and_unscale_.default", "aten._fused_adamw_.default"):
        assert ours[name] <= expected[name] == 1


def _state() -> tuple[Any, ...]:
    devices = torch._C._autocast_supported_devices()
    return (
        torch.is_autocast_cache_enabled(),
        tuple((name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in devices),
    )


def _own(state: tuple[Any, ...]) -> tuple[Any, ...]:
    return state[0], tuple(entry for entry in state[1] if entry[0] not in active_policy.label_devices())


OUTSIDE: dict[str, Callable[[], Any]] = {
    "nothing": lambda: torch.autocast("cpu", enabled=False),
    "fp16, no cache": lambda: torch.autocast("cpu", FP16, cache_enabled=False),
    "Mezzo's": lambda: mezzo.autocast("fp16", "cpu"),
}
INSIDE: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": BF16},
    "fp32": {"enabled": False},
    "no cache": {"dtype": BF16, "cache_enabled": False},
}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("outside", OUTSIDE.values(), ids=OUTSIDE)
@pytest.mark.parametrize("inside", INSIDE)
def test_a_region_sets_and_restores_what_torch_autocast_does(inside: str, outside: Callable[[], Any]) -> None:
    how, first = INSIDE[inside], _state()
    policy = "fp32" if inside == "fp32" else "bf16"
    for _ in range(2):  # the first entry of a policy goes through a genuine object, later ones don't
        with outside():
            before = _state()
            with mezzo.autocast(policy, "cpu", cache_enabled=how.get("cache_enabled")):
                seen = _state()
                torch.set_autocast_dtype("cpu", torch.float32)
            assert _state() == before
            with torch.autocast("cpu", **how):
                assert _own(seen) == _own(_state())
        assert _state() == first
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


# No step asks the device anything: no `_local_scalar_dense`, no `nonzero`, no copy to the host.


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
