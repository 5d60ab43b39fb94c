"""The section "A step that was skipped" of docs/monitoring.md: its Python runs, and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mezzo.core.finding import CAUSES
from mezzo.pytorch.training import mixed_precision

PAGE = Path(__file__).parent.parent / "docs" / "monitoring.md"


def section() -> str:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r"^## A step that was skipped\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_code_of_the_section_prints_what_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = re.findall(r"^```(?:python)?\n(.*?)^```", section(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(code)
    state = torch.get_rng_state()
    try:
        exec(compile(code, str(script), "exec"), {})
    finally:
        torch.set_rng_state(state)
        for mp in list(mixed_precision._ALIVE):
            mp.close()
    assert capsys.readouterr().out == shown


def test_every_cause_is_explained() -> None:
    text = section()
    assert [cause for cause in CAUSES if f"| `{cause}` |" not in text] == []
