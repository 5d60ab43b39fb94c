"""The page of a run without a verdict: what it did, why steps failed, and nothing that was not recorded."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import comparisons
import run_records
from mezzo.core.errors import UsageError
from mezzo.core.overflow import OverflowReport, TensorFacts
from mezzo.core.records import LossRecord, OverflowRecord, Record, RunEnded, RunStarted, UpdateRecord
from mezzo.report import build, build_any, build_run
from mezzo.report.figures import STROKES, loss_scale
from mezzo.report.run import Run, read_run
from test_report import Outline, drawn


def made(place: Path, records: list[Record] | None = None) -> Path:
    return run_records.write(
        place / "runs" / "run.jsonl", run_records.records() if records is None else records
    )


def outline(place: Path) -> Outline:
    return Outline(build_run(place).read_text(encoding="utf-8"))


def test_a_watched_run_shows_what_a_reader_asks(tmp_path: Path) -> None:
    made(tmp_path / "r")
    found = outline(tmp_path / "r")
    for words in (
        "A training run train.py fp16 · AMD EPYC 9R14",
        "Updates 240", "Skipped 5 3 alarms, 2 by a scale too high", "Loss scale 2¹¹ 2¹¹ to 2¹⁶", "255 MB",
        "Watched 30 70 tensors in each step",
        "fp16: the loss is infinite at step 90, the first of 2 steps without a finite one.",
        "5 of 240 updates skipped, at 1, 3, 90, 91, 170 (inf in the gradients); of 5 looked into, 3 alarms",
        "3 skipped updates to look into, of 2 kinds.",
        "2 times: 90, 91 blocks.1.attention model.py:48: weights = torch.exp(scores) exp forward overflow",
        "input 0 fp16 32×4×64×64: 0.000120 to 14.2, 12 zeros",
        "Run this operation in FP32: precision='fp16,op.exp=fp32'.",
        "Passed on by blocks.1.attention: Tensor.sum",
        "Found by running the step's calls again: 210 ms, 8.40 MB kept for it.",
        "(outside the model) train.py:91: penalty", "Seen as it happened",
        "Where the loss scale was too high: 1 place",
        "Every op ran as planned.", "5 updates were skipped.", "30 watched steps, update 0 to 232; 70 tensors.",
    ):  # fmt: skip
        assert words in found.text, words
    assert not found.open
    ids = found.values("id")
    assert len(ids) == len(set(ids))
    for link in found.values("href"):
        assert link == "data:," or link.removeprefix("#") in ids


@pytest.mark.parametrize(
    ("losses", "optimizers", "said"),
    [(40, 2, True), (20, 2, False), (40, 1, False)],
    ids=["gan", "shared", "one"],
)
def test_a_curve_that_mixes_the_losses_of_two_optimizers_says_so(
    tmp_path: Path, losses: int, optimizers: int, said: bool
) -> None:
    records: list[Record] = [LossRecord(n, 1.0 + n, 0.1 * n) for n in range(losses)]
    records += [
        UpdateRecord(n, n % optimizers, True, False, 1.0, 0.1 * n, "", False) for n in range(20 * optimizers)
    ]
    made(tmp_path / "r", records)
    words = "2 optimizers stepped: the curve holds every loss that gradients were taken of"
    assert (words in outline(tmp_path / "r").text) is said


def test_marks_tell_probing_from_alarms(tmp_path: Path) -> None:
    figure = drawn("chart", loss_scale([read_run(made(tmp_path))], "s1", "fp16"))
    assert figure.count('class="tick probe"') == 2 + 1  # two updates, and the legend
    assert figure.count('class="tick alarm"') == 3
    assert figure.count('class="cross alarm"') == 3 + 1
    assert "update 90 skipped: forward of exp in blocks.1.attention (model.py:48" in figure
    assert "Updates 90, 91: forward of exp in blocks.1.attention" in figure
    assert "Update 170: backward of SqrtBackward0 outside the model" in figure
    assert "Update 1:" not in figure
    assert "update 1 skipped: the loss scale was finding its height (gradients overflow at this one" in figure


def test_of_many_skips_the_alarm_is_drawn(tmp_path: Path) -> None:
    """Each bucket shows one update: the alarm, though it is not the first."""
    records: list[Record] = [RunStarted("a.py", [], "fp16", 0, False, {}, "2026-11-21T04:00:00")]
    for index in range(4000):
        records.append(UpdateRecord(index, 0, False, True, 2.0, 0.0, "inf"))
        if index == 2013:
            records.append(OverflowRecord(index, 0, 0.0, 2.0, run_records.EXP))
    figure = drawn("chart", loss_scale([read_run(made(tmp_path, records))], "s1", "fp16"))
    assert figure.count("<line") < STROKES + 40
    assert figure.count('class="tick alarm"') == 1
    assert "update 2,013 skipped: forward of exp" in figure


def test_a_run_that_nobody_watched_has_no_empty_section(tmp_path: Path) -> None:
    made(
        tmp_path / "r",
        [one for one in run_records.records(format="bf16") if one.kind not in ("ranges", "ops")],
    )
    found = outline(tmp_path / "r")
    assert {"findings", "ranges", "formats", "notes", "scale"}.isdisjoint(found.values("id"))
    assert {"run", "loss", "machine", "reading"} <= set(found.values("id"))


def test_a_loop_of_ones_own_has_neither_start_nor_end(tmp_path: Path) -> None:
    """`MixedPrecision(records=RecordWriter(path))` writes losses, updates, ranges and overflows alone."""
    kept = [one for one in run_records.records() if one.kind in ("loss", "update", "overflow", "ranges")]
    path = run_records.write(tmp_path / "loop.jsonl", kept)
    page = build_any(path)
    assert page == tmp_path / "loop.html"
    found = Outline(page.read_text(encoding="utf-8"))
    assert "A training run loop" in found.text
    assert "cut short" not in found.text
    assert not read_run(path).failed


def test_a_run_that_was_killed_says_so(tmp_path: Path) -> None:
    path = made(tmp_path / "r", run_records.records()[:-1])
    with path.open("a") as file:
        file.write('{"kind": "ranges", "upda')
    assert "the run was cut short: its records have no end" in outline(tmp_path / "r").text
    with path.open("a") as file:
        file.write("\n")
    assert "not a run record" in outline(tmp_path / "r").text


def test_several_files_are_several_runs(tmp_path: Path) -> None:
    for name in ("rank0", "rank1"):
        run_records.write(tmp_path / "r" / f"{name}.jsonl", run_records.records(steps=30))
    found = outline(tmp_path / "r")
    assert "Training runs" in found.text
    assert "Loss: rank0" in found.text
    assert "Loss: rank1" in found.text
    assert "rank0: fp16" in found.text  # its card
    assert "rank1: fp16" in found.text
    ids = found.values("id")
    assert len(ids) == len(set(ids))


def test_hostile_records_are_shown_and_do_nothing(tmp_path: Path) -> None:
    made(tmp_path / "r", run_records.hostile())
    found = outline(tmp_path / "r")
    tags = [tag for tag, _ in found.tags]
    assert "img" not in tags
    assert tags.count("script") == 1
    shown = " ".join(
        comparisons.HOSTILE.replace("\x00", "\\x00")
        .replace("\x1b", "\\x1b")
        .replace("\u202e", "\\u202e")
        .split()
    ).replace("\udcff", "\\udcff")
    # Script, policy, cpu, reason, module, op, direction, cause, line, facts, propagator, note, remedy, tensors ...
    assert found.text.count(shown) >= 20
    for name in ("data-exponents", "data-heat", "data-readout"):
        for value in found.values(name):
            json.loads(value)
    assert not [
        key for _, attributes in found.tags for key in attributes if key.startswith("on") or key == "style"
    ]


def test_the_page_asks_for_nothing_and_is_the_same_each_time(tmp_path: Path) -> None:
    made(tmp_path / "r")
    first = build_run(tmp_path / "r").read_bytes()
    assert build_run(str(tmp_path / "r")).read_bytes() == first
    assert not re.search(r"https?:|//\w|url\(|@import", first.decode())
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["report.html", "runs"]


@pytest.mark.parametrize("name", ["empty folder", "no folder"])
def test_a_place_without_records_is_refused(name: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if name == "empty folder":
        place.mkdir()
    with pytest.raises(UsageError, match=r"no run records[.] A report is made from a folder with"):
        build_run(place)


def test_a_comparisons_page_gains_the_same_sections(tmp_path: Path) -> None:
    plain = comparisons.healthy(tmp_path / "plain", steps=40, seeds=1)
    before = Outline(build(plain).read_text(encoding="utf-8"))
    run_records.write(plain / "runs" / "fp16-0.jsonl", run_records.records(steps=100))
    after = Outline(build(plain).read_text(encoding="utf-8"))
    assert not {"findings", "ranges"} & set(before.values("id"))
    assert {"findings", "ranges"} <= set(after.values("id"))
    assert "update ratio" not in before.text
    assert "update ratio" in after.text
    assert "2 times: 90, 91 fp16-0" in after.text
    assert build_any(plain) == plain / "report.html"
    assert "Mixed precision against FP32" in build_any(plain).read_text(encoding="utf-8")


def test_any_finding_makes_a_row(tmp_path: Path) -> None:
    """The least a finding can hold, one without a line, and a cause that only a newer version knows."""
    least = [
        OverflowReport("unknown"),
        OverflowReport("state", module="bn"),
        OverflowReport("of tomorrow", "m", "op"),
    ]
    facts = [
        TensorFacts("x", [], "fp16", 0.0, 0.0, 0, 0, 4),
        TensorFacts("y", [0], "fp16", 0.0, 0.0, 0, 0, 0),
    ]
    records: list[Record] = [LossRecord(0, 1.0, 0.0)]
    for index, one in enumerate(
        [*least, replace(least[0], inputs=facts, note="its inputs were changed in place")]
    ):
        records += [
            UpdateRecord(index, 0, False, True, 8.0, 0.0, "inf"),
            OverflowRecord(index, 0, 0.0, 8.0, one),
        ]
    made(tmp_path / "r", records)
    text = outline(tmp_path / "r").text
    assert "its inputs were changed in place" in text  # for another reason than the first: a row of its own
    assert "op in m: of tomorrow" in build_run(tmp_path / "r").read_text(encoding="utf-8")
    assert "bn" in text


STRANGE = {
    "empty": b"",
    "a script": b"import torch\nprint(torch.ones(1))\n",
    "garbage": bytes(range(256)) * 40,
    "foreign": b'{"step": 1, "loss": 0.5}\n{"kind": "other"}\n[1]\n',
    "cut off": b'{"kind": "loss", "index": 0, "lo',
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_file_without_any_record_is_refused_and_no_page_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / ("ok.py" if name == "a script" else "a.jsonl")
    path.write_bytes(STRANGE[name])
    for place in (path, tmp_path) if path.suffix == ".jsonl" else (path,):
        with pytest.raises(
            UsageError, match=f"{path.name}: holds no run record. Name the folder or the .jsonl file"
        ):
            build_any(place)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_one_of_several_files_with_records_makes_a_page(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=r"none of its 2 [.]jsonl files holds a run record"):
        build_any(tmp_path)
    run_records.write(tmp_path / "b.jsonl", run_records.records(steps=5))
    assert "1 line of its records was not read: a.jsonl:1: not a run record" in outline(tmp_path).text


def test_an_empty_name_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_records.write(tmp_path / "a.jsonl", run_records.records(steps=5))
    monkeypatch.chdir(tmp_path)
    for make in (build, build_run, build_any):
        with pytest.raises(UsageError, match="no folder or file is named"):
            make("")
    assert build_any(".") == Path("report.html")


def test_lines_after_a_corrupt_one_are_read_and_the_corrupt_counted(tmp_path: Path) -> None:
    path = made(tmp_path / "r")
    whole = read_run(path)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for place in (100, 300, 301):  # losses or updates; no end, no start
        assert '"kind": "loss"' in lines[place] or '"kind": "update"' in lines[place]
        lines[place] = lines[place][:20] + "\n"
    path.write_text("".join(lines), encoding="utf-8")
    run = read_run(path)
    assert (run.records, run.unread) == (whole.records - 3, 3)
    assert run.recorded_losses + len(run.updates) == len(whole.losses) + len(whole.updates) - 3
    assert run.overflows == whole.overflows
    assert run.ended == whole.ended
    assert run.failed
    text = outline(tmp_path / "r").text
    assert "3 lines of its records were not read, the first: run.jsonl:101: not a run record" in text
    assert "a loss or an update among them is missing from the curves" in text
    assert "ended well" in text  # the fault is said once in the card
    assert text.count("were not read") == 1


def test_a_comparison_reads_nothing_after_a_corrupt_line_and_says_how_much_that_is(tmp_path: Path) -> None:
    """Its runs are laid over one another by step: behind a lost loss each would be compared with its neighbour."""
    plain = comparisons.healthy(tmp_path / "plain", steps=40, seeds=1)
    path = next((plain / "runs").glob("fp16-0.jsonl"))
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    lines[30] = "?\n"
    path.write_text("".join(lines), encoding="utf-8")
    text = Outline(build(plain).read_text(encoding="utf-8")).text
    assert "fp16-0.jsonl:31: not a run record: '?" in text
    assert f"; {len(lines) - 30} lines from there on were not read" in text


def test_what_is_in_backquotes_is_code(tmp_path: Path) -> None:
    one = replace(run_records.EXP, remedies=["bf16: `fp16,op.<b>=fp32`", "one ` alone", "`a` and `b`"])
    records: list[Record] = [
        UpdateRecord(0, 0, False, True, 8.0, 0.0, "inf"),
        OverflowRecord(0, 0, 0.0, 8.0, one),
    ]
    made(
        tmp_path / "r",
        [*run_records.records(steps=3)[:-1], *records, RunEnded(0, 1.0, ["say `mezzo doctor`"])],
    )
    page = build_run(tmp_path / "r").read_text(encoding="utf-8")
    assert "<li>bf16: <code>fp16,op.&lt;b&gt;=fp32</code></li>" in page
    assert "<li>one ` alone</li><li><code>a</code> and <code>b</code></li>" in page
    assert "<li>say <code>mezzo doctor</code>" in page
    assert "before <code>MixedPrecision</code> or Keras clips it" in page


def test_the_caption_of_the_scale_is_short_and_in_order_of_step(tmp_path: Path) -> None:
    """A reason of `MixedPrecision` is three sentences, with the scale and the finding in them."""
    reasons = {
        0: "a gradient was NaN or infinite at loss scale 65536; parameters and optimizer are as before. input 0: NaN",
        4: "a gradient was NaN or infinite at loss scale 32768; parameters and optimizer are as before. forward of exp",
        7: "Amp said so " + "very " * 40,
        8: "third",
    }
    records: list[Record] = [
        UpdateRecord(index, 0, index not in reasons, index in reasons, 2.0**16, 0.0, reasons.get(index, ""))
        for index in range(10)
    ]
    figure = drawn("chart", loss_scale([read_run(made(tmp_path, records))], "s1", "fp16"))
    found = re.search(r'<p class="note">(4 of 10 .*?)</p>', figure)
    assert found
    told = found[1]
    assert told.startswith(
        "4 of 10 updates skipped, at 0, 4, 7, 8 (a gradient was NaN or infinite; Amp said so very"
    )
    assert told.endswith("ve…, …); the last scale is 2¹⁶.")
    assert len(told) < 200
    ticks = [
        float(x)
        for x in re.findall(r'<line x1="([\d.]+)%" x2="[\d.]+%" y1="0" y2="100%" class="tick', figure)
    ]
    assert len(ticks) == 4
    assert ticks == sorted(ticks)
    assert ticks[0] > 1  # beside the axis, not under it


def test_a_run_that_was_left_alone_is_not_headed_by_a_policy_that_ruled_nothing(tmp_path: Path) -> None:
    records = run_records.records(steps=5, findings=False)
    records[-1] = RunEnded(0, 1.0, ["left alone: it uses torch.autocast itself", "another"])
    made(tmp_path / "r", records)
    page = build_run(tmp_path / "r").read_text(encoding="utf-8")
    assert "<h3>left alone</h3>" in page
    assert "The script was left to its own precision in place of fp16: it uses torch.autocast itself." in page
    assert "<title>train.py: left alone</title>" in page
    assert "<h4>Loss: left alone</h4>" in page
    assert "fp16 ·" not in Outline(page).text
    records[-1] = RunEnded(
        0, 1.0, ["not left alone, though it uses torch.autocast: inside that its own choice rules"]
    )
    made(tmp_path / "s", records)
    assert "<h3>fp16</h3>" in build_run(tmp_path / "s").read_text(encoding="utf-8")


def of_scale(policy: str | None, scales: list[float]) -> list[Record]:
    """A run all of whose updates but the last were skipped because the loss scale was too large."""
    made: list[Record] = []
    if policy is not None:
        made.append(RunStarted("a.py", [], policy, 0, False, {}, "2026-11-21T04:00:00"))
    one = replace(run_records.SCALE, remedies=["nothing, if the loss scale is dynamic"])
    for index, scale in enumerate(scales):
        last = index == len(scales) - 1
        made += [
            LossRecord(index, 1.0, 0.0),
            UpdateRecord(index, 0, last, not last, scale, 0.0, "" if last else "inf"),
        ]
        if not last:
            made.append(OverflowRecord(index, 0, 0.0, scale, one))
    return made


TOO_HIGH = {
    "constant": ("fp16,loss_scale=1048576", [2.0**20] * 3, "the constant loss scale 2²⁰ is too large for this step"),
    "dynamic": ("fp16", [4.0, 2.0, 1.0], "the loss scale was finding its height (gradients overflow at this one"),
    "a loop's, that never moved": (None, [8.0] * 3, "the loss scale, 2³ in all of this run, is too large for this"),
    "a loop's, that moved": (None, [4.0, 2.0, 1.0], "the loss scale was finding its height ("),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_HIGH)
def test_what_is_said_of_a_scale_too_high_is_true_of_the_runs_own(name: str, tmp_path: Path) -> None:
    policy, scales, told = TOO_HIGH[name]
    path = made(tmp_path / "r", of_scale(policy, scales))
    text = outline(tmp_path / "r").text
    assert f" 2 skipped updates: {told}" in text
    mended_by_itself = "finding its height" in told
    assert ("No alarm." in text) is mended_by_itself  # a scale that stays too large is no good news
    assert text.count(told) >= 2  # and in the row
    figure = drawn("chart", loss_scale([read_run(path)], "s1", "fp16"))
    assert f"update 1 skipped: {told}" in figure
    others = {one[2] for one in TOO_HIGH.values() if one[2] not in told and told not in one[2]}
    assert not [one for one in others if one in text]
    # A remedy for the other kind of scale is none.
    assert ("nothing, if the loss scale is dynamic" in text) is (name != "constant")
    assert ("a smaller constant, fp16,loss_scale=65536" in text) is (name == "constant")


def test_the_row_says_what_was_found_and_not_what_the_word_means(tmp_path: Path) -> None:
    facts = TensorFacts("input 0", [4], "fp32", 1e6, 1.0, 0, 0, 0)
    out = TensorFacts("output", [4], "fp16", 0.0, 0.0, 0, 4, 0)
    one = OverflowReport("overflow", "head", "linear", inputs=[facts], outputs=[out])
    log = OverflowReport("invalid", "head", "log", inputs=[facts])
    records: list[Record] = []
    for index, each in enumerate((one, log)):
        records += [
            UpdateRecord(index, 0, False, True, 8.0, 0.0, "inf"),
            OverflowRecord(index, 0, 0.0, 8.0, each),
        ]
    made(tmp_path / "r", records)
    text = outline(tmp_path / "r").text
    table = text[text.index("What to try") :]
    assert one.why in table
    assert "1e+06 does not fit fp16" in table
    assert "a logarithm has one only above 0" in table


def test_one_place_is_told_once_though_its_numbers_are_others_each_time(tmp_path: Path) -> None:
    out = TensorFacts("output", [4], "fp16", 0.0, 0.0, 0, 4, 0)
    records: list[Record] = []
    for index in range(6):
        facts = TensorFacts("input 0", [4], "fp32", 1e6 + index * 1e5, 1.0, 0, 0, 0)
        records += [
            UpdateRecord(index, 0, False, True, 8.0, 0.0, "inf"),
            OverflowRecord(
                index,
                0,
                0.0,
                8.0,
                OverflowReport("overflow", "head", "linear", inputs=[facts], outputs=[out]),
            ),
        ]
    figure = drawn("chart", loss_scale([read_run(made(tmp_path / "r", records))], "s1", "fp16"))
    assert "Updates 0, 1, 2, 3, 4, 5: forward of linear in head: an input of 1e+06 does not fit" in figure
    assert "more culprits" not in figure
    text = outline(tmp_path / "r").text
    assert "6 skipped updates to look into, of 1 kind." in text
    assert "Skipped 6 6 alarms Last" in text  # and nothing of a scale, which was not too high once


def cut(path: Path, *kinds_and_numbers: tuple[str, int]) -> None:
    """Damage the lines of these records."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    places = {
        kind: [place for place, line in enumerate(lines) if line.startswith(f'{{"kind": "{kind}"')]
        for kind, _ in kinds_and_numbers
    }
    for kind, number in kinds_and_numbers:
        lines[places[kind][number]] = "?" + lines[places[kind][number]][20:]
    path.write_text("".join(lines), encoding="utf-8")


