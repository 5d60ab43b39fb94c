"""`benchmarks/` and `experiments/`: what they count, and the ledger of their results."""

from __future__ import annotations

import importlib
import json
import math
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mezzo.core import records

# PyTorch's own, while it imports Inductor.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
Load = Callable[[str], ModuleType]
Row = dict[str, Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    for folder in (BENCHMARKS, BENCHMARKS.parent / "experiments"):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module


def test_a_bar_is_judged_by_its_worst_contender_and_the_whole_interval(load: Load) -> None:
    ratios = {
        "mezzo-bf16": {"ratio": 0.99, "interval": [0.98, 1.01], "rounds": 9},
        "short-bf16": {"ratio": 1.01, "interval": [0.99, 1.02], "rounds": 9},
        "split-bf16": {"ratio": 0.85, "interval": [0.80, 0.90], "rounds": 9},
    }
    peaks = {"fp32": 150, "amp-bf16": 100, "split-bf16": 71, "lean-bf16": 60}
    eager = {"summary": "", "ratios": ratios, "peak_bytes": peaks}
    rows = {"gpt": {"eager": eager, "compiled": {"error": ""}}}
    judged = {
        (line["bar"], line["mode"]): (line["contender"], line["verdict"])
        for line in load("bars").judge({"rows": rows, "loss": {}})
        if (line["row"], line["below"]) == ("gpt", "amp-bf16")
    }
    assert judged["never slower than torch.amp", "eager"] == ("short-bf16", "open")
    assert judged["never slower than torch.amp", "compiled"] == ("mezzo-bf16", "not measured")
    assert judged["peak bytes, exact", "eager"] == ("split-bf16", "met")
    assert judged["peak bytes, lean", "eager"] == ("lean-bf16", "missed")


def test_the_gpu_check_without_a_gpu_exits_with_2_and_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / "gpu_check.py"), run_name="__main__")
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert "needs a CUDA device" in said.err


def test_collectives_that_mezzo_adds_are_those_beyond_pytorchs(load: Load) -> None:
    collectives = load("collectives")
    common = {"ranks": 2, "wrapper": "DDP"}
    before = common | {"contender": "torch fp16", "collectives": {"a": 1}, "bytes": {"a": 8}}
    after = {"contender": "GradScaler fp16", "collectives": {"a": 1, "b": 2}, "bytes": {"a": 6, "b": 4}}
    plain, own = collectives.with_added([before, common | after])
    assert "added_bytes" not in plain
    assert (own["baseline"], own["added_collectives"]) == ("torch fp16", {"b": 2})
    assert own["added_bytes"] == {"a": -2, "b": 4}


def test_the_formula_gives_the_measured_collectives_on_2_and_4_ranks(load: Load) -> None:
    collectives = load("collectives")
    rows = json.loads(collectives.OUT.read_text(encoding="utf-8"))["steps"]
    of = {(row["ranks"], row["wrapper"], row["contender"]): row for row in rows}
    compared = 0
    for (ranks, wrapper, contender), row in of.items():
        if "baseline" not in row:
            continue
        # Under `mezzo run` the script's clip_grad_norm_ stays; elsewhere Mezzo's reduction replaces PyTorch's.
        stays = row["baseline"].replace("fp16", "bf16") if contender.startswith("mezzo run") else "torch bf16"
        least = of[ranks, wrapper, stays]
        messages, size = collectives.added(contender, wrapper)
        assert sum(row["collectives"].values()) - sum(least["collectives"].values()) == messages, row
        assert sum(row["bytes"].values()) - sum(least["bytes"].values()) == size, row
        compared += 1
    assert compared == 40


def test_a_small_reduction_grows_with_the_logarithm_of_the_nodes(load: Load) -> None:
    at_scale = load("collectives").at_scale
    one, two, many = at_scale(8), at_scale(16), at_scale(16384)
    assert (one["nodes"], two["nodes"], many["nodes"]) == (1, 2, 2048)
    assert many["tree_s"] - two["tree_s"] == pytest.approx(2 * 10 * 5.0e-6)
    assert many["ring_s"] - two["ring_s"] == pytest.approx(2 * 2046 * (7 * 0.47e-6 * 1.8 + 2.7e-6))


def test_minutes_of_a_comparison_are_those_of_its_runs(load: Load, tmp_path: Path) -> None:
    for name, seconds in {"fp32-0": 60, "fp32-1": 30, "mxfp8-recipe-mine-0": 6}.items():
        line = records.to_line(records.RunEnded(status=0, seconds=seconds))
        (tmp_path / f"{name}.jsonl").write_text(line + "\n", encoding="utf-8")
    assert load("block_verdicts").minutes(tmp_path) == {"fp32": 1.5, "mxfp8-recipe-mine": 0.1}


