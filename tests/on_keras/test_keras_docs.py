"""The Python of the pages runs on this backend and prints what they show; the transfer-learning script and example."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import BACKEND
from page_blocks import blocks, run

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.every_backend
@pytest.mark.parametrize("block", blocks("keras", BACKEND))
def test_a_block_prints_what_the_page_shows(
    block: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    run(block, tmp_path, capsys)
    assert "PrecisionMonitor(" not in block["code"] or len(list(tmp_path.rglob("fit001.jsonl"))) == 1


def run_script(folder: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["keras_transfer.py", *words.split()])
    runpy.run_path(str(ROOT / folder / "keras_transfer.py"), run_name="__main__")


def test_the_script_prints_each_stage_and_ends_with_its_metric(monkeypatch: Any, capsys: Any) -> None:
    words = "--width 2 --image-size 8 --pretrain-epochs 1 --epochs 1 --batch-size 90"
    run_script("benchmarks", words, monkeypatch)
    lines = capsys.readouterr().out.strip().splitlines()
    stages = [line.partition(",")[0] for line in lines if ", epoch " in line]
    assert stages == ["pretraining", "head", "fine-tuning"]
    assert [line for line in lines if re.search("accuracy: ([0-9.]+) %", line)] == lines[-1:]


def test_the_example_runs(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    run_script("examples", f"--epochs 1 --precision bf16 --records {tmp_path / 'records'}", monkeypatch)
    assert re.search("bfloat16: [0-9.]+% right, weights float32$", capsys.readouterr().out.strip())
    assert len(list((tmp_path / "records" / "runs").glob("*.jsonl"))) == 3  # one a fit
