"""README and pages: figures of the result files, links that lead somewhere, plain words, commands that exist."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import shlex
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from mezzo.cli.arguments import Parser
from mezzo.cli.main import VERBS
from page_blocks import BASH

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [
    path
    for path in sorted((ROOT / "src").rglob("*"))
    if path.suffix in (".py", ".toml", ".html", ".css", ".js")
]

# Idioms that made readers solve a sentence for its subject, and plain words for them.
IDIOMS = {
    r"(is|are|was) told": "name who reports it: 'the summary lists', 'is an error'",
    r"says of": "says that",
    r"(nobody|somebody|whoever)": "name the user, the caller, the code",
    r"(?<!here )(?<!that )is no (?!longer)": "is not a",
    r"mend(s|ed|ing)?\b": "fix",
    r"in the place of": "instead of",
    r"beside\b": "with, next to, compared to",
    r"of (yours|theirs)\b": "your, their",
    r"counts? for nothing": "is ignored",
    r"(rooms?|house|colou?ring) (of|that|is|draws)|the (rooms?|house)\b": "folders, structure, list",
    r"finds? (its|their) place|pays? for its": "say what happens and what it costs",
    r"ha(s|ve) not,": "name what is missing",
    r"is no whole number|wants? `": "is not an integer; call",
    r"(bytes|rows?|records?|lines?|nouns?) an? (parameter|line|file|weight|row)": "per",
}


@pytest.fixture
def filler(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("readme")


def test_figures_are_those_of_the_result_files(filler: ModuleType) -> None:
    for page, parts in filler.PAGES.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text == filler.filled(text, parts), page


def test_a_release_that_is_not_installed_is_a_row_with_pips_reason(filler: ModuleType) -> None:
    stderr = "notice\nERROR: No matching distribution found for torch==9.9\nERROR: for help visit https://pip"
    reason = importlib.import_module("versions").reason(
        subprocess.CalledProcessError(1, "pip", stderr=stderr)
    )
    row = {"torch": "9.9", "python": "3.11", "status": 1, "reason": reason}
    assert importlib.import_module("readme_front").versions({"torch-9.9": row}).splitlines()[2:] == [
        "| 9.9 | 3.11 | not installed: No matching distribution found for torch==9.9 |"
    ]


def test_the_plot_is_of_the_result_file(filler: ModuleType) -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "bench.json").read_text(encoding="utf-8"))
    digest = importlib.import_module("plot").digest(results)
    assert digest in (ROOT / "docs" / "dev" / "figures" / "bench.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_pages_named_in_the_sources_exist() -> None:
    named = {
        page for path in SOURCES for page in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert [page for page in sorted(named) if not (ROOT / page).exists()] == []


def test_the_readme_is_short_and_its_picture_small() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    (picture,) = re.findall(r"!\[.+?\]\((\S+)\)", text)
    assert (ROOT / picture).stat().st_size < 120_000
    assert [verb for verb in VERBS if f"mezzo {verb}" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_a_page_have_options_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for line in re.findall(r"^mezzo [a-z].*$", "".join(BASH.findall(text)), re.MULTILINE):
        _, verb, *words = shlex.split(line, comments=True)
        assert verb in VERBS, line
        module, parser = importlib.import_module(f"mezzo.cli.{verb.replace('-', '_')}"), Parser(verb, "")
        module.configure(parser)
        known = {option for action in parser._actions for option in action.option_strings}
        ours = list(itertools.takewhile(lambda word: not word.endswith((".py", ".train", ".run")), words))
        if "--" in words or (verb != "run" and known.intersection(words[len(ours) :])):
            ours = list(itertools.takewhile("--".__ne__, words))  # the script is among Mezzo's options
        options = [word.partition("=")[0] for word in ours if re.match(r"--?[a-z]", word)]
        assert [option for option in options if option not in known] == [], line


@pytest.mark.parametrize("idiom", IDIOMS, ids=IDIOMS.get)
def test_no_idiom_that_hides_the_subject(idiom: str) -> None:
    pages = [page for page in PAGES if page.name != "log.md"]  # dated entries stay as they were written
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*pages, *SOURCES)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(rf"\b{idiom}", line, re.IGNORECASE)
    ]
    assert found == [], f"write instead: {IDIOMS[idiom]}"
