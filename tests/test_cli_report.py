"""`mezzo report`: the page rebuilt from records, without a framework; what it says where there are none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import comparisons
import run_records
from commands import Command, in_the_folder  # noqa: F401


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run_records.write(tmp_path / "run" / "runs" / "run.jsonl", run_records.records(steps=10, modules=["a"]))
    return tmp_path / "run"


def test_a_runs_folder_a_comparisons_folder_and_a_file(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    compared = comparisons.one_step(tmp_path / "compared")
    record = folder / "runs" / "run.jsonl"
    for place, page, words in (
        (folder, folder / "report.html", "A training run"),
        (compared, compared / "report.html", "Mixed precision against FP32"),
        (record, folder / "runs" / "run.html", "A training run"),
    ):
        ran = command("report", str(place))
        assert (ran.status, ran.out) == (0, f"{page}\n")
        assert words in page.read_text(encoding="utf-8")
    shown = json.loads(command("report --json", str(folder)).out)
    assert shown == {"schema": 1, "report": str(folder / "report.html")}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["empty"], "contains no run records. A report needs a folder with runs/*.jsonl"),
        (["nowhere"], "nowhere: no such file or folder. A report needs"),
        (["ok.py"], "ok.py: contains no run records"),
        ([""], "Give one with run records"),
        ([], "Give one with run records"),
    ],
)
def test_what_holds_no_record_is_status_2(
    words: list[str], told: str, folder: Path, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "ok.py").write_text("print(1)\n")
    (tmp_path / "empty").mkdir()
    ran = command("report", *words)
    assert (ran.status, ran.out) == (2, "")
    assert told in ran.err
    assert not (tmp_path / "ok.html").exists()


def test_bare_where_no_folder_has_records_it_gives_an_example(command: Command) -> None:
    assert "mezzo report mezzo-run." in command("report").err


def test_a_full_disk_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(folder / "report.html"))

    monkeypatch.setattr("mezzo.report.os.replace", full)
    ran = command("report", str(folder))
    assert ran.status == 2
    assert ran.err == f"mezzo report: {folder / 'report.html'}: No space left on device\n"


def test_it_opens_the_page(folder: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    opened: list[str] = []
    monkeypatch.setattr("mezzo.cli.report.webbrowser.open", lambda where: opened.append(where) or True)
    assert command("report --open", str(folder)).status == 0
    assert opened == [(folder / "report.html").resolve().as_uri()]
    monkeypatch.setattr("mezzo.cli.report.webbrowser.open", lambda _: False)
    ran = command("report --open", str(folder))
    assert ran.status == 2
    assert "no browser was found" in ran.err


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
    what: str, tmp_path: Path, command: Command
) -> None:
    damage, says = FAULTY[what]
    folder = comparisons.one_seed(tmp_path / "c")
    path = folder / "runs" / "bf16-0.jsonl"
    path.write_text(damage(path.read_text()))
    for place in (folder, path):
        ran = command("report", str(place))
        assert ran.status == 0
        assert "bf16-0" in ran.err
        assert says in ran.err
        assert "fp32-0" not in ran.err
