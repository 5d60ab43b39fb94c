"""`mezzo report`: the page rebuilt from records, without a framework; what it says where there are none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import comparisons
import run_records
from mezzo.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run_records.write(tmp_path / "run" / "runs" / "run.jsonl", run_records.records(steps=40))
    return tmp_path / "run"


def test_a_runs_folder_a_comparisons_folder_and_a_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared = comparisons.one_step(tmp_path / "compared")
    record = folder / "runs" / "run.jsonl"
    for place, page, words in (
        (folder, folder / "report.html", "A training run"),
        (compared, compared / "report.html", "Mixed precision against FP32"),
        (record, folder / "runs" / "run.html", "A training run"),
    ):
        assert main(["report", str(place)]) == 0
        assert capsys.readouterr().out == f"{page}\n"
        assert words in page.read_text(encoding="utf-8")
    assert main(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "report": str(folder / "report.html")}


def test_where_there_is_nothing_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "no run records. A report is made from a folder with runs/*.jsonl" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no run records" in capsys.readouterr().err
    (tmp_path / "verdict.json").write_text("[]")
    assert main(["report", str(tmp_path)]) == 2
    assert 'it has no object "candidates"' in capsys.readouterr().err


def test_bare_it_says_what_it_could_be_given(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["report"]) == 2
    told = "mezzo report: give DIR, a folder with run records, or a .jsonl file. For instance: mezzo report "
    assert capsys.readouterr().err == f"{told}mezzo-run.\n"
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    assert capsys.readouterr().err == f"{told}run. In this folder there are run.\n"


def test_a_full_disk_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(folder / "report.html"))

    monkeypatch.setattr("mezzo.report.os.replace", full)
    assert main(["report", str(folder)]) == 2
    assert capsys.readouterr().err == f"mezzo report: {folder / 'report.html'}: No space left on device\n"


def test_it_opens_the_page(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("mezzo.cli.report.webbrowser.open", lambda where: opened.append(where) or True)
    assert main(["report", str(folder), "--open"]) == 0
    assert opened == [(folder / "report.html").resolve().as_uri()]
    monkeypatch.setattr("mezzo.cli.report.webbrowser.open", lambda _: False)
    assert main(["report", str(folder), "--open"]) == 2
    assert "no browser was found" in capsys.readouterr().err


def test_no_framework_is_imported(folder: Path) -> None:
    code = (
        "import sys\nfrom mezzo.cli.main import main\n"
        "assert main(['report', sys.argv[1]]) == 0\n"
        "assert not {'torch', 'matplotlib', 'tensorboard', 'numba'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{folder / 'report.html'}\n"), done.stderr


def test_what_is_no_record_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ok.py").write_text("print(1)\n")
    for place, words in (
        (str(tmp_path / "ok.py"), "ok.py: holds no run record"),
        ("", "no folder or file is named"),
    ):
        assert main(["report", place]) == 2
        told = capsys.readouterr()
        assert words in told.err
        assert told.out == ""
    assert not (tmp_path / "ok.html").exists()
