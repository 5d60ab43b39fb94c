"""Wrong words: every complaint of a command ends with what to write instead, and with status 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mezzo.cli.main import main

AFTER = "What belongs to the script goes after --: mezzo {} train.py -- --epochs 3"

WRONG: list[tuple[list[str], str]] = [
    (["calibrate", "train.py", "--steps", "x"], "'x' is not a whole number of updates: write one such as 20"),
    (["compare", "train.py", "--metric-margin", "x"], "'x' is not a number: write one such as 0.2"),
    (["compare", "train.py", "--metric", "("], "for instance 'accuracy: ([0-9.]+)'"),
    (["compare", "."], "'.' is a directory without a __main__.py"),
    (["compare", "train.py", "--seeds", "x"], "'x' is not a whole number of pairs: write one such as 3"),
    (["compare", "train.py", "--margin", "x"], "'x' is not a number: write 0.005 or 0.5%"),
    (["tune", "train.py"], "`mezzo calibrate` ranks the modules by"),
    (
        ["batch-size", "train.py", "--vary=--b", "--start", "x"],
        "'x' is not a whole number: write one such as 8",
    ),
    (["batch-size", "train.py", "--vary", "--batch"], "Write --vary=VALUE, all in one word where the value"),
    (["calibrate", "train.py", "--epochs", "3"], AFTER.format("calibrate")),
    (["compare", "train.py", "--epochs", "3"], AFTER.format("compare")),
    (["batch-size", "train.py", "--vary=--b", "--epochs", "3"], AFTER.format("batch-size")),
    (["compare", "train.py", "--presicion=bf16"], "Did you mean --precision?"),
    (["doctor", "--qick"], "Did you mean --quick?"),
    (["doctor", "A100"], "unrecognized arguments: A100. `mezzo doctor --help` has what it takes"),
    (["doctor", "--gpu"], "--gpu: expected one argument. Write --gpu=VALUE"),
]


@pytest.mark.parametrize(("words", "mend"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_the_mend_is_said(
    words: list[str],
    mend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert mend in captured.err
    assert captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


LOCKED: list[tuple[list[str], str]] = [
    (["run", "secret.py"], "the script 'secret.py' can't be read. Check its permissions."),
    (["run", "locked/train.py"], "no script 'locked/train.py' in "),
    (["run", "--out", "locked", "train.py"], "Permission denied. Name a folder that can be written"),
    (
        ["run", "--records", "locked/r.jsonl", "train.py"],
        "Permission denied. Name a file that can be written",
    ),
    (["run", "--tensorboard=locked", "train.py"], "it can't be written. Name another folder."),
    (["run", "--tensorboard=locked/x", "train.py"], "Permission denied. Name a folder that can be written"),
    (["run", "--policy", "locked/p.toml", "train.py"], "Permission denied. Give the path of a TOML file"),
    (["compare", "secret.py"], "the script 'secret.py' can't be read. Check its permissions."),
    (["compare", "locked/train.py"], "no script 'locked/train.py' in "),
    (["compare", "train.py", "--out", "locked"], "Name a folder that can be written with --out."),
    (["calibrate", "secret.py"], "the script 'secret.py' can't be read. Check its permissions."),
    (["calibrate", "train.py", "--out", "locked"], "Name a folder that can be written with --out."),
    (["calibrate", "train.py", "--out", "locked/x"], "Name a folder that can be written with --out."),
    (["batch-size", "train.py", "--vary=--b", "--out", "locked"], "Name a folder that can be written"),
    (["report", "locked"], "locked/verdict.json: Permission denied. Check its permissions"),
]


@pytest.mark.parametrize(("words", "mend"), LOCKED, ids=[" ".join(words) for words, _ in LOCKED])
def test_what_may_not_be_read_or_written_is_said(
    words: list[str],
    mend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)\n")
    (tmp_path / "secret.py").write_text("")
    (tmp_path / "secret.py").chmod(0)
    (tmp_path / "locked").mkdir(mode=0)
    monkeypatch.chdir(tmp_path)
    if os.access("locked", os.R_OK):
        pytest.skip("this user may read and write everything")
    if "--tensorboard" in words[1]:
        pytest.importorskip("tensorboard")
    try:
        assert main(words) == 2
    finally:
        (tmp_path / "locked").chmod(0o700)  # or pytest could not take it away
    assert mend in capsys.readouterr().err


TRAINS_NOT = {
    "compare": (
        [],
        "ended without a call of backward(), so it has no loss to compare. Compare a script that trains",
    ),
    "calibrate": ([], "Give a script that trains with a torch optimizer"),
    "batch-size": (["--vary={}", "--", "{}"], "Let it train for longer"),
}


@pytest.mark.heavy
@pytest.mark.parametrize("verb", TRAINS_NOT)
def test_a_script_that_never_trains_is_status_2_everywhere(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("print('no training here')\n")
    monkeypatch.chdir(tmp_path)
    words, mend = TRAINS_NOT[verb]
    assert main([verb, "train.py", *words]) == 2
    assert mend in capsys.readouterr().err
    assert main([verb, "--help"]) == 0
    assert "never trains" in " ".join(capsys.readouterr().out.split())


def test_run_ends_as_a_script_that_never_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "train.py"]) == 7
    assert "the script never called backward()" in capsys.readouterr().err
