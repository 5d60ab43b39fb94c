"""`benchmarks/emulation.py`: it counts what forward keeps, judges by its bars, and says what it leaves out."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
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


def test_a_tensor_that_onednn_keeps_packed_is_counted(bench: ModuleType) -> None:
    with bench.Made() as made:
        packed = torch.ones(6, 4).to_mkldnn()
    assert sum(count for count, _ in made.alive()) == 96
    del packed
    assert made.alive() == []


def test_fp32_keeps_what_autograd_saves(bench: ModuleType, tiny: Callable[[], Any]) -> None:
    del tiny
    counts = sorted(count for count, _ in bench.kept_bytes("digits", "fp32"))
    # The ReLU's output [6, 16], the log-softmax [6, 4], the loss and the weight of its mean.
    assert counts == [4, 4, 4 * 6 * 4, 4 * 6 * 16]


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


def test_a_policy_that_raises_is_a_result_and_fp32s_failure_is_not(
    bench: ModuleType, tiny: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    del tiny
    step = bench.Contender.step

    def broken(self: Any) -> None:
        if self.policy == wrong:
            raise RuntimeError("boom\nand more")
        step(self)

    monkeypatch.setattr(bench.Contender, "step", broken)
    wrong = "bf16"
    found = bench.beside_fp32([bench.measure("digits", ("bf16", "fp16"), rounds=2)])
    assert found["raised"] == {"bf16": "RuntimeError: boom"}
    assert found["policies"].keys() == {"fp32", "fp16"}
    wrong = "fp32"
    with pytest.raises(RuntimeError, match="boom"):
        bench.measure("digits", ("bf16",), rounds=2)


def test_an_interval_knows_of_processes_that_differ(bench: ModuleType) -> None:
    def process(slower: float) -> dict[str, Any]:
        seconds = {"fp32": [1.0, 1.1, 0.9, 1.0], "fp16": [slower * t for t in (1.0, 1.1, 0.9, 1.0)]}
        return {"summary": "", "seconds": seconds, "kept_bytes": {"fp32": 2, "fp16": 1}, "raised": {}}

    alone = bench.beside_fp32([process(1.2)])["policies"]["fp16"]
    assert alone["time"] == [1.2, 1.2, 1.2]
    three = bench.beside_fp32([process(slower) for slower in (1.2, 1.5, 1.25)])["policies"]["fp16"]
    assert three["time_by_process"] == [1.2, 1.5, 1.25]
    value, low, high = three["time"]
    assert low <= 1.2 < value < 1.5 <= high
    assert three["kept"] == 0.5


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


def test_the_table_fits_80_columns(bench: ModuleType) -> None:
    row = {"milliseconds": 1234.5, "time": [12.34, 10.01, 14.99], "kept_bytes": 9, "kept": 0.123}
    found = {"summary": "a model", "policies": dict.fromkeys(("fp32", "fp16", "fp8"), row)}
    file = StringIO()
    raised = {"fp17": "left out: [b]why[/b]"}
    bench.show({"text-lstm": {"none": found | {"raised": raised}}}, Console(file=file, width=80))
    told = file.getvalue()
    assert "fp16 1234 12.34 (10.01 to 14.99) 1.4 missed 0.123 0.6 met" in " ".join(told.split())
    assert "fp17: left out: [b]why[/b]" in told
    assert "…" not in told


@pytest.mark.heavy
def test_children_find_the_machine_that_they_are_told(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    words = ["--only", "digits", "--policy", "bf16", "--rounds", "2", "--processes", "1", "--threads", "1"]
    words += ["--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["emulation.py", *words])
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "bf16,fp16")  # a child is told by its own column
    bench.main()
    found = json.loads(out.read_text())
    assert found["machine"]["threads"] == 1
    assert found["demos"].keys() == {"digits"}
    assert found["demos"]["digits"].keys() == {"own", "none"}
    kept = found["demos"]["digits"]["none"]["policies"]["bf16"]["kept"]
    # Nothing native: of a weight the parameter itself is kept, of activations half, of pooling's indices a quarter.
    assert 0.4 < kept < 0.5
    assert "digits, native=none" in capsys.readouterr().out
