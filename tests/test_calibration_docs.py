"""The sections on calibration of docs/monitoring.md: their Python runs, with warnings as errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from mezzo.pytorch.training import mixed_precision

PAGE = Path(__file__).parent.parent / "docs" / "monitoring.md"


def section(title: str = "The loss scale from data") -> str:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_code_of_the_section_runs(capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", section(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        torch.set_rng_state(state)
        for mp in list(mixed_precision._ALIVE):
            mp.close()
    out = capsys.readouterr().out
    assert "\npolicy       fp16," in out


def test_the_code_on_the_ranking_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(
        r"^```python\n(.*?)^```", section("Which modules low precision hurts"), re.MULTILINE | re.DOTALL
    )
    exec(compile(block, str(PAGE), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {"0", "1", "2"}
    assert all("'e3m2'" in line for line in lines if "Linear" in line)


def test_its_table_is_the_benchmarks() -> None:
    found = json.loads((PAGE.parents[1] / "benchmarks" / "results" / "loss_scales.json").read_text())
    for name, row in found["trainings"].items():
        low, high = row["largest_log2"]
        cells = [
            f"{row['scales'][kind]['skipped']}, {row['scales'][kind]['unused_bits_mean']:.1f}"
            for kind in ("constant", "dynamic")
        ]
        assert f"| {name} | 2^{low:.1f} to 2^{high:.1f} | {' | '.join(cells)} |" in section()
