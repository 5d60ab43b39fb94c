"""The section "Ranges" of docs/monitoring.md: its Python runs, in order, with warnings as errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mezzo.core.ranges import WHAT
from mezzo.pytorch.monitor.ranges import DEFAULT_EVERY
from mezzo.pytorch.training import mixed_precision

PAGE = Path(__file__).parent.parent / "docs" / "monitoring.md"


def section() -> str:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r"^## Ranges\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_code_of_the_section_runs(capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()
    names: dict[str, object] = {}
    try:
        for block in re.findall(r"^```python\n(.*?)^```", section(), re.MULTILINE | re.DOTALL):
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        torch.set_rng_state(state)
        for mp in list(mixed_precision._ALIVE):
            mp.close()
    shares = re.findall(r"^(\d) fp16 (\d+)% -> (\d+)%$", capsys.readouterr().out, re.MULTILINE)
    assert [module for module, _, _ in shares] == ["2", "1", "0"]
    assert all(int(scaled) < int(without) for _, without, scaled in shares)  # the scale recovers some


def test_the_section_explains_every_kind_and_the_default() -> None:
    text = section()
    assert all(f"| `{what}` |" in text for what in WHAT)
    assert DEFAULT_EVERY == 100
    assert "`watch=True` at every hundredth" in text
