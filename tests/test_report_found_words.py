"""What a run's page says of a failed update is what was found in that run, and nothing that a word means elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import run_records
from mezzo.core.finding import Finding, TensorFacts
from mezzo.core.records import LossRecord, OverflowRecord, Record, RunStarted, UpdateRecord
from mezzo.report.figures import loss_scale
from mezzo.report.run import read_run
from test_report import drawn
from test_report_run import made, outline


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
    one = Finding("overflow", "head", "linear", inputs=[facts], outputs=[out])
    log = Finding("invalid", "head", "log", inputs=[facts])
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
                index, 0, 0.0, 8.0, Finding("overflow", "head", "linear", inputs=[facts], outputs=[out])
            ),
        ]
    figure = drawn("chart", loss_scale([read_run(made(tmp_path / "r", records))], "s1", "fp16"))
    assert "Updates 0, 1, 2, 3, 4, 5: forward of linear in head: an input of 1e+06 does not fit" in figure
    assert "more culprits" not in figure
    text = outline(tmp_path / "r").text
    assert "6 skipped updates to look into, of 1 kind." in text
    assert "Skipped 6 6 alarms Last" in text  # and nothing of a scale, which was not too high once
