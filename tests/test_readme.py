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


def test_the_plot_is_of_the_result_file(filler: ModuleType) -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "bench.json").read_text(encoding="utf-8"))
    digest = importlib.import_module("plot").digest(results)
    assert digest in (ROOT / "docs" / "dev" / "figures" / "bench.svg").read_text(encoding="utf-8")


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
