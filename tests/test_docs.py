"""The pages are true: each block of Python runs alone, with warnings as errors, and prints what follows it."""

from __future__ import annotations

import doctest
import gc
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzo.core.overflow import CAUSES
from mezzo.core.ranges import WHAT
from mezzo.pytorch.training import mixed_precision
from page_blocks import BASH, PAGES, blocks, run

ROOT = Path(__file__).parent.parent
USER_PAGES = sorted((ROOT / "docs").glob("*.md"))
SHOWN = [
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "src").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
PACKAGES = ("mezzo", "mezzo.optim", "mezzo.nn", "mezzo.keras", "mezzo.tensorflow")
# Examples that measure memory run in a separate process: tensors of other tests would count.
MEASURE = ("mezzo.pytorch.batch_size", "mezzo.pytorch.memory")
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


@pytest.fixture
def clean() -> Iterator[None]:
    """Default random state and no open MixedPrecision, before and after."""
    gc.collect()
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)
    for mp in list(mixed_precision._ALIVE):
        mp.close()


@pytest.mark.heavy
@pytest.mark.usefixtures("clean")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # Inductor's own imports
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning 2.6.6 with torch 2.13
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # overflows that a page shows
@pytest.mark.parametrize("block", blocks())
def test_a_block_runs_alone_and_prints_what_is_shown(
    block: re.Match[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if block["code"].startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(block["code"], {}, "page", None, 0)
        assert not doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed
        return
    run(block, tmp_path, capsys)  # a report about a skipped step names the file and shows the line


def commands() -> list[Any]:
    """The commands on the pages that need at most a script, and the quickest comparison.

    Each that runs the script takes seconds, and there are many.
    """
    text = "".join(block for page in PAGES for block in BASH.findall(page.read_text(encoding="utf-8")))
    lines = re.findall(
        r"^mezzo (?:calibrate|compare .*--seeds 1|doctor|formats|migrate|run)\b.*$", text, re.MULTILINE
    )
    return [
        pytest.param(words, id=" ".join(words), marks=[pytest.mark.nightly] * is_nightly)
        for words in dict.fromkeys(tuple(shlex.split(line, comments=True)) for line in lines)
        for is_nightly in [words[1] == "run" or (words[1] == "calibrate" and len(words) > 3)]
    ]


@pytest.mark.heavy
@pytest.mark.parametrize("words", commands())
def test_a_command_on_a_page_runs(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "package").mkdir()
    shutil.copy(tmp_path / "train.py", tmp_path / "package")
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == (words[1:] == ("migrate", "train.py")), (
        done.stderr
    )  # 1: a change that was not written
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
        child = subprocess.run(
            [sys.executable, "-c", CHILD, name], capture_output=True, text=True, check=False
        )
        assert child.returncode == 0, child.stdout + child.stderr
        return
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed
