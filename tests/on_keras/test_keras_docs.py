"""The Python of the pages runs on this backend and prints what they show; the transfer-learning script and example."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from conftest import BACKEND
from page_blocks import blocks, run

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.every_backend
@pytest.mark.parametrize("block", blocks("keras", BACKEND))
def test_a_block_runs_alone_and_prints_what_the_page_shows(
    block: re.Match[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(block, tmp_path, capsys)
    assert "PrecisionMonitor(" not in block["code"] or len(list(tmp_path.rglob("fit001.jsonl"))) == 1


def test_the_script_prints_each_stage_and_ends_with_its_metric(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--width 2 --image-size 8 --pretrain-epochs 1 --epochs 1 --batch-size 90"
    monkeypatch.setattr(sys, "argv", ["keras_transfer.py", *words.split()])
    runpy.run_path(str(ROOT / "benchmarks" / "keras_transfer.py"), run_name="__main__")
    lines = capsys.readouterr().out.strip().splitlines()
    stages = [line.partition(",")[0] for line in lines if ", epoch " in line]
    assert stages == ["pretraining", "head", "fine-tuning"]
    assert [line for line in lines if re.search("accuracy: ([0-9.]+) %", line)] == lines[-1:]


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["x", "--epochs", "1", "--precision", "bf16", "--records", str(tmp_path / "records")]
    )
    runpy.run_path(str(ROOT / "examples" / "keras_transfer.py"), run_name="__main__")
    assert re.search("bfloat16: [0-9.]+% right, weights float32$", capsys.readouterr().out.strip())
    assert len(list((tmp_path / "records" / "runs").glob("*.jsonl"))) == 3  # one a fit
