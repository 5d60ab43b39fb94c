"""docs/monitoring.md: the Python of its sections runs and prints what the page shows, and its tables are whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mezzo.core.overflow import CAUSES
from mezzo.core.ranges import WHAT
from mezzo.pytorch.monitor.ranges import DEFAULT_EVERY
from mezzo.pytorch.training import mixed_precision

PAGE = Path(__file__).parent.parent / "docs" / "monitoring.md"


def section(title: str) -> str:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    for mp in list(mixed_precision._ALIVE):
        mp.close()


def test_ranges(capsys: pytest.CaptureFixture[str], leaves_nothing: None) -> None:
    text, names = section("Ranges"), dict[str, object]()
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    shares = re.findall(r"^(\d) fp16 (\d+)% -> (\d+)%$", capsys.readouterr().out, re.MULTILINE)
    assert [module for module, _, _ in shares] == ["2", "1", "0"]
    assert all(int(scaled) < int(without) for _, without, scaled in shares)  # the scale recovers some
    assert all(f"| `{what}` |" in text for what in WHAT)
    assert DEFAULT_EVERY == 100
    assert "`watch=True` at every hundredth" in text


def test_a_step_that_was_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], leaves_nothing: None
) -> None:
    text = section("A step that was skipped")
    code, shown = re.findall(r"^```(?:python)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    script = tmp_path / "train.py"  # a finding shows the line of the file
    script.write_text(code)
    exec(compile(code, str(script), "exec"), {})
    assert capsys.readouterr().out == shown
    assert [cause for cause in CAUSES if f"| `{cause}` |" not in text] == []
