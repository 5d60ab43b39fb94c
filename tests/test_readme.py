"""README and pages: figures of the result files, links, plain words, commands, and blocks that run."""

from __future__ import annotations

import doctest
import gc
import importlib
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mezzo.cli.arguments import Parser
from mezzo.cli.main import VERBS
from mezzo.core.overflow import CAUSES
from mezzo.core.ranges import WHAT
from page_blocks import BASH, blocks, run

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
USER_PAGES = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
READ = (".py", ".toml", ".html", ".css", ".js")
SOURCES = [path for path in sorted((ROOT / "src").rglob("*")) if path.suffix in READ]

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
    error = subprocess.CalledProcessError(1, "pip", stderr=stderr)
    reason = importlib.import_module("versions").reason(error)
    row = {"torch": "9.9", "python": "3.11", "status": 1, "reason": reason}
    table = importlib.import_module("readme_front").versions({"torch-9.9": row}).splitlines()
    assert table[2:] == ["| 9.9 | 3.11 | not installed: No matching distribution found for torch==9.9 |"]


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
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    named = sorted(set(re.findall(r"docs/[\w/-]+\.md", text)))
    assert [page for page in named if not (ROOT / page).exists()] == []


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


# The pages are true: each block of Python runs alone, and prints what follows it.

SHOWN = [
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "src").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
PACKAGES = ("mezzo", "mezzo.optim", "mezzo.nn", "mezzo.keras", "mezzo.tensorflow")
# Examples that measure memory run in a separate process: tensors of other tests would count.
MEASURE = ("mezzo.pytorch.memory",)
SCRIPT = """
import torch
from torch.cuda.amp import GradScaler  # for `mezzo migrate`; a script that only imports it has no mixed precision

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
    def forward(self, x):
        return self.head(torch.nn.functional.gelu(self.body(x)))

def main():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    main()
"""
CHILD = """
import doctest, importlib, sys
found = doctest.testmod(importlib.import_module(sys.argv[1]))
sys.exit(bool(found.failed) or not found.attempted)
"""


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # Inductor's own imports
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning 2.6.6 with torch 2.13
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # overflows that a page shows
@pytest.mark.parametrize("block", blocks())
def test_a_block_runs_alone_and_prints_what_is_shown(
    block: re.Match[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    monkeypatch.chdir(tmp_path)
    if block["code"].startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(block["code"], {}, "page", None, 0)
        assert not doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed
        return
    run(block, tmp_path, capsys)  # a report about a skipped step names the file and shows the line


def commands() -> list[Any]:
    """The commands on the pages that need at most a script, and the quickest comparison.

    Each that runs the script takes seconds, and there are many; `mezzo doctor` takes 20, and --quick is here too.
    """
    text = "".join(
        block for page in (README, *USER_PAGES) for block in BASH.findall(page.read_text(encoding="utf-8"))
    )
    verbs = "calibrate|compare .*--seeds 1|doctor|formats|migrate|run"
    lines = re.findall(rf"^mezzo (?:{verbs})\b.*$", text, re.MULTILINE)
    return [
        pytest.param(words, id=" ".join(words), marks=[pytest.mark.nightly] * is_nightly)
        for words in dict.fromkeys(tuple(shlex.split(line, comments=True)) for line in lines)
        for is_nightly in [
            words[1:] == ("doctor",) or words[1] == "run" or (words[1] == "calibrate" and len(words) > 3)
        ]
    ]


@pytest.mark.heavy
@pytest.mark.parametrize("words", commands())
def test_a_command_on_a_page_runs(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "package").mkdir()
    shutil.copy(tmp_path / "train.py", tmp_path / "package")
    done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True)
    # 1: a change that was not written
    assert done.returncode == (words[1:] == ("migrate", "train.py")), done.stderr
    if words[1] == "calibrate":
        report = [sys.executable, "-m", "mezzo", "report", "mezzo-calibrate-train"]
        subprocess.run(report, cwd=tmp_path, capture_output=True, check=True)


def test_user_pages_are_few_and_each_is_in_the_navigation() -> None:
    assert len(USER_PAGES) <= 14
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = re.findall(r"([\w/-]+\.md)$", text, re.MULTILINE)
    pages = (path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    assert sorted(navigation) == sorted(pages)


def test_the_api_page_names_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    packages = [importlib.import_module(name) for name in PACKAGES]
    assert [
        f"{package.__name__}.{name}"
        for package in packages
        for name in package.__all__
        if not re.search(rf"^\| `{package.__name__}\.{name}` \| \w.+\. \|$", text, re.MULTILINE)
    ] == []


def test_every_cause_and_every_kind_of_range_is_explained() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in USER_PAGES)
    assert [word for word in (*CAUSES, *WHAT) if f"| `{word}` |" not in text] == []


def test_the_table_of_loss_scales_is_the_benchmarks() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    found = json.loads((ROOT / "benchmarks" / "results" / "loss_scales.json").read_text())
    for name, row in found["trainings"].items():
        low, high = row["largest_log2"]
        cells = [
            f"{row['scales'][kind]['skipped']}, {row['scales'][kind]['unused_bits_mean']:.1f}"
            for kind in ("constant", "dynamic")
        ]
        assert f"| {name} | 2^{low:.1f} to 2^{high:.1f} | {' | '.join(cells)} |" in text


@pytest.mark.parametrize("name", SHOWN)
def test_the_examples_in_a_modules_docstrings_are_true(name: str) -> None:
    if name in MEASURE:
        child = subprocess.run([sys.executable, "-c", CHILD, name], capture_output=True, text=True)
        assert child.returncode == 0, child.stdout + child.stderr
        return
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed
