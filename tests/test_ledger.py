"""`make ledger`: what counts as worse, what a part replaces, the exit status, and what the parts read."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
Row = dict[str, Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def ledger(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("ledger")


def ratio(value: float, low: float | None = None, high: float | None = None, better: str = "lower") -> Row:
    interval = {} if low is None else {"interval": [low, high]}
    return {"value": value, "better": better, "unit": "x", **interval}


def amount(value: float | None, unit: str, better: str = "lower", **rest: Any) -> Row:
    return {"value": value, "better": better, "unit": unit, **rest}


def of(value: int, total: int, *failed: str) -> Row:
    return {"value": value, "better": "higher", "unit": "of", "of": total, "failed": list(failed)}


FAILED = amount(None, "x", note="failed: boom")
NOT_MEASURED = amount(None, "x", note="not run: no data")
COMPARED: dict[str, tuple[Row | None, Row | None, str]] = {
    "slower, intervals apart": (ratio(1.0, 0.9, 1.1), ratio(1.3, 1.2, 1.4), "worse"),
    "faster, intervals apart": (ratio(1.3, 1.2, 1.4), ratio(1.0, 0.9, 1.1), "better"),
    "the same": (ratio(1.0, 0.9, 1.1), ratio(1.0, 0.9, 1.1), "same"),
    "an interval on one side, inside": (ratio(1.3, 1.2, 1.4), ratio(1.25), "within"),
    "bytes, 0.11 % more": (amount(10_000, "bytes"), amount(10_011, "bytes"), "worse"),
    "a count, one more": (amount(10_000, "count"), amount(10_001, "count"), "worse"),
    "one fails": (of(9, 9), of(8, 9, "a"), "worse"),
    "one fails, and as many pass as before": (of(9, 9), of(9, 10, "a"), "worse"),
    "the failing one passes": (of(8, 9, "a"), of(9, 9), "better"),
    "the failing one is gone": (of(8, 9, "a"), of(8, 8), "worse"),
    "info, more": (amount(9, "lines", "info"), amount(99, "lines", "info"), "info"),
    "new": (None, ratio(9.0), "new"),
    "no longer measured": (ratio(1.0), None, "missing"),
    "could not run": (ratio(1.0), NOT_MEASURED, "not run"),
    "failed": (ratio(1.0), FAILED, "worse"),
    "failed, as it did": (FAILED, FAILED, "same"),
}


@pytest.mark.parametrize("case", COMPARED)
def test_the_verdict_on_a_figure(case: str, ledger: ModuleType) -> None:
    before, now, verdict = COMPARED[case]
    assert ledger.compare(before, now)[0] == verdict
    assert verdict in ledger.ARROWS


# A part's command is one of these scripts.
WRITES = "import sys; open(sys.argv[1], 'w').write('{\"value\": %s}')"
RENAMED = 'import sys; open(sys.argv[1], \'w\').write(\'{"value": 0.5, "name": "other"}\')'
NOT_RUN = "import sys; open(sys.argv[1], 'w').write('{\"not_run\": \"no data\"}')"


@pytest.fixture
def run(ledger: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """`run({"a": script}, *options)`: the exit status with those parts; the ledger is tmp_path/ledger.json."""
    parts = sys.modules["ledger_parts"]

    def read(path: Path) -> list[Any]:
        found = json.loads(path.read_text())
        return [parts.Row(found.get("name", "figure"), found["value"])]

    def main(scripts: dict[str, str], *options: str) -> int:
        (tmp_path / "benchmarks").mkdir(exist_ok=True)
        for name, script in scripts.items():
            (tmp_path / "benchmarks" / f"{name}.py").write_text(script)
        table = {name: parts.Part((f"{name}.py", "{out}"), f"{name}.json", read) for name in scripts}
        monkeypatch.setattr(ledger, "PARTS", table)
        monkeypatch.setattr(ledger, "ROOT", tmp_path)
        results = ("--results", str(tmp_path / "results"))
        status: int = ledger.main(["--out", str(tmp_path / "ledger.json"), *results, *options])
        return status

    monkeypatch.setattr(ledger, "OUT", tmp_path / "results" / "ledger.json")
    return main


def _values(tmp_path: Path) -> dict[str, Any]:
    parts = json.loads((tmp_path / "ledger.json").read_text())["parts"]
    return {part: next(iter(found["rows"].values()))["value"] for part, found in parts.items()}


SECOND: dict[str, tuple[str, int, float]] = {
    # what part a runs the second time -> exit status, the figure that the ledger has then
    "the same": (WRITES % 1, 0, 1),
    "worse": (WRITES % 2, 1, 2),
    "better, under another name": (RENAMED, 1, 0.5),
    "could not run": (NOT_RUN, 0, 1),
    "fails": ("raise SystemExit(3)", 1, 1),
    "writes no figure": ("import sys; open(sys.argv[1], 'w').write('{}')", 1, 1),
    "exits with 1 for its own finding": (WRITES % 1 + "; sys.exit(1)", 0, 1),
}


@pytest.mark.parametrize("case", SECOND)
def test_the_exit_status_and_what_a_part_replaces(
    case: str, run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, status, value = SECOND[case]
    assert run({"a": WRITES % 1, "b": WRITES % 7}) == 0  # nothing is committed: all is new
    (tmp_path / "before.json").write_text((tmp_path / "ledger.json").read_text())
    capfd.readouterr()
    against = ("--against", str(tmp_path / "before.json"))
    assert run({"a": script, "b": WRITES % 8}, "--part", "a", *against) == status
    assert _values(tmp_path) == {"a": value, "b": 7}  # part b did not run
    assert ("no data" in capfd.readouterr().out) == (case == "could not run")
    assert "not_run" not in (tmp_path / "results" / "a.json").read_text()  # the last figures stay


def test_the_committed_ledger_is_that_of_head(
    ledger: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "ROOT", tmp_path)
    monkeypatch.setattr(ledger, "OUT", tmp_path / "ledger.json")
    assert ledger.committed() == {}
    ledger.write(ledger.OUT, {"a": {"command": "x", "rows": {"r": {"value": 1}}}})
    assert ledger.committed()["a"]["rows"] == {"r": {"value": 1}}  # no git: the file
    for command in ("init -q", "add -A", "-c user.name=a -c user.email=a@b.c commit -qm x"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    ledger.write(ledger.OUT, {"a": {"command": "x", "rows": {"r": {"value": 2}}}})
    assert ledger.committed()["a"]["rows"] == {"r": {"value": 1}}


def test_the_parts_read_the_committed_result_files(load: Callable[[str], ModuleType]) -> None:
    parts = load("ledger_parts")
    read = 0
    for part in parts.PARTS.values():
        path = BENCHMARKS / "results" / part.result
        if part.command and path.is_file() and "not_run" not in json.loads(path.read_text()):
            rows = list(part.read(path))
            assert rows
            assert len({row.name for row in rows}) == len(rows)
            assert all(isinstance(row.value, (int, float)) or row.note for row in rows)
            assert not any("amp-" in row.name for row in rows)  # PyTorch's own
            assert (BENCHMARKS / part.command[0]).is_file()
            read += 1
    assert read >= 6
