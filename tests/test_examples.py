"""The examples, the demos and the notebooks: each runs as it stands, small, and prints what it should."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from mezzo.demos import DEMOS

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
NOTEBOOKS = ROOT / "notebooks"
Output = pytest.CaptureFixture[str]

# Example, its options beside --steps, steps, what its last line must be.
RUNS = [
    ("cnn.py", ["--precision", "fp16"], 6, r"fp16: [0-9.]+% of unseen digits right"),
    ("transformer.py", [], 3, r"bf16,masters=split: [0-9,]+ weights, last loss \d\.\d+"),
    ("transformer.py", ["--precision", "fp8"], 3, r"fp8,masters=split,.*: [0-9,]+ weights, last loss \d\.\d+"),
    ("recurrent.py", ["--precision", "fp16,hidden=fp32"], 3, r"fp16,hidden=fp32: .* states torch.float32 and .*"),
    ("gan.py", ["--generator", "bf16", "--discriminator", "fp32"], 30, r"\d of 8 clusters reached, \d+% of .*"),
    ("fine_tuning.py", [], 20, r"\{'torch.float32'\} to save; the model has .*'torch.bfloat16'.*"),
    ("accumulation_and_clipping.py", [], 8, r"fp16: 3 updates from 10 batches, last loss .*"),
]  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("row", RUNS, ids=lambda row: f"{row[0]} {' '.join(row[1])}")
def test_an_example_runs(row: Any, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    name, given, steps, last = row
    monkeypatch.setattr(sys, "argv", [name, "--steps", str(steps), *given])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    out = capsys.readouterr().out
    assert re.fullmatch(last, out.strip().splitlines()[-1]), out


def test_every_example_is_run_and_has_a_page() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("keras_")}
    assert {row[0] for row in RUNS} == names
    pages = "".join(
        (ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("policies.md", "training.md")
    )
    assert [name for name in names if f"`examples/{name}`" not in pages] == []


SMALL = {
    "digits": "--epochs 1 --width 8",
    "text-gpt": "--steps 3 --width 16 --characters 20000 --context 16 --layers 1",
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted(DEMOS))
def test_a_demo_is_a_plain_script_and_prints_its_metric(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    demo = DEMOS[name]
    monkeypatch.setattr(sys, "argv", [str(demo.path), *SMALL[name].split()])
    runpy.run_path(str(demo.path), run_name="__main__")
    (value,) = re.findall(demo.metric, capsys.readouterr().out)
    assert 0 < float(value) <= 100
    assert "mezzo" not in demo.path.read_text().lower()


@pytest.mark.heavy
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] * (path.stem == "is_bf16_safe"))
        for path in sorted(NOTEBOOKS.glob("*.ipynb"))
    ],
)
def test_a_notebook_gives_its_committed_outputs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(NOTEBOOKS))
    execute = importlib.import_module("execute")
    committed = execute.nbformat.read(path, as_version=4)
    assert len(committed.cells) <= 22
    assert all(cell.execution_count for cell in committed.cells if cell.cell_type == "code")
    fresh = execute.executed(path)
    assert execute.outputs(fresh) == execute.outputs(committed)
    assert "\x1b[1A" not in str(fresh)  # a bar that moves the cursor up would fill the page
