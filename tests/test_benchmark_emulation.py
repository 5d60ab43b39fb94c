"""`benchmarks/emulation.py`: it counts what forward keeps, judges by its bars, and says what it leaves out."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("emulation")


@pytest.fixture
def tiny(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A model with known bytes in place of the demos'."""
    models = importlib.import_module("models")

    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        return models.Workload(model, torch.randn(6, 8), torch.randint(4, (6,)), "tiny", lr=0.01)

    monkeypatch.setattr(bench, "MODELS", {"digits": make})
    return make


def test_what_ops_made_is_counted_once_and_only_while_it_lives(bench: ModuleType) -> None:
    old = torch.ones(100)
    with bench.Made() as made:
        kept = torch.zeros(10)
        view = kept.view(2, 5)
        old.add_(1)
        torch.ones(7)
        half = kept.to(torch.float16)
    assert sorted(count for count, _ in made.alive()) == [20, 40]
    assert any(name.startswith("float16 [10] of aten._to_copy") for _, name in made.alive())
    del kept
    assert sum(count for count, _ in made.alive()) == 60  # the view holds the storage
    del view, half
    assert made.alive() == []


def test_policies_are_measured_beside_fp32_and_the_unknown_are_left_out_aloud(
    bench: ModuleType, tiny: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    del tiny
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "")
    measured = bench.measure("digits", ("fp16", "fp17", "fp16,op.softmax=fp32"), rounds=3)
    found = bench.beside_fp32([measured, measured])
    assert found["policies"].keys() == {"fp32", "fp16", "fp16,op.softmax=fp32"}
    assert found["raised"]["fp17"].startswith("left out: ")
    assert "'fp17'" in found["raised"]["fp17"]
    fp32, fp16 = (found["policies"][policy] for policy in ("fp32", "fp16"))
    assert fp32["time"] == [1, 1, 1]
    assert fp32["kept"] == 1
    assert fp16["kept"] == round(fp16["kept_bytes"] / fp32["kept_bytes"], 4) != 1
    assert fp16["time"][1] <= fp16["time"][0] <= fp16["time"][2]
    json.dumps(found)


@pytest.mark.parametrize(
    ("policy", "time", "kept", "expected"),
    [
        ("fp16", [1.4, 1.2, 1.6], 0.6, {"time": "met", "kept": "met"}),
        ("fp16", [1.41, 1.39, 1.5], 0.601, {"time": "open", "kept": "missed"}),
        ("fp16", [1.5, 1.41, 1.6], 0.5, {"time": "missed", "kept": "met"}),
        ("fp8", [2.6, 2.51, 2.7], 0.5, {"time": "missed", "kept": "met"}),
        ("bf16", [9.0, 9.0, 9.0], 0.61, {"kept": "missed"}),
        ("tf32", [9.0, 9.0, 9.0], 1.0, {}),
    ],
)
def test_bars(
    bench: ModuleType, policy: str, time: list[float], kept: float, expected: dict[str, str]
) -> None:
    assert bench.judge(policy, {"time": time, "kept": kept}) == expected
