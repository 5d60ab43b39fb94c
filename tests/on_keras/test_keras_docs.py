"""docs/keras.md: its Python runs on this backend and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import BACKEND

PAGE = Path(__file__).parent.parent.parent / "docs" / "keras.md"
TEXT = PAGE.read_text(encoding="utf-8")
# A block's fence may name the one backend that it is for. After a block may come, indented, what it prints.
BLOCK = re.compile(r"^```python ?(\w*)\n(.*?)^```\n(?:\n((?:    [^\n]*\n)+))?", re.MULTILINE | re.DOTALL)


@pytest.mark.every_backend
def test_the_pages_python_runs_and_prints_what_it_shows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [match.groups() for match in BLOCK.finditer(TEXT)]
    assert len(blocks) == TEXT.count("```python")
    assert {backend for backend, _, _ in blocks} == {"", "tensorflow", "jax", "torch"}
    names: dict[str, object] = {"__name__": "page"}
    shown = 0
    for backend, code, expected in blocks:
        if backend not in ("", BACKEND):
            continue
        exec(compile(code, str(PAGE), "exec"), names)
        printed = capsys.readouterr().out
        if expected and not expected.strip().startswith("mezzo "):  # a command, not what is printed
            assert printed == re.sub(r"^    ", "", expected, flags=re.MULTILINE)
            shown += 1
        for comment in re.findall(r"print\([^\n]*\)  # ([^\n]+)", code):
            assert comment in printed
    assert shown == 5


@pytest.mark.parametrize(("page", "fence"), [("README.md", "python keras"), ("docs/transfer.md", "python")])
def test_the_python_of_other_pages_runs(
    page: str, fence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (PAGE.parent.parent / page).read_text(encoding="utf-8")
    blocks = re.findall(rf"^```{fence}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {"__name__": "page"})
    assert page != "README.md" or len(list((tmp_path / "mezzo-run").rglob("*.jsonl"))) == 1
