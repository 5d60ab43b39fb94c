"""benchmarks/optimizers.py: what it counts, in which order it steps, and that one contender can't end it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def optimizers() -> ModuleType:
    return importlib.import_module("optimizers")


@pytest.fixture
def live() -> ModuleType:
    return importlib.import_module("live")


def test_a_storage_counts_once_and_wrappers_count_what_they_wrap(live: ModuleType) -> None:
    a = torch.zeros(10)
    assert live.bytes_of(a, [a.view(2, 5), {"x": a[:3]}]) == 40
    wrapper = torch.nn.Buffer(torch.zeros(50))
    wrapper.__dict__["__tensor_flatten__"] = lambda: (["codes", "scale"], None)
    wrapper.codes, wrapper.scale = torch.zeros(6, dtype=torch.uint8), torch.zeros(1, dtype=torch.bfloat16)
    assert live.bytes_of({"exp_avg": wrapper}) == 8


def test_parts_and_what_is_kept_elsewhere(live: ModuleType) -> None:
    before = live.alive()
    param = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.AdamW([param])
    param.grad = torch.ones(1000)
    optimizer.step()
    hidden = [torch.zeros(500)]
    assert live.parts(optimizer) == {"weights": 4000, "gradients": 4000, "state": 8004}
    found = sum(count for storage, count in live.alive().items() if storage not in before)
    assert found == 16004 + 2000
    assert hidden


def test_rounds_rotate_and_a_slow_contender_stops_after_three(
    optimizers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    contender = optimizers.CONTENDERS[optimizers.BASELINE]

    class Fake(SimpleNamespace):
        def step(self) -> None:
            order.append(self.name)

    def fake_seconds(step: Any, device: str) -> float:
        step()
        return 10.0 if order[-1] == "slow" else 0.001

    monkeypatch.setattr(optimizers, "seconds", fake_seconds)
    names = [optimizers.BASELINE, "quick", "slow"]
    runners = {name: Fake(name=name, contender=contender, seconds=[]) for name in names}
    optimizers.race(runners, 5, 12.0, "cpu", QUIET, "")
    b, q, s = names
    assert order == [b, q, s, q, s, b, s, b, q, b, q, q, b]
    assert [len(runner.seconds) for runner in runners.values()] == [5, 5, 3]


@pytest.mark.heavy
def test_distances_from_fp64_tell_exact_from_rounded(optimizers: ModuleType) -> None:
    names = [optimizers.BASELINE, "torch fused, bf16", "mezzo split/fp32, fallback"]
    found = optimizers.distances({name: optimizers.CONTENDERS[name] for name in names}, "cpu", QUIET)
    fused, bf16, split = (found[name] for name in names)
    assert fused["master"] < 1e-4 < 0.1 < bf16["master"]
    assert split["master"] < 2 * fused["master"]
    assert 1e-3 < split["weight"] < bf16["weight"]
