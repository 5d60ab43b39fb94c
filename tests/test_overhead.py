"""What a step dispatches, counted beside torch.amp's; and a region touches autocast's state as torch's does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo.pytorch.autocast import active_policy

BF16, FP16 = torch.bfloat16, torch.float16


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
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
    return ops.seen


def test_a_step_in_bf16_dispatches_what_torch_amp_does() -> None:
    expected = _ops(_loop(lambda: torch.autocast("cpu", BF16)))
    assert _ops(_loop(lambda: mezzo.autocast("bf16", "cpu"))) == expected
    short = _ops(_short())
    assert short - expected == {"aten.detach.default": 1}  # the loss that the result tells
    split = _ops(_short(masters="split"))
    assert split["aten._to_copy.default"] < expected["aten._to_copy.default"]


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
