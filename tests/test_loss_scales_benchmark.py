"""benchmarks/loss_scales.py: what it counts, and that it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import loss_scales
from mezzo.core.loss_scale import DynamicLossScale, StaticLossScale


def test_overflows_and_unused_bits_are_counted() -> None:
    row = loss_scales.walked(StaticLossScale(2.0**15), [1.0, 65520.0 / 2**16, 65520.0 / 2**15, 4.0])
    assert (row["skipped"], row["steps"]) == (2, 4)
    assert row["unused_bits_mean"] == pytest.approx((0.99965 + 1.0) / 2, abs=1e-4)


def test_a_scale_that_gives_up_is_told() -> None:
    row = loss_scales.walked(DynamicLossScale(init=2.0, floor=1.0, patience=3), [1e6] * 20)
    assert row == {"collapsed_at": 3, "skipped": 4, "steps": 20}


def test_it_runs_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert loss_scales.main(["--steps", "25", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["trainings"]
    assert set(found) == set(loss_scales.TRAININGS)
    for row in found.values():
        assert set(row["scales"]) == {"constant", "dynamic"}
        assert row["scales"]["constant"]["skipped"] <= 1
    assert capsys.readouterr().out.count(" of 25 skipped") == 4