def test_behind_a_loss_that_was_not_read_the_others_stand_at_their_own_step(tmp_path: Path) -> None:
    path = made(tmp_path / "r", run_records.records(steps=100, findings=False))
    whole = read_run(path)
    cut(path, ("loss", 10), ("loss", 11), ("loss", 40))
    run = read_run(path)
    assert run.lost == {10, 11, 40}
    assert len(run.losses) == 100
    assert run.recorded_losses == 97
    kept = [place for place in range(100) if place not in run.lost]
    assert run.losses[kept].tolist() == whole.losses[kept].tolist()
    text = outline(tmp_path / "r").text
    assert "97 losses recorded" in text
    assert "the loss is NaN" not in text  # it was not read, which is another thing
    assert "what follows stands at its step" in text


def test_a_real_nan_behind_a_lost_loss_is_told_at_its_own_step(tmp_path: Path) -> None:
    records: list[Record] = [LossRecord(i, float("nan") if i == 7 else 1.0, 0.0) for i in range(9)]
    path = made(tmp_path / "r", records)
    cut(path, ("loss", 3))
    assert "the loss is NaN at step 7." in outline(tmp_path / "r").text


def test_behind_an_update_that_was_not_read_the_scale_stands_at_its_own_update(tmp_path: Path) -> None:
    path = made(tmp_path / "r", run_records.records(steps=200))
    cut(path, ("update", 20), ("update", 30))
    figure = drawn("chart", loss_scale([read_run(path)], "s1", "fp16"))
    assert "Updates 90, 91: forward of exp" in figure
    assert "Update 170: backward of SqrtBackward0" in figure
    assert "5 of 198 updates skipped, at 1, 3, 90, 91, 170" in figure


@pytest.mark.parametrize("indices", [[0, 0, 1, 1, 2, 2], [0, 10**12, 1, 2], [5, 6, 7], [-3, -2, -1]])
@pytest.mark.parametrize("damaged", [False, True])
def test_indices_that_no_single_loop_gives_leave_the_order_as_it_is(
    indices: list[int], damaged: bool, tmp_path: Path
) -> None:
    """Two loops that share a file, an index that is itself broken, a file whose head is gone."""
    records: list[Record] = []
    for index in indices:
        records += [
            LossRecord(index, float(len(records)), 0.0),
            UpdateRecord(index, 0, True, False, 2.0, 0.0),
        ]
    path = made(tmp_path / "r", records)
    if damaged:
        path.write_text("?\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    run = read_run(path)
    assert run.losses[~run_lost(run)].tolist() == [2.0 * n for n in range(len(indices))]
    assert len(run.losses) < 100
    outline(tmp_path / "r")


def run_lost(run: Run) -> np.ndarray:  # type: ignore[type-arg]
    return np.isin(np.arange(len(run.losses)), list(run.lost))
