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
from rich.console import Console
from torch import nn

from mezzo.core.loss_scale import DynamicLossScale, StaticLossScale

# PyTorch's own, while it imports Inductor.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
QUIET = Console(quiet=True)
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


def test_contenders_take_the_same_steps_and_one_that_raises_is_recorded(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_contenders, training_step = load("step_contenders"), load("training_step")

    def build(work: object) -> object:
        raise RuntimeError("no such thing\nand more")

    broken = {**step_contenders.CONTENDERS, "split-bf16": step_contenders.Contender("", build)}
    monkeypatch.setattr(training_step, "CONTENDERS", broken)
    found = training_step.measure("cnn", "eager", _tiny(load), rounds=2, only=(*QUICK, "split-bf16"))
    assert found["raised"] == {"split-bf16": "RuntimeError: no such thing"}
    assert {name: len(series) for name, series in found["seconds"].items()} == dict.fromkeys(QUICK, 2)
    assert {len(losses) for losses in found["losses"].values()} == {5}  # two of a warm-up, one to plan by
    first = [losses[0] for losses in found["losses"].values()]
    assert first == pytest.approx([first[0]] * 3, rel=0.01)
    assert all(losses[-1] < losses[0] for losses in found["losses"].values())
    assert set(found["ratios"]) == {"fp32", "mezzo-bf16"}


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="breaks"><failure message="assert 1 == 2&#10;more">long</failure></testcase>
<testcase classname="tests.a" name="waits"><skipped message="needs two GPUs"/></testcase>
</testsuite></testsuites>"""
WRITES = "import pathlib, sys; pathlib.Path(sys.argv[1].split('=')[-1]).write_text"


def test_the_gpu_check_without_a_gpu_exits_with_2_and_says_what_it_needs() -> None:
    command, environment = [sys.executable, str(BENCHMARKS / "gpu_check.py")], {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a CUDA device" in done.stderr


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns where it has CUDA and no driver
def test_each_part_of_the_gpu_check_fails_for_itself(load: Load, tmp_path: Path) -> None:
    check = load("gpu_check")
    commands = {
        "breaks": ("import sys; print('why', file=sys.stderr); sys.exit(3)", "{out}", 1),
        "hangs": ("import time; time.sleep(60)", "{out}", 0.01),
        "wrote first": (f"{WRITES}('[1]'); sys.exit(1)", "{out}", 1),
        "tests": (f"{WRITES}({JUNIT!r})", "--junitxml={out}", 1),
    }
    parts = {name: check.Part(("-c", code, out), limit) for name, (code, out, limit) in commands.items()}
    out = tmp_path / "deep" / "report.json"
    report = check.assemble("Some GPU", parts, out, QUIET)
    assert json.loads(out.read_text()) == report
    found = report["parts"]
    assert "exit status 3: why" in found["breaks"]["error"]
    assert "not finished after" in found["hangs"]["error"]
    assert (found["wrote first"]["result"], "exit status 1" in found["wrote first"]["error"]) == ([1], True)
    assert found["tests"]["result"] == {
        "tests": 2,
        "failed": {"tests.a::breaks": "assert 1 == 2"},
        "skipped": {"tests.a::waits": "needs two GPUs"},
    }
    words = [word for part in check.PARTS.values() for word in part.command if word.endswith(".py")]
    assert all((BENCHMARKS.parent / word).is_file() for word in words)


def test_bytes_are_counted_by_storage_and_while_they_live(load: Load) -> None:
    live, emulation = load("live"), load("emulation")
    a = torch.zeros(10)
    assert live.bytes_of(a, [a.view(2, 5), {"x": a[:3]}]) == 40
    param = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.AdamW([param])
    param.grad = torch.ones(1000)
    optimizer.step()
    assert live.parts(optimizer) == {"weights": 4000, "gradients": 4000, "state": 8004}
    with emulation.Made() as made:
        view = torch.zeros(10).view(2, 5)
        a.add_(1)
        half = view.to(torch.float16)
    assert sorted(count for count, _ in made.alive()) == [20, 40]
    del view, half
    assert made.alive() == []


def test_loss_scales_are_walked_over_gradients(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loss_scales = load("loss_scales")
    row = loss_scales.walked(StaticLossScale(2.0**15), [1.0, 65520.0 / 2**16, 65520.0 / 2**15, 4.0])
    assert (row["skipped"], row["steps"]) == (2, 4)
    row = loss_scales.walked(DynamicLossScale(init=2.0, floor=1.0, patience=3), [1e6] * 20)
    assert row == {"collapsed_at": 3, "skipped": 4, "steps": 20}
    out = tmp_path / "out.json"
    assert loss_scales.main(["--steps", "25", "--out", str(out)]) == 0
    assert set(json.loads(out.read_text())["trainings"]) == set(loss_scales.TRAININGS)
    assert capsys.readouterr().out.count(" of 25 skipped") == 4


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
