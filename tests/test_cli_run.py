"""`mezzo run`: its options end where the script begins, and the page documents each of them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from mezzo.cli import run as verb
from mezzo.cli.main import main
from mezzo.core import records

PAGE = Path(__file__).parents[1] / "docs" / "run.md"


def test_options_after_the_script_are_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:]); sys.exit(5)\n")
    monkeypatch.chdir(tmp_path)
    words = ["--precision", "fp16", "-m", "-h", "--", "x", "--records=y"]
    assert main(["run", "--records", "r.jsonl", "--precision", "bf16", "train.py", *words]) == 5
    captured = capsys.readouterr()
    assert captured.out == f"{words}\n"
    assert captured.err.startswith("mezzo: ")
    started, ended = records.read(tmp_path / "r.jsonl")
    assert isinstance(started, records.RunStarted)
    assert (started.policy, started.argv, started.script) == ("bf16", words, "train.py")
    assert isinstance(ended, records.RunEnded)
    assert ended.status == 5


def test_quiet_and_policy_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("print('ran')\n")
    (tmp_path / "mine.toml").write_text('compute = "bf16"\n')
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--quiet", "--policy", "mine.toml", "train.py"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("ran\n", "")


def test_a_pattern_that_matches_no_module_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(2, 2))\nmodel(torch.ones(1, 2))\nprint('on')\n"
    )
    assert main(["run", "--precision", "bf16,module.haed=fp32", str(script)]) == 2
    captured = capsys.readouterr()
    assert "haed" in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert main(["run", "--precision", "bf16,module.0=fp32", str(script)]) == 0


def test_every_option_is_on_the_page() -> None:
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    page = PAGE.read_text(encoding="utf-8")
    for action in parser._actions:
        for option in action.option_strings:
            if option not in ("-h", "--help"):
                assert f"`{option}" in page, option
