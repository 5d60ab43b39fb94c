"""`make bench`: fair to its contenders, and it loses nothing of what it measured."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

# PyTorch's own, while it imports Inductor.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
QUICK = ("fp32", "amp-bf16", "mezzo-bf16")
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def _tiny(load: Load) -> Callable[[], Any]:
    models = load("models")

    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        return models.Workload(model, torch.randn(6, 8), torch.randint(4, (6,)), "tiny", lr=0.01)

    return make


def _results() -> dict[str, Any]:
    """What a run could have found."""
    peaks = {"fp32": 150, "amp-bf16": 100, "split-bf16": 71, "lean-bf16": 60}
    ratios = {
        "fp32": {"ratio": 1.5, "interval": [1.4, 1.6], "rounds": 9},
        "mezzo-bf16": {"ratio": 0.99, "interval": [0.98, 1.01], "rounds": 9},
        "short-bf16": {"ratio": 1.01, "interval": [0.99, 1.02], "rounds": 9},
        "split-bf16": {"ratio": 0.85, "interval": [0.80, 0.90], "rounds": 9},
    }
    found = {"summary": "a GPT", "ratios": ratios, "peak_bytes": peaks}
    worse = copy.deepcopy(found)
    worse["ratios"]["mezzo-bf16"] = {"ratio": 1.2, "interval": [1.1, 1.3], "rounds": 9}
    rows = {
        "gpt": {"eager": found, "compiled": {"error": "exit status 1: boom"}},
        "lstm": {"eager": worse},
        "fine-tune": {"eager": found},
    }
    loss = {"32768": {"logits": {"peak_bytes": {"amp-bf16": 100, "mezzo-bf16": 51}}}}
    return {"rows": rows, "loss": loss}


# bar, row, mode, of, over -> worst contender, verdict.
VERDICTS = [
    ("never slower than torch.amp", "gpt", "eager", "amp-bf16", "short-bf16", "open"),
    ("never slower than torch.amp", "lstm", "eager", "amp-bf16", "mezzo-bf16", "missed"),
    ("never slower than torch.amp", "cnn", "eager", "amp-bf16", "mezzo-bf16", "not measured"),
    ("never slower than torch.amp", "gpt", "compiled", "amp-bf16", "mezzo-bf16", "not measured"),
    ("1.15 times as fast in the fine-tune", "fine-tune", "eager", "amp-bf16", "split-bf16", "met"),
    ("the loss's peak bytes, logits included", "32768", "", "amp-bf16", "mezzo-bf16", "missed"),
    ("the loss's peak bytes, logits included", "131072", "", "amp-bf16", "mezzo-bf16", "not measured"),
    ("peak bytes, exact", "gpt", "eager", "amp-bf16", "split-bf16", "met"),
    ("peak bytes, lean", "gpt", "eager", "amp-bf16", "lean-bf16", "missed"),
    ("peak bytes, lean", "gpt", "eager", "fp32", "lean-bf16", "met"),
]


@pytest.mark.parametrize(("bar", "row", "mode", "below", "contender", "verdict"), VERDICTS)
def test_a_bar_is_judged_by_its_worst_contender_and_the_whole_interval(
    load: Load, bar: str, row: str, mode: str, below: str, contender: str, verdict: str
) -> None:
    judged = [
        (line["contender"], line["verdict"])
        for line in load("bars").judge(_results())
        if (line["bar"], line["row"], line["mode"], line["below"]) == (bar, row, mode, below)
    ]
    assert judged == [(contender, verdict)]


def test_contenders_start_from_the_same_weights_and_take_the_same_steps(load: Load) -> None:
    found = load("training_step").measure("cnn", "eager", _tiny(load), rounds=2, only=QUICK)
    assert found["raised"] == {}
    assert {name: len(series) for name, series in found["seconds"].items()} == dict.fromkeys(QUICK, 2)
    assert {len(losses) for losses in found["losses"].values()} == {5}  # two of a warm-up, one to plan by
    first = [losses[0] for losses in found["losses"].values()]
    assert first == pytest.approx([first[0]] * 3, rel=0.01)
    assert all(losses[-1] < losses[0] for losses in found["losses"].values())
    assert set(found["ratios"]) == {"fp32", "mezzo-bf16"}
    assert min(found["peak_bytes"].values()) > 0


def test_a_contender_that_raises_is_recorded_and_the_others_are_measured(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_contenders, training_step = load("step_contenders"), load("training_step")

    def build(work: object) -> object:
        raise RuntimeError("no such thing\nand more")

    broken = {**step_contenders.CONTENDERS, "split-bf16": step_contenders.Contender("", build)}
    monkeypatch.setattr(training_step, "CONTENDERS", broken)
    found = training_step.measure("cnn", "eager", _tiny(load), rounds=2, only=(*QUICK, "split-bf16"))
    assert found["raised"] == {"split-bf16": "RuntimeError: no such thing"}
    assert set(found["median_seconds"]) == set(QUICK)
    out = StringIO()
    training_step.show("cnn", "eager", found, Console(file=out, width=80))
    assert "split-bf16: RuntimeError: no such thing" in out.getvalue()
