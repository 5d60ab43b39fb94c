"""The page of a run without a verdict: what it did, why steps failed, and nothing that was not recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

import comparisons
import run_records
from mezzo.core.errors import UsageError
from mezzo.core.records import LossRecord, Record, RunEnded, UpdateRecord
from mezzo.report import build, build_any, build_run
from mezzo.report.run import read_run
from test_report import Outline, is_sound


def made(place: Path, records: list[Record] | None = None) -> Path:
    return run_records.write(
        place / "runs" / "run.jsonl", run_records.records() if records is None else records
    )


def outline(place: Path) -> Outline:
    return Outline(build_run(place).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one watched run and its page."""
    place = tmp_path_factory.mktemp("watched") / "r"
    made(place)
    build_run(place)
    return place


def test_a_watched_run_shows_what_a_reader_asks(watched: Path) -> None:
    page = watched / "report.html"
    found = is_sound(page.read_text(encoding="utf-8"))
    for words in (
        "A training run train.py fp16 · AMD EPYC 9R14",
        "Updates 240", "Skipped 5 3 alarms, 2 by a scale too high", "Loss scale 2¹¹ 2¹¹ to 2¹⁶", "255 MB",
        "Watched 30 70 tensors in each step",
        "fp16: the loss is infinite at step 90, the first of 2 steps without a finite one.",
        "5 of 240 updates skipped, at 1, 3, 90, 91, 170 (inf in the gradients); of 5 looked into, 3 alarms",
        "3 skipped updates to fix, of 2 kinds.",
        "Update 2 times: 90, 91 Module and line blocks.1.attention model.py:48: weights = torch.exp(scores)",
        "Operation exp forward Cause overflow",
        "input 0 fp16 32×4×64×64: 0.000120 to 14.2, 12 zeros",
        "Run this operation in FP32: precision='fp16,op.exp=fp32'.",
        "Passed on by blocks.1.attention: Tensor.sum",
        "Found by repeating the step: 210 ms, 8.4 MB of memory.",
        "(outside the model) train.py:91: penalty", "Found during the step",
        "Where the loss scale was too high: 1 place",
        "Every op ran as planned.", "5 updates were skipped.", "30 watched steps, update 0 to 232; 70 tensors.",
    ):  # fmt: skip
        assert words in found.text, words
    first = page.read_bytes()
    assert build_run(str(watched)).read_bytes() == first
    assert len(first) < 300_000
    assert sorted(path.name for path in watched.iterdir()) == ["report.html", "runs"]


@pytest.mark.parametrize(("losses", "optimizers", "said"), [(40, 2, True), (20, 2, False), (40, 1, False)])
def test_a_curve_that_mixes_the_losses_of_two_optimizers_says_so(
    tmp_path: Path, losses: int, optimizers: int, said: bool
) -> None:
    records: list[Record] = [LossRecord(n, 1.0 + n, 0.1 * n) for n in range(losses)]
    records += [UpdateRecord(n, n % optimizers, True, False, 1.0, 0.1 * n) for n in range(20 * optimizers)]
    made(tmp_path / "r", records)
    assert ("2 optimizers stepped: the curve holds the losses of all" in outline(tmp_path / "r").text) is said


def test_a_users_own_loop_has_neither_start_nor_end(tmp_path: Path) -> None:
    """`MixedPrecision(records=RecordWriter(path))` writes losses, updates, ranges and overflows alone."""
    kept = [
        one for one in run_records.records(steps=20) if one.kind in ("loss", "update", "ranges", "overflow")
    ]
    path = run_records.write(tmp_path / "loop.jsonl", kept)
    page = build_any(path)
    assert page == tmp_path / "loop.html"
    found = Outline(page.read_text(encoding="utf-8"))
    assert {"formats", "notes"}.isdisjoint(found.values("id"))  # no section is empty
    text = found.text
    assert "A training run loop" in text
    assert "cut short" not in text
    assert not read_run(path).failed


def test_hostile_records_are_shown_and_do_nothing(tmp_path: Path) -> None:
    made(tmp_path / "r", run_records.hostile())
    found = is_sound(build_run(tmp_path / "r").read_text(encoding="utf-8"))
    # Script, policy, cpu, reason, module, op, direction, cause, line, facts, propagator, note, remedy, tensors ...
    assert found.text.count(comparisons.HOSTILE_SHOWN) >= 20


def test_a_comparisons_page_gains_the_same_sections(tmp_path: Path) -> None:
    plain = comparisons.healthy(tmp_path / "plain", steps=40, seeds=1)
    before = Outline(build(plain).read_text(encoding="utf-8"))
    run_records.write(plain / "runs" / "fp16-0.jsonl", run_records.records(steps=100))
    after = Outline(build_any(plain).read_text(encoding="utf-8"))
    assert not {"findings", "ranges"} & set(before.values("id"))
    assert {"findings", "ranges"} <= set(after.values("id"))
    assert "update ratio" not in before.text
    for words in ("Mixed precision against FP32", "update ratio", "2 times: 90, 91 fp16-0"):
        assert words in after.text


STRANGE = {
    "empty": b"",
    "garbage": bytes(range(256)) * 40,
    "foreign": b'{"step": 1, "loss": 0.5}\n{"kind": "other"}\n[1]\n',
    "cut off": b'{"kind": "loss", "index": 0, "lo',
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_file_without_any_record_is_refused_and_no_page_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(STRANGE[name])
    for place in (path, tmp_path):
        with pytest.raises(UsageError, match="contains no run records"):
            build_any(place)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_a_page_shows_what_comes_before_a_corrupt_line(tmp_path: Path) -> None:
    path = made(tmp_path / "r", run_records.records(steps=20, modules=["a"]))
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([*lines[:10], "?\n", *lines[11:]]), encoding="utf-8")
    run = read_run(path)
    assert run.failed
    assert run.records == 10
    text = outline(tmp_path / "r").text
    assert "run.jsonl:11: not a run record" in text
    assert text.count("this line and those after it were not read") == 1


def test_a_run_that_was_left_alone_is_not_headed_by_a_policy(tmp_path: Path) -> None:
    records = run_records.records(steps=5, findings=False)
    records[-1] = RunEnded(0, 1.0, ["left alone: it uses torch.autocast itself", "another"])
    made(tmp_path / "r", records)
    page = build_run(tmp_path / "r").read_text(encoding="utf-8")
    for words in (
        "<h3>left alone</h3>",
        "The script ran in its own precision, not in fp16: it uses torch.autocast itself.",
        "<title>train.py: left alone</title>",
        "<h4>Loss: left alone</h4>",
    ):
        assert words in page
    assert "fp16 ·" not in Outline(page).text
    records[-1] = RunEnded(0, 1.0, ["not left alone, though it uses torch.autocast"])
    made(tmp_path / "s", records)
    assert "<h3>fp16</h3>" in build_run(tmp_path / "s").read_text(encoding="utf-8")


def test_the_page_of_a_file_has_the_records_of_the_other_ranks(tmp_path: Path) -> None:
    for name in ("run", "run-rank1", "runner"):
        run_records.write(tmp_path / f"{name}.jsonl", run_records.records())
    page = build_run(tmp_path / "run.jsonl").read_text(encoding="utf-8")
    assert ("run-rank1" in page, "runner" in page) == (True, False)
