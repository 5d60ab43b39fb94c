"""The pages: their figures are those of the result files, their code runs, their links lead somewhere."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from mezzo.cli.main import VERBS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture
def filler(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("readme")


def test_figures_are_those_of_the_result_files(filler: ModuleType) -> None:
    for page, parts in filler.PAGES.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text == filler.filled(text, parts), page


@pytest.mark.parametrize("name", ["bench.svg", "bench-dark.svg"])
def test_the_plot_is_of_the_result_file(name: str, filler: ModuleType) -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "bench.json").read_text(encoding="utf-8"))
    digest = importlib.import_module("plot").digest(results)
    assert digest in (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("load", "shown"), [(0.5, True), (1.5, False)])
def test_times_from_a_busy_machine_are_left_out(
    load: float, shown: bool, monkeypatch: pytest.MonkeyPatch, filler: ModuleType
) -> None:
    row = {"ratio": 0.875, "interval": [0.8125, 0.9375], "median_ms": 1.0, "rounds": 9, "gb_per_s": 2.0}
    cell = {"size": "1M", "layout": "many", "parameters": 10, "tensors": 2, "raised": {}}
    start = {"first": 6.25, "third": 0.5, "compiling": None}
    results = {
        "machine": {"threads": 2, "cpu": "a CPU", "torch": "2"},
        "versions": {"numba": "1", "torchao": None},
        "load_at_start": load,
        "copy_gb_per_s": 9.0,
        "contenders": {"mezzo": "lean"},
        "cells": [{**cell, "rows": {"mezzo": {**row, "bytes_per_parameter": {"total": 7.0625}}}}],
        "distance": {"mezzo": {"master": 0.5}},
        "first_step": {"mezzo": {"empty": start, "full": start}},
    }
    monkeypatch.setattr(filler, "_read", lambda name: results)
    written = [filler.optimizers(), filler.optimizer_times(), filler.optimizer_first_steps()]
    assert ["0.88 (0.81 to 0.94)" in written[0], "0.875" in written[1], "6.25 s" in written[2]] == [shown] * 3
    assert ["7.06" in page for page in written] == [True, True, False]
    assert "torchao" not in written[0]


def test_the_readmes_python_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [verb for verb in VERBS if f"mezzo {verb}" not in text] == []
