"""Blocks of Python in the pages: ```python, and for other frameworks ```python keras, ```python keras jax."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
# A fence, and the ```text that follows it: what the block prints.
BLOCK = re.compile(
    r"^```python(?P<words>[\w ]*)\n(?P<code>.*?)^```\n(?:\s*^```text\n(?P<shown>.*?)^```)?",
    re.MULTILINE | re.DOTALL,
)

BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(framework: str = "", backend: str | None = None) -> list[Any]:
    """The blocks for a framework, PyTorch if none is named, as parameters; without those for another backend."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            first, *backends = block["words"].split() or [""]
            if first == framework and backends in ([], [backend]):
                line = text.count("\n", 0, block.start("code")) + 1
                found.append(pytest.param(block, id=f"{page.name}:{line}"))
    return found


def run(block: re.Match[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a block alone; it must print what the page shows after it, where ``...`` stands for any text."""
    script = folder / "train.py"
    script.write_text(block["code"], encoding="utf-8")
    exec(compile(block["code"], str(script), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    shown = block["shown"]
    pattern = ".*".join(map(re.escape, (shown or "...").split("...")))
    assert re.fullmatch(pattern, printed, re.DOTALL), printed
