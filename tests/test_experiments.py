"""The experiments: what they share, and what they count against known answers. `make reproduce` runs the scripts."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parent.parent / "experiments"


@pytest.fixture(scope="module", autouse=True)
def _on_the_path() -> Iterator[None]:
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def plot(numbers: dict[str, Any], figure: Any) -> None:
    figure.subplots().plot(numbers["loss"])


FATES = [
    (True, "", "holds", 0),
    (False, "", "lost", 1),
    (False, "too small a network", "known", 0),
    (True, "too small a network", "gained", 0),
]


@pytest.mark.parametrize(("holds", "known", "fate", "status"), FATES)
def test_only_a_finding_that_is_lost_fails_the_run(
    holds: bool,
    known: str,
    fate: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    common = load("common")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # `main` sets it, and it is put back
    asked = []

    def run(full: bool) -> Any:
        asked.append((full, torch.get_num_threads()))
        findings = [
            common.Finding("a", "It is so.", "It is 42.", True),
            common.Finding("b", "So.", "43.", holds, known),
        ]
        return findings, {"loss": [1.0, math.nan]}

    threads = torch.get_num_threads()
    argv = ["--full", "--out", str(tmp_path)]
    try:
        assert common.main("name", "Title", "section 1", run, plot, argv) == status
    finally:
        torch.set_num_threads(threads)
    assert asked == [(True, 1)]
    record = json.loads((tmp_path / "name" / "numbers.json").read_text(encoding="utf-8"))
    assert record["numbers"] == {"loss": [1.0, None]}
    assert [one["fate"] for one in record["findings"]] == ["holds", fate]
    assert "<svg" in (tmp_path / "name" / "figure.svg").read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert f"b: {common.WORDS[fate]}" in printed
    assert known in printed


GAPS = [
    ([0.0, 0.01, -0.01], False, True),
    ([0.3, 0.31, 0.32], True, False),
    ([-0.3, -0.31, -0.32], False, False),  # better by more than the margin is not equivalent
    ([0.0, 0.3, -0.3], False, False),  # too wide to tell
    ([0.0, math.nan, 0.0], True, False),
    ([0.0, math.inf, 0.0], True, False),
]


@pytest.mark.parametrize(("differences", "behind", "equivalent"), GAPS)
def test_what_paired_differences_establish(differences: list[float], behind: bool, equivalent: bool) -> None:
    with np.errstate(invalid="ignore"):
        found = load("common").gap(differences, 0.1)
    assert (found.behind, found.equivalent) == (behind, equivalent)


@pytest.mark.heavy
def test_the_cheapest_experiment_shows_its_findings_and_each_can_fail(tmp_path: Path) -> None:
    accumulation = load("accumulation")
    findings, numbers = accumulation.run(full=False)
    assert [one.name for one in findings if not one.holds] == []
    load("figures").save(tmp_path / "figure.svg", "title", lambda figure: accumulation.draw(numbers, figure))
    n = len(numbers["lengths"])
    inf = [math.inf] * n
    for path, value, lost in (
        (("equal_sums", "fp16"), [128.0], {"equal-terms-stick"}),
        (("largest_positive_sum", "fp16"), 257.0, {"positive-terms-stick"}),
        (("dot", "zero mean", "bf16", "fp32"), [5e-4] * n, {"fp32-is-enough"}),
        (("dot", "zero mean", "fp16", "sequential"), [1e-3] * n, {"zero-mean-drifts"}),
        (("dot", "positive", "fp16", "pairwise"), [0.01] * n, {"order-fixes-it"}),
        (("variance", "unit", "sequential"), [0.1] * n, {"variance-sticks"}),
        (("variance", "large", "pairwise"), inf, {"variance-overflows"}),
        (("variance", "offset", "sequential"), [0.001] * n, {"variance-loses-digits"}),
    ):
        changed = json.loads(json.dumps(numbers))
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert {one.name for one in accumulation.findings(changed) if not one.holds} == lost


# weight, update as a share of it -> lost in fp16, lost in bf16
RULE = [
    (1.5, 2.0**-8, False, False),
    (1.5, 2.0**-9, False, True),
    (1.5, 2.0**-11, False, True),
    (1.5, 2.0**-12, True, True),
    (1.999, 0.9 * 2.0**-12, True, True),
    (1.001, 0.9 * 2.0**-11, True, True),
    (1.0, -1.1 * 2.0**-12, False, True),  # the gap below a power of two is half as wide
]


@pytest.mark.parametrize(("weight", "share", "in_fp16", "in_bf16"), RULE)
def test_the_rule_of_2048(weight: float, share: float, in_fp16: bool, in_bf16: bool) -> None:
    seen = load("lost_updates").Updates()
    seen.look(7, torch.tensor([weight, 1.0]), torch.tensor([weight * share, 0.0]))
    assert seen.lost == {"fp16": [in_fp16], "bf16": [in_bf16]}
    assert (int(seen.counts.sum()), seen.steps) == (1, [7])


GOOD = (5.0, 5.4, 5.2)


def runs_of(distances: tuple[float, ...] = GOOD, classes: int = 10) -> list[dict[str, Any]]:
    """Runs of the GAN made by hand."""
    return [{"distance": distance, "classes": classes} for distance in distances]


AS_GOOD = [
    (GOOD, 10, True, "equivalent"),
    ((5.1, 5.8, 4.9), 10, True, "consistent"),
    ((6.0, 6.5, 6.3), 10, False, "divergent"),
    ((5.0, 60.0, 5.2), 10, False, "inconclusive"),  # one ruined run: too wide to tell
    (GOOD, 8, False, "equivalent"),
]


@pytest.mark.parametrize(("distances", "classes", "holds", "word"), AS_GOOD)
def test_a_gan_is_as_good(distances: tuple[float, ...], classes: int, holds: bool, word: str) -> None:
    found = load("gan").as_good("name", "as good", runs_of(), runs_of(distances, classes))
    assert found.holds is holds
    assert found.seen.startswith(f"{word}: ")


def test_run_all_goes_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_all = load("run_all")
    (tmp_path / "good").mkdir()
    record = {"findings": [{"name": "a", "seen": "42", "fate": "holds"}], "numbers": {"many": 1}}
    (tmp_path / "good" / "numbers.json").write_text(json.dumps(record), encoding="utf-8")
    monkeypatch.setattr(run_all, "NAMES", ("bad", "good"))
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--out", str(tmp_path)])
    for statuses, status in (((2, 0), 1), ((0, 1), 1), ((0, 0), 0)):
        found = dict(zip(("bad", "good"), statuses))
        monkeypatch.setattr(run_all, "run", lambda name, options, found=found: (found[name], ""))
        assert run_all.main() == status
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert list(summary["experiments"]) == ["good"]
    assert "numbers" not in summary["experiments"]["good"]
