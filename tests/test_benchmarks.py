"""`benchmarks/`: what they count, which steps they time, and that one part's failure loses nothing of the others."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mezzo.core import records

# PyTorch's own, while it imports Inductor.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_a_bar_is_judged_by_its_worst_contender_and_the_whole_interval(load: Load) -> None:
    ratios = {
        "mezzo-bf16": {"ratio": 0.99, "interval": [0.98, 1.01], "rounds": 9},
        "short-bf16": {"ratio": 1.01, "interval": [0.99, 1.02], "rounds": 9},
        "split-bf16": {"ratio": 0.85, "interval": [0.80, 0.90], "rounds": 9},
    }
    peaks = {"fp32": 150, "amp-bf16": 100, "split-bf16": 71, "lean-bf16": 60}
    rows = {
        "gpt": {"eager": {"summary": "", "ratios": ratios, "peak_bytes": peaks}, "compiled": {"error": ""}}
    }
    judged = {
        (line["bar"], line["mode"]): (line["contender"], line["verdict"])
        for line in load("bars").judge({"rows": rows, "loss": {}})
        if (line["row"], line["below"]) == ("gpt", "amp-bf16")
    }
    assert judged["never slower than torch.amp", "eager"] == ("short-bf16", "open")
    assert judged["never slower than torch.amp", "compiled"] == ("mezzo-bf16", "not measured")
    assert judged["peak bytes, exact", "eager"] == ("split-bf16", "met")
    assert judged["peak bytes, lean", "eager"] == ("lean-bf16", "missed")


def test_the_gpu_check_without_a_gpu_exits_with_2_and_says_what_it_needs() -> None:
    command, environment = [sys.executable, str(BENCHMARKS / "gpu_check.py")], {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a CUDA device" in done.stderr


def test_collectives_that_mezzo_adds_are_those_beyond_pytorchs(load: Load) -> None:
    collectives = load("collectives")
    before = {
        "ranks": 2,
        "wrapper": "DDP",
        "contender": "torch fp16",
        "collectives": {"a": 1},
        "bytes": {"a": 8},
    }
    after = before | {
        "contender": "GradScaler fp16",
        "collectives": {"a": 1, "b": 2},
        "bytes": {"a": 6, "b": 4},
    }
    plain, own = collectives.with_added([before, after])
    assert "added_bytes" not in plain
    assert (own["baseline"], own["added_collectives"]) == ("torch fp16", {"b": 2})
    assert own["added_bytes"] == {"a": -2, "b": 4}


def test_the_formula_gives_the_measured_collectives_on_2_and_4_ranks(load: Load) -> None:
    collectives = load("collectives")
    rows = json.loads(collectives.OUT.read_text(encoding="utf-8"))["steps"]
    of = {(row["ranks"], row["wrapper"], row["contender"]): row for row in rows}
    compared = 0
    for (ranks, wrapper, contender), row in of.items():
        if "baseline" not in row:
            continue
        # Under `mezzo run` the script's clip_grad_norm_ stays; elsewhere Mezzo's reduction replaces PyTorch's.
        stays = row["baseline"].replace("fp16", "bf16") if contender.startswith("mezzo run") else "torch bf16"
        least = of[ranks, wrapper, stays]
        messages, size = collectives.added(contender, wrapper)
        assert sum(row["collectives"].values()) - sum(least["collectives"].values()) == messages, row
        assert sum(row["bytes"].values()) - sum(least["bytes"].values()) == size, row
        compared += 1
    assert compared == 40


def test_a_small_reduction_grows_with_the_logarithm_of_the_nodes(load: Load) -> None:
    at_scale = load("collectives").at_scale
    one, two, many = at_scale(8), at_scale(16), at_scale(16384)
    assert (one["nodes"], two["nodes"], many["nodes"]) == (1, 2, 2048)
    assert many["tree_s"] - two["tree_s"] == pytest.approx(2 * 10 * 5.0e-6)
    assert many["ring_s"] - two["ring_s"] == pytest.approx(2 * 2046 * (7 * 0.47e-6 * 1.8 + 2.7e-6))


def test_minutes_of_a_comparison_are_those_of_its_runs(load: Load, tmp_path: Path) -> None:
    for name, seconds in {"fp32-0": 60, "fp32-1": 30, "mxfp8-recipe-mine-0": 6}.items():
        line = records.to_line(records.RunEnded(status=0, seconds=seconds))
        (tmp_path / f"{name}.jsonl").write_text(line + "\n", encoding="utf-8")
    assert load("block_verdicts").minutes(tmp_path) == {"fp32": 1.5, "mxfp8-recipe-mine": 0.1}


def test_recipes_are_paired_by_seed(load: Load) -> None:
    def one(gaps: dict[int, float]) -> dict[str, Any]:
        return {"pairs": [{"seed": seed, "loss_gap": gap} for seed, gap in gaps.items()]}

    found = load("block_verdicts").difference(one({0: 0.5, 1: 0.7, 2: 0.6}), one({2: 0.1, 1: 0.2, 0: 0.3}))
    assert found["pairs"] == pytest.approx([0.2, 0.5, 0.5])
    assert found["mean"] == pytest.approx(0.4)
    assert found["interval"][0] < 0.2 < 0.6 < found["interval"][1]


def test_a_common_error_of_gradients_does_not_average_out(load: Load) -> None:
    errors = load("block_verdicts")._errors
    exact = [[torch.tensor([3.0, 4.0])], [torch.tensor([4.0, 3.0])]]
    common = errors([[of[0] - torch.tensor([0.3, 0.3])] for of in exact], exact)
    random = errors([[exact[0][0] + 0.3], [exact[1][0] - 0.3]], exact)
    assert common["of_one"] == pytest.approx(common["of_mean"]) == pytest.approx(random["of_one"])
    assert (random["of_mean"], random["gain"]) == (pytest.approx(0.0, abs=1e-6), pytest.approx(1.0))
    assert common["gain"] == pytest.approx(1 - 0.3 * 7 / 25)