def test_recipes_are_paired_by_seed(load: Load) -> None:
    def one(gaps: dict[int, float]) -> dict[str, Any]:
        return {"pairs": [{"seed": seed, "loss_gap": gap} for seed, gap in gaps.items()]}

    found = load("block_verdicts").difference(one({0: 0.5, 1: 0.7, 2: 0.6}), one({2: 0.1, 1: 0.2, 0: 0.3}))
    assert found["pairs"] == pytest.approx([0.2, 0.5, 0.5])
    assert found["mean"] == pytest.approx(0.4)
    assert found["interval"][0] < 0.2 < 0.6 < found["interval"][1]


def test_a_common_error_of_gradients_does_not_average_out(load: Load) -> None:
    errors = load("block_verdicts")._errors
    exact = [[torch.tensor([3.0, 4.0])], [torch.tensor([4.0, 3.0])]]
    common = errors([[of[0] - torch.tensor([0.3, 0.3])] for of in exact], exact)
    random = errors([[exact[0][0] + 0.3], [exact[1][0] - 0.3]], exact)
    assert common["of_one"] == pytest.approx(common["of_mean"]) == pytest.approx(random["of_one"])
    assert (random["of_mean"], random["gain"]) == (pytest.approx(0.0, abs=1e-6), pytest.approx(1.0))
    assert common["gain"] == pytest.approx(1 - 0.3 * 7 / 25)


# `make ledger`: what counts as worse, what a part replaces, the exit status, and what the parts read.


@pytest.fixture
def ledger(load: Load) -> ModuleType:
    return load("ledger")


def ratio(value: float, low: float | None = None, high: float | None = None, better: str = "lower") -> Row:
    interval = {} if low is None else {"interval": [low, high]}
    return amount(value, "x", better, **interval)


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


def test_other_sources_are_measured_into_the_ledger_that_is_named(
    run: Callable[..., int], ledger: ModuleType, tmp_path: Path
) -> None:
    assert run({"a": WRITES % 1}) == 0
    (tmp_path / "old" / "src" / "mezzo").mkdir(parents=True)
    assert ledger.main(["--source", str(tmp_path / "old"), "--out", str(tmp_path / "old.json")]) == 0
    assert '"value": 1' in (tmp_path / "old.json").read_text()


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


def test_the_parts_read_the_committed_result_files(load: Load) -> None:
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


# The experiments: what they share. `make reproduce` runs the scripts.


def plot(numbers: dict[str, Any], figure: Any) -> None:
    figure.subplots().plot(numbers["loss"])


# Whether it holds, why it is known not to, fate, exit status.
FATES = [
    (True, "", "holds", 0),
    (False, "", "lost", 1),
    (False, "small", "known", 0),
    (True, "small", "gained", 0),
]


@pytest.mark.parametrize("row", FATES)
def test_only_a_finding_that_is_lost_fails_the_run(
    row: Any, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    holds, known, fate, status = row
    common = load("common")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # `main` sets it, and it is put back
    asked = []

    def run(full: bool) -> Any:
        asked.append((full, torch.get_num_threads()))
        second = common.Finding("b", "So.", "43.", holds, known)
        return [common.Finding("a", "It is so.", "It is 42.", True), second], {"loss": [1.0, math.nan]}

    threads = torch.get_num_threads()
    argv = ["--full", "--out", str(tmp_path)]
    try:
        assert common.main("name", "Title", "section 1", run, plot, argv) == status
    finally:
        torch.set_num_threads(threads)
    assert asked == [(True, 1)]
    record = json.loads((tmp_path / "name" / "numbers.json").read_text(encoding="utf-8"))
    assert record["numbers"] == {"loss": [1.0, None]}
    assert [one["fate"] for one in record["findings"]] == ["holds", fate]
    assert "<svg" in (tmp_path / "name" / "figure.svg").read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert f"b: {common.WORDS[fate]}" in printed
    assert known in printed


def test_run_all_goes_on_after_a_failure(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_all = load("run_all")
    (tmp_path / "good").mkdir()
    record = {"findings": [{"name": "a", "seen": "42", "fate": "holds"}], "numbers": {"many": 1}}
    (tmp_path / "good" / "numbers.json").write_text(json.dumps(record), encoding="utf-8")
    monkeypatch.setattr(run_all, "NAMES", ("bad", "good"))
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--out", str(tmp_path)])
    for statuses, status in (((2, 0), 1), ((0, 1), 1), ((0, 0), 0)):
        found = dict(zip(("bad", "good"), statuses))
        monkeypatch.setattr(run_all, "run", lambda name, options, found=found: (found[name], ""))
        assert run_all.main() == status
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert list(summary["experiments"]) == ["good"]
    assert "numbers" not in summary["experiments"]["good"]
