"""benchmarks/optimizers.py: what it counts, in which order it steps, and that one contender can't end it."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

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


def test_tensors_without_memory_are_left_out(live: ModuleType) -> None:
    """Other tests leave fake ones behind, and to ask one for its address is a warning."""
    with FakeTensorMode():
        fake = torch.zeros(1000)
    assert live.bytes_of(fake, torch.zeros(1000, device="meta"), torch.zeros(10)) == 40
    assert isinstance(live.alive(), dict)


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


@pytest.mark.parametrize("size", ["1M", "16M", "128M"])
def test_a_transformer_has_about_the_size_in_many_tensors(size: str) -> None:
    shapes = importlib.import_module("shapes")
    found = shapes.transformer(size)
    assert len(found) == 148
    assert sum(torch.Size(shape).numel() for shape in found) == pytest.approx(shapes.SIZES[size], rel=1e-3)


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
def test_what_a_contender_raises_is_a_row_and_the_others_run(
    optimizers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> Any:
        raise RuntimeError("no such instruction\nand more")

    made = optimizers.CONTENDERS[optimizers.BASELINE]
    table = {
        optimizers.BASELINE: made,
        "broken": optimizers.Contender("", torch.float32, broken),
        "bf16": optimizers.CONTENDERS["torch fused, bf16"],
        "elsewhere": optimizers.Contender("", torch.float32, broken, devices=("cuda",)),
    }
    monkeypatch.setattr(optimizers, "CONTENDERS", table)
    monkeypatch.setitem(optimizers.LAYOUTS, "one", lambda size: [(1000,)])
    arguments = argparse.Namespace(device="cpu", rounds=3, patience=60.0, memory=1e-6)
    found = optimizers.cell("1M", "one", list(table), arguments, 1e9, QUIET)
    assert found["raised"] == {
        "broken": "RuntimeError: no such instruction",
        "elsewhere": "not run on cpu: it exists for cuda",
    }
    assert list(found["rows"]) == [optimizers.BASELINE, "bf16"]
    assert found["rows"]["bf16"]["bytes_per_parameter"]["total"] == pytest.approx(8, abs=0.02)
    assert found["rows"][optimizers.BASELINE]["ratio"] == 1.0


@pytest.mark.heavy
def test_batches_each_have_the_baseline(optimizers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [optimizers.BASELINE, "torch fused, bf16", "torch foreach, bf16"]
    started: list[Any] = []
    start = optimizers.start

    def counted(contender: Any, *rest: Any) -> Any:
        started.append(contender)
        return start(contender, *rest)

    monkeypatch.setattr(optimizers, "start", counted)
    monkeypatch.setitem(optimizers.LAYOUTS, "one", lambda size: [(1000,)])
    arguments = argparse.Namespace(device="cpu", rounds=2, patience=60.0, memory=1e-6)
    found = optimizers.cell("1M", "one", names, arguments, 1e9, QUIET)
    baseline, fused, foreach = (optimizers.CONTENDERS[name] for name in names)
    assert found["batches"] == 2
    assert started == [baseline, fused, baseline, foreach]


def test_a_contenders_environment_is_put_back(
    optimizers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEZZO_KERNELS", "numba")
    with optimizers.CONTENDERS["mezzo split/fp32, fallback"].environment():
        assert os.environ["MEZZO_KERNELS"] == "reference"
    assert os.environ["MEZZO_KERNELS"] == "numba"


@pytest.mark.heavy
def test_distances_from_fp64_tell_exact_from_rounded(optimizers: ModuleType) -> None:
    names = [optimizers.BASELINE, "torch fused, bf16", "mezzo split/fp32, fallback"]
    found = optimizers.distances({name: optimizers.CONTENDERS[name] for name in names}, "cpu", QUIET)
    fused, bf16, split = (found[name] for name in names)
    assert fused["master"] < 1e-4 < 0.1 < bf16["master"]
    assert split["master"] < 2 * fused["master"]
    assert 1e-3 < split["weight"] < bf16["weight"]
