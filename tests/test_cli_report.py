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
    run_records.write(tmp_path / "run" / "runs" / "run.jsonl", run_records.records(steps=10, modules=["a"]))
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


def test_what_holds_no_record_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ok.py").write_text("print(1)\n")
    for place, words in (
        (str(tmp_path), "contains no run records. A report needs a folder with runs/*.jsonl"),
        (str(tmp_path / "nowhere"), "nowhere: no such file or folder. A report needs"),
        (str(tmp_path / "ok.py"), "ok.py: contains no run records"),
        ("", "Give one with run records"),
    ):
        assert main(["report", place]) == 2
        told = capsys.readouterr()
        assert words in told.err
        assert told.out == ""
    assert not (tmp_path / "ok.html").exists()


def test_bare_it_says_what_it_could_be_given(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, words in (
        (folder, "mezzo report mezzo-run."),
        (tmp_path, "mezzo report run. Folders with run records here"),
    ):
        monkeypatch.chdir(place)
        assert main(["report"]) == 2
        assert words in capsys.readouterr().err


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


# Damage to a run's records -> what is said of the run.
FAULTY = {
    "cut off": (lambda text: text[: len(text) // 2 // 7 * 7], "cut short"),
    "without an end": (lambda text: "".join(text.splitlines(keepends=True)[:-1]), "cut short"),
    "deeply nested": (lambda text: text + "[" * 100_000 + "\n", "not a run record"),
}


@pytest.mark.parametrize("what", FAULTY)
def test_records_that_are_cut_off_or_damaged_are_reported(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, says = FAULTY[what]
    folder = comparisons.one_seed(tmp_path / "c")
    path = folder / "runs" / "bf16-0.jsonl"
    path.write_text(damage(path.read_text()))
    for place in (folder, path):
        assert main(["report", str(place)]) == 0
        told = capsys.readouterr()
        assert "bf16-0" in told.err
        assert says in told.err
        assert "fp32-0" not in told.err
