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


LISTED: dict[str, tuple[dict[str, Row], dict[str, Row], dict[str, str]]] = {
    "a figure that is gone": ({"a": ratio(1), "b": ratio(1)}, {"a": ratio(1)}, {"a": "same", "b": "missing"}),
    "a part that failed lists nothing else": ({"a": ratio(1)}, {"p": FAILED}, {"p": "worse"}),
    "a figure that was not run before": ({"p": NOT_MEASURED}, {"a": ratio(1)}, {"a": "new"}),
    "no figures at all": ({"a": ratio(1)}, {}, {"a": "missing"}),
}


@pytest.mark.parametrize("case", LISTED)
def test_the_figures_of_a_part_that_are_listed(case: str, ledger: ModuleType) -> None:
    before, now, expected = LISTED[case]
    found = ledger.lines({"part": {"rows": before}}, {"part": {"rows": now}}, ["part"])
    assert {line.name: line.verdict for line in found} == expected


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


def test_from_results_reads_and_runs_nothing(run: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text('{"value": 5, "machine": {"cpu": "another"}}')
    assert run({"a": "raise SystemExit(3)", "b": "raise SystemExit(3)"}, "--from-results", "--json") == 0
    parts = json.loads((tmp_path / "ledger.json").read_text())["parts"]
    assert parts["a"]["rows"]["figure"]["value"] == 5
    assert parts["a"]["machine"]["cpu"] == "another"
    assert "a.json" in parts["a"]["source"]
    assert parts["b"]["rows"]["b"]["note"].startswith("not run")


USAGE = {
    "an unknown part": ("--part", "nonesuch"),
    "another source into the ledger itself": ("--source", ".."),
    "no ledger to compare with": ("--against", "{here}/none.json"),
}


@pytest.mark.parametrize("case", USAGE)
def test_usage_is_status_2(case: str, ledger: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        ledger.main([word.format(here=tmp_path) for word in USAGE[case]])
    assert ended.value.code == 2


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


def test_each_group_of_cases_has_its_files_and_no_other_group_s(load: Callable[[str], ModuleType]) -> None:
    groups = load("ledger_parts").groups(Path(__file__).parent)
    assert all(groups.values())
    files = [path for group in groups.values() for path in group]
    assert len(files) == len(set(files))


REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a.TestA" name="good"/>
<testcase classname="test_a" name="bad"><failure message="boom&#10;more">x</failure></testcase>
<testcase classname="test_a" name="skips"><skipped message="no GPU"/></testcase>
<testcase classname="test_a" name="torn"/>
<testcase classname="test_a" name="torn"><error message="teardown"/></testcase>
<testcase classname="" name="tests.test_b"><error message="collection failure"/></testcase>
</testsuite></testsuites>"""


def test_a_junit_report_is_read(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert load("outcomes").read(tmp_path / "report.xml") == {
        "TestA::good": ("passed", ""),
        "test_a::bad": ("failed", "boom"),
        "test_a::skips": ("skipped", "no GPU"),
        "test_a::torn": ("failed", "teardown"),
        "tests.test_b": ("failed", "collection failure"),
    }
