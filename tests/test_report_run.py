"""The page of a run without a verdict: what it did, why steps failed, and nothing that was not recorded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import comparisons
import run_records
from mezzo.core.errors import UsageError
from mezzo.core.overflow import OverflowReport, TensorFacts
from mezzo.core.records import LossRecord, OverflowRecord, Record, RunEnded, RunStarted, UpdateRecord
from mezzo.report import build, build_any, build_run
from mezzo.report.figures import STROKES, loss_scale
from mezzo.report.run import read_run
from run_records import skip
from test_report import Outline, drawn, is_sound


def made(place: Path, records: list[Record] | None = None) -> Path:
    return run_records.write(
        place / "runs" / "run.jsonl", run_records.records() if records is None else records
    )


def outline(place: Path) -> Outline:
    return Outline(build_run(place).read_text(encoding="utf-8"))


def scale_chart(path: Path) -> str:
    return drawn("chart", loss_scale([read_run(path)], "s1", "fp16"))


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


def test_marks_tell_probing_from_alarms(watched: Path) -> None:
    figure = scale_chart(watched / "runs" / "run.jsonl")
    assert figure.count('class="tick probe"') == 2 + 1  # two updates, and the legend
    assert figure.count('class="tick alarm"') == 3
    assert figure.count('class="cross alarm"') == 3 + 1
    assert "update 90 skipped: forward of exp in blocks.1.attention (model.py:48" in figure
    assert "update 1 skipped: the loss scale was too large for this step (" in figure


def test_of_many_skips_the_alarm_is_drawn(tmp_path: Path) -> None:
    """Each bucket shows one update: the alarm, though it is not the first."""
    records: list[Record] = [RunStarted("a.py", [], "fp16", 0, False, {}, "2026-11-21T04:00:00")]
    for index in range(4000):
        records += skip(index, run_records.EXP if index == 2013 else None)
    figure = scale_chart(made(tmp_path, records))
    assert figure.count("<line") < STROKES + 40
    assert figure.count('class="tick alarm"') == 1
    assert "update 2,013 skipped: forward of exp" in figure


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


def test_a_run_that_was_killed_says_so(tmp_path: Path) -> None:
    path = made(tmp_path / "r", run_records.records(steps=20)[:-1])
    with path.open("a") as file:
        file.write('{"kind": "ranges", "upda')
    assert "the run was cut short: its records have no end" in outline(tmp_path / "r").text
    with path.open("a") as file:
        file.write("\n")
    assert "not a run record" in outline(tmp_path / "r").text


def test_several_files_are_several_runs(tmp_path: Path) -> None:
    for name in ("rank0", "rank1"):
        run_records.write(tmp_path / "r" / f"{name}.jsonl", run_records.records(steps=30))
    found = is_sound(build_run(tmp_path / "r").read_text(encoding="utf-8"))
    assert all(
        words in found.text for words in ("Training runs", "Loss: rank0", "Loss: rank1", "rank0: fp16")
    )


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


def test_any_finding_makes_a_row(tmp_path: Path) -> None:
    """The least a finding can hold, one without a line, and a cause that only a newer version knows."""
    facts = [
        TensorFacts("x", [], "fp16", 0.0, 0.0, 0, 0, 4),
        TensorFacts("y", [0], "fp16", 0.0, 0.0, 0, 0, 0),
    ]
    least = OverflowReport("unknown")
    found = [least, OverflowReport("state", module="bn"), OverflowReport("of tomorrow", "m", "op")]
    found.append(replace(least, inputs=facts, note="its inputs were changed in place"))
    made(tmp_path / "r", [one for i, each in enumerate(found) for one in skip(i, each)])
    page = build_run(tmp_path / "r").read_text(encoding="utf-8")
    for words in ("its inputs were changed in place", "of tomorrow", "bn"):
        assert words in page


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


def test_a_file_without_records_is_named_on_the_page_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    run_records.write(tmp_path / "b.jsonl", run_records.records(steps=5))
    assert "a.jsonl:1: not a run record" in outline(tmp_path).text


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


def test_text_in_backquotes_is_code(tmp_path: Path) -> None:
    one = replace(run_records.EXP, remedies=["bf16: `fp16,op.<b>=fp32`", "one ` alone", "`a` and `b`"])
    made(tmp_path / "r", skip(0, one))
    page = build_run(tmp_path / "r").read_text(encoding="utf-8")
    assert "<li>bf16: <code>fp16,op.&lt;b&gt;=fp32</code></li>" in page
    assert "<li>one ` alone</li><li><code>a</code> and <code>b</code></li>" in page


def test_the_caption_of_the_scale_is_short_and_in_order_of_step(tmp_path: Path) -> None:
    """A reason of `MixedPrecision` is three sentences, with the scale and the finding in them."""
    first = "a gradient was NaN or infinite at loss scale {}; parameters and optimizer are as before. input 0"
    reasons = {0: first.format(65536), 4: first.format(32768), 7: "Amp said so " + "very " * 40, 8: "third"}
    records: list[Record] = [
        UpdateRecord(index, 0, index not in reasons, index in reasons, 2.0**16, 0.0, reasons.get(index, ""))
        for index in range(10)
    ]
    figure = scale_chart(made(tmp_path, records))
    start = "4 of 10 updates skipped, at 0, 4, 7, 8 (a gradient was NaN or infinite; Amp said so very"
    assert re.search(rf'<p class="note">{re.escape(start)}.*ve…, …\); the last scale is 2¹⁶[.]</p>', figure)
    assert figure.count('y1="0" y2="100%" class="tick') == 4


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


# The policy, the scale of each update (all but the last are skipped), and what is said.
TOO_HIGH = {
    "constant": ("fp16,loss_scale=1048576", [2.0**20] * 3, "the constant loss scale 2²⁰ is too large for this step"),
    "dynamic": ("fp16", [4.0, 2.0, 1.0], "the loss scale was too large for this step ("),
    "a loop's": (None, [4.0, 2.0, 1.0], "the loss scale was too large for this step ("),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_HIGH)
def test_why_a_scale_is_too_high_depends_on_its_kind(name: str, tmp_path: Path) -> None:
    policy, scales, told = TOO_HIGH[name]
    records: list[Record] = []
    if policy is not None:
        records.append(RunStarted("a.py", [], policy, 0, False, {}, "2026-11-21T04:00:00"))
    one = replace(run_records.SCALE, remedies=["nothing, if the loss scale is dynamic"])
    for index, scale in enumerate(scales[:-1]):
        records += [LossRecord(index, 1.0, 0.0), *skip(index, one, scale)]
    records.append(UpdateRecord(len(scales) - 1, 0, True, False, scales[-1], 0.0))
    path = made(tmp_path / "r", records)
    text = outline(tmp_path / "r").text
    assert f" 2 skipped updates: {told}" in text
    assert ("No alarm." in text) is ("was too large" in told)  # a scale that stays too large is a fault
    assert text.count(told) >= 2  # and in the row
    assert f"update 1 skipped: {told}" in scale_chart(path)
    # A remedy for the other kind of scale is none.
    assert ("nothing, if the loss scale is dynamic" in text) is (name != "constant")
    assert ("fits): fp16,loss_scale=65536" in text) is (name == "constant")


def test_one_place_is_a_row_with_its_own_reason_though_its_numbers_differ(tmp_path: Path) -> None:
    records: list[Record] = []
    for index in range(6):
        facts = TensorFacts("input 0", [4], "fp32", 1e6 + index * 1e5, 1.0, 0, 0, 0)
        out = TensorFacts("output", [4], "fp16", 0.0, 0.0, 0, 4, 0)
        records += skip(index, OverflowReport("overflow", "head", "linear", inputs=[facts], outputs=[out]))
    made(tmp_path / "r", records)
    text = outline(tmp_path / "r").text
    assert "6 skipped updates to fix, of 1 kind." in text
    assert "Cause overflow an input of 1e+06 does not fit fp16" in text


def test_the_updates_of_two_optimizers_are_two_lines(tmp_path: Path) -> None:
    records: list[Record] = [
        UpdateRecord(n, n % 2, n != 5, n == 5, 2.0 ** (4 + n % 2), 0.0, "inf" * (n == 5)) for n in range(20)
    ]
    records.append(OverflowRecord(5, 1, 0.0, 32.0, run_records.EXP))
    figure = scale_chart(made(tmp_path, records))
    assert figure.count('class="thin s1"') == 2
    assert "optimizer 0: none of 10 updates skipped." in figure
    assert "optimizer 1: 1 of 10 updates skipped, at 5" in figure
    assert "optimizer 1, update 5 skipped: forward of exp in blocks.1.attention" in figure


def test_the_loss_scale_is_a_staircase_of_exponents(tmp_path: Path) -> None:
    records = [*skip(0, scale=4.0), UpdateRecord(1, 0, True, False, 2.0, 0.0)]
    figure = scale_chart(made(tmp_path, records))
    assert (
        'd="M19 333L981 333L981 667L981 667" class="line s1"' in figure
    )  # 2^2, then 2^1, on an axis of 2^0 to 2^3
    assert re.findall(r">(2[⁰¹²³]+)<", figure) == ["2⁰", "2¹", "2²", "2³"]
