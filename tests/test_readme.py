"""The pages: their figures are those of the result files, their code runs, their links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from mezzo.cli.main import VERBS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def _filler() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["README.md", "docs/verdict.md", "docs/optimizers.md"])
def test_figures_are_those_of_the_result_files(page: str) -> None:
    filler = _filler()
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == filler.filled(text, filler.PAGES[page])


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
