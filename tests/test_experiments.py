"""The experiments: what they share, and what they count against known answers. `make reproduce` runs the scripts."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "experiments"


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def plot(numbers: dict[str, Any], figure: Any) -> None:
    figure.subplots().plot(numbers["loss"])


# Whether it holds, why it is known not to, fate, exit status.
FATES = [
    (True, "", "holds", 0),
    (False, "", "lost", 1),
    (False, "small", "known", 0),
    (True, "small", "gained", 0),
]


@pytest.mark.parametrize("row", FATES)
def test_only_a_finding_that_is_lost_fails_the_run(
    row: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    holds, known, fate, status = row
    common = importlib.import_module("common")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # `main` sets it, and it is put back
    asked = []

    def run(full: bool) -> Any:
        asked.append((full, torch.get_num_threads()))
        second = common.Finding("b", "So.", "43.", holds, known)
        return [common.Finding("a", "It is so.", "It is 42.", True), second], {"loss": [1.0, math.nan]}

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


def test_run_all_goes_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_all = importlib.import_module("run_all")
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
