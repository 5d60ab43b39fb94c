"""The notebooks run, and their committed outputs are those of the code."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"


@pytest.mark.heavy
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] * (path.stem == "is_bf16_safe"))
        for path in sorted(FOLDER.glob("*.ipynb"))
    ],
)
def test_a_notebook_gives_its_committed_outputs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    execute = importlib.import_module("execute")
    committed = execute.nbformat.read(path, as_version=4)
    assert len(committed.cells) <= 22
    assert all(cell.execution_count for cell in committed.cells if cell.cell_type == "code")
    fresh = execute.executed(path)
    assert execute.outputs(fresh) == execute.outputs(committed)
    assert "\x1b[1A" not in str(fresh)  # a bar that moves the cursor up would fill the page
