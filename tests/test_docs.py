"""Documentation is true: pages' Python runs, with warnings as errors; docstrings' examples give what they show."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mezzo.core.overflow import CAUSES
from mezzo.core.ranges import WHAT
from mezzo.pytorch.monitor.ranges import DEFAULT_EVERY
from mezzo.pytorch.training import mixed_precision

DOCS = Path(__file__).parent.parent / "docs"
# The pages of other frameworks run beside their tests, and that of batch sizes with a limit that counts other tests'
# tensors; recipes show the examples, which test_examples.py runs.
ELSEWHERE = ("keras.md", "tensorflow.md", "batch-size.md", "log.md")
GIVEN = {  # what a page that shows fragments takes for granted
    "compile.md": """
import torch, mezzo
model, criterion = torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters())
loader = [(torch.randn(8, 4), torch.randint(0, 3, (8,)))] * 2
x, y = loader[0]
"""
}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    page
    for page in sorted(DOCS.glob("*.md"))
    if page.name not in ELSEWHERE and BLOCK.search(page.read_text(encoding="utf-8"))
]
SOURCES = DOCS.parent / "src"
SHOWN = [
    ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCES.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
# Examples that measure memory run in a process of their own: tensors of other tests would count.
MEASURE = ("mezzo.pytorch.batch_size", "mezzo.pytorch.memory")
CHILD = """
import doctest, importlib, sys
found = doctest.testmod(importlib.import_module(sys.argv[1]))
sys.exit(bool(found.failed) or not found.attempted)
"""


def section(title: str) -> str:
    """A section of docs/monitoring.md."""
    text = (DOCS / "monitoring.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


Execute = Callable[..., tuple[dict[str, object], str]]


@pytest.fixture
def execute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Execute]:
    """Runs a text's blocks of Python, one after the other: the names that they leave, and what they print."""
    monkeypatch.chdir(tmp_path)
    state = torch.get_rng_state()

    def run(text: str, given: str = "") -> tuple[dict[str, object], str]:
        torch.manual_seed(0)
        names: dict[str, object] = {}
        exec(given, names)
        for number, block in enumerate(BLOCK.finditer(text)):
            code = block.group(1)
            if code.startswith(">>>"):
                test = doctest.DocTestParser().get_doctest(code, names, "page", None, 0)
                assert not doctest.DocTestRunner().run(test, clear_globs=False).failed
                names |= test.globs
                continue
            script = tmp_path / f"block{number}.py"  # a diagnosis reads the line
            script.write_text(code, encoding="utf-8")
            exec(compile(code, str(script), "exec"), names)
        return names, capsys.readouterr().out

    yield run
    torch.set_rng_state(state)
    for mp in list(mixed_precision._ALIVE):
        mp.close()


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # Inductor's own imports
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, execute: Execute) -> None:
    execute(page.read_text(encoding="utf-8"), GIVEN.get(page.name, ""))


def test_a_skipped_step_is_explained_as_shown(execute: Execute) -> None:
    text = section("A step that was skipped")
    shown = next(
        body for word, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if not word
    )
    assert execute(text)[1] == shown.replace("train.py", "block0.py")
    assert [cause for cause in CAUSES if f"| `{cause}` |" not in text] == []


def test_ranges_recover_with_the_scale(execute: Execute) -> None:
    text = section("Ranges")
    shares = re.findall(r"^(\d) fp16 (\d+)% -> (\d+)%$", execute(text)[1], re.MULTILINE)
    assert [module for module, _, _ in shares] == ["2", "1", "0"]
    assert all(int(scaled) < int(without) for _, without, scaled in shares)
    assert all(f"| `{what}` |" in text for what in WHAT)
    assert f"`watch=True` at every {'hundredth' if DEFAULT_EVERY == 100 else DEFAULT_EVERY}" in text


def test_calibration_recommends_and_ranks(execute: Execute) -> None:
    assert "\npolicy       fp16," in execute(section("The loss scale from data"))[1]
    lines = execute(section("Which modules low precision hurts"))[1].splitlines()
    assert {line.split()[0] for line in lines} == {"0", "1", "2"}
    assert all("'e3m2'" in line for line in lines if "Linear" in line)


def test_the_table_of_loss_scales_is_the_benchmarks() -> None:
    found = json.loads((DOCS.parent / "benchmarks" / "results" / "loss_scales.json").read_text())
    for name, row in found["trainings"].items():
        low, high = row["largest_log2"]
        cells = [
            f"{row['scales'][kind]['skipped']}, {row['scales'][kind]['unused_bits_mean']:.1f}"
            for kind in ("constant", "dynamic")
        ]
        line = f"| {name} | 2^{low:.1f} to 2^{high:.1f} | {' | '.join(cells)} |"
        assert line in section("The loss scale from data")


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
