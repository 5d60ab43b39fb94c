"""benchmarks/transfer.py and its table: which steps are timed, what is paired, what a run cut short leaves out."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from mezzo.core.records import UpdateRecord


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    return importlib.import_module("transfer")


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    return importlib.import_module("readme_transfer")


def update(index: int, optimizer: int, at: float, observed: bool = False) -> UpdateRecord:
    return UpdateRecord(index, optimizer, True, False, 1.0, at, observed=observed)


def test_steps_are_those_of_their_stage_without_the_first_and_the_watched(benchmark: ModuleType) -> None:
    at = [0.0, 9.0, 18.0, 20.0, 30.0, 40.0, 43.0]
    first = [update(index, 0, time, observed=index == 4) for index, time in enumerate(at)]
    second = [update(7 + index, 1, 100.0 + index * 0.5) for index in range(4)]
    assert benchmark.step_times([*first, *second]) == {
        "pretraining": {3: 2.0, 6: 3.0},
        "head": {3: 0.5},
        "fine-tuning": {},
    }


def run(benchmark: ModuleType, seconds: dict[int, float], accuracy: float | None = 90.0):  # type: ignore[no-untyped-def]
    times = {stage: dict(seconds) if stage == "pretraining" else {} for stage in benchmark.STAGES}
    return benchmark.Run(times, accuracy, 5_000_000, 1, None if accuracy is None else 7.0, {})


def test_a_row_pairs_the_same_steps_and_leaves_out_what_a_run_did_not_reach(benchmark: ModuleType) -> None:
    whole = run(benchmark, {3: 0.1, 4: 0.1, 5: 0.1, 6: 99.0})
    cut = run(benchmark, {3: 0.4, 4: 0.4, 5: 0.4}, accuracy=None)
    found = benchmark.rows({"fp32": [whole], "bf16": [], "fp16": [cut]})
    assert list(found) == ["fp32", "fp16"]
    assert found["fp32"]["accuracies"] == [90.0]
    row = found["fp16"]
    assert (row["accuracies"], row["seconds"], row["peak_bytes"], row["skipped"]) == ([], None, 5_000_000, 1)
    assert row["stages"].keys() == {"pretraining"}
    stage = row["stages"]["pretraining"]
    assert stage["steps"] == 3
    assert [stage["ratio"], *stage["interval"]] == pytest.approx([4.0] * 3)
