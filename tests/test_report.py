"""The report as a file: whole, self-contained, escaped, the same each time, from whatever a folder holds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

import comparisons
import run_records
from mezzo.core.errors import UsageError
from mezzo.core.records import LossRecord, Record, RunEnded, UpdateRecord
from mezzo.report import build, build_any, build_run
from mezzo.report.page import _environment
from mezzo.report.run import command_line, read, read_run

VOID = {"meta", "link", "input"}


class Outline(HTMLParser):
    """The page's elements, the text that a reader sees, and whether every element is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.shown: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in {tag}: {attrs}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.shown.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.shown).split())

    def values(self, name: str) -> list[str]:
        return [value or "" for _, given in self.tags for key, value in given.items() if key == name]


def is_sound(text: str) -> Outline:
    """Check that a page is whole, asks the network for nothing and runs one script."""
    assert text.startswith("<!doctype html>\n")
    assert not re.search(r"https?:|//\w|url\(|@import", text)
    found = Outline(text)
    assert not found.open
    assert found.values("src") == []
    ids = found.values("id")
    assert len(ids) == len(set(ids))
    assert all(link == "data:," or link.removeprefix("#") in ids for link in found.values("href"))
    assert not [key for _, given in found.tags for key in given if key.startswith("on") or key == "style"]
    tags = [tag for tag, _ in found.tags]
    assert tags.count("script") == 1
    assert "img" not in tags
    for name in ("data-exponents", "data-readout"):
        for value in found.values(name):
            json.loads(value)
    return found


def drawn(macro: str, *values: object, template: str = "charts.html") -> str:
    return str(getattr(_environment().get_template(template).module, macro)(*values))


def outline(folder: Path, build: Callable[[Path], Path] = build) -> Outline:
    return Outline(build(folder).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", comparisons.FOLDERS)
def test_every_folder_gives_a_sound_page_that_asks_for_nothing(name: str, tmp_path: Path) -> None:
    page = build(comparisons.FOLDERS[name](tmp_path / name))
    assert page == tmp_path / name / "report.html"
    text = page.read_text(encoding="utf-8")
    is_sound(text)
    assert not re.search(r'="[^"]*\b(nan|inf)\b|nan%', re.sub(r'data-readout="[^"]*"', "", text))


def test_a_healthy_folder_shows_what_a_reader_asks(tmp_path: Path) -> None:
    found = outline(comparisons.healthy(tmp_path / "run"))
    for words in (
        "bf16 proven equal equivalent Proven equal (3 runs). Next: use bf16: mezzo run --precision bf16 train.py",
        "fp16 no harm found consistent", "1.62×", "1.58 to 1.66", "0.61×",
        "251 MB against FP32's 412 MB, by tensor bytes",
        "FP32 1.00× bf16 1.62× 1.58 to 1.66", "FP32 412 MB bf16 251 MB 0.61× of FP32",
        "Loss gap (−0.72 %) −0.00030 margin ±0.0021 (0.50 %)", "Metric gap (higher is better) +0.050",
        "Pairs for 80 % power, loss 3 Pairs for 80 % power, metric 14",
        "of 900 updates", "Seed Loss gap Metric FP32's metric 0 −0.00030 98.300 98.200 1 ",
        "Difference: fp16 minus FP32 of the same seed", "averaged over 5 steps",
        "noise check: FP32 with weights moved by one ulp", "2 of 300 updates skipped, at 1, 3 (inf in the gradients)",
        "1 op did not run as planned.", "Every op ran as planned.", "not as planned", "AMD EPYC 9R14", "memory 16 GB",
        "mezzo compare --demo digits --precision bf16,fp16 --seeds 3 --out run --fresh -- --epochs 3",
        "2¹⁶",
    ):  # fmt: skip
        assert words in found.text, words
    charts = [given for tag, given in found.tags if tag == "svg" and given.get("role") == "img"]
    assert len(charts) == 2 * 2 + 1 + 3  # loss and difference, one loss scale, three gauges
    assert found.text.count("These figures as a table") == 4


def test_what_was_not_measured_is_said_and_leaves_no_empty_section(tmp_path: Path) -> None:
    found = outline(comparisons.one_seed(tmp_path / "run"))
    assert {"metric", "scale", "formats"}.isdisjoint(found.values("id"))
    for words in ("Peak memory – not measured", "one seed", "one pair"):
        assert words in found.text
    assert "smallest to largest seed" not in found.text
    bare = outline(comparisons.bare(tmp_path / "bare"))
    assert "bf16 no verdict No verdict was recorded." in bare.text
    assert "bf16 recorded no loss." in bare.text
    empty = comparisons.write(tmp_path / "empty", {"candidates": {}}, {})
    assert "No candidate was compared." in outline(empty).text


def test_failures_are_told_where_they_happened(tmp_path: Path) -> None:
    found = outline(comparisons.failed(tmp_path / "run"))
    for words in (
        "fp16, seed 0: the loss is infinite at step 75, the first of 45 steps without a finite one.",
        "fp16, seed 0: leaves the frame; its largest finite loss is",
        "60 of 120 updates skipped, at 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, … (inf in the",
        "exit status 1",
        "The last lines that bf16-0 printed Traceback (most recent call last): RuntimeError: no such kernel",
        "the run was cut short: its records have no end",
        "fp8 recorded no loss.",
        "Loss gap NaN",
    ):
        assert words in found.text, words


def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path) -> None:
    text = build(comparisons.hostile(tmp_path / "run")).read_text(encoding="utf-8")
    assert not re.search("[\x00\x1b\u202e\udcff]", text)
    # Reason twice, op name, rule, formats, module, why, note, script's name, machine, rerun ...
    assert is_sound(text).text.count(comparisons.HOSTILE_SHOWN) >= 15


def test_the_file_is_the_same_each_time_and_replaces_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = comparisons.one_step(tmp_path / "run")
    first = build(folder).read_bytes()
    (folder / "report.html").write_text("an older report")
    assert build(str(folder)).read_bytes() == first
    before = os.umask(0)
    os.umask(before)
    assert (folder / "report.html").stat().st_mode & 0o777 == 0o666 & ~before

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mezzo.report.os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        build(folder)
    assert (folder / "report.html").read_bytes() == first
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "runs", "verdict.json"]


@pytest.mark.parametrize("odd", [None, "a word", [], {}, True, "nan", [1], ["a", None], 1e400, -1])
def test_no_value_in_the_verdict_stops_the_report(odd: object, tmp_path: Path) -> None:
    keys = (*comparisons.candidate(), "pairs", "power", "interval", "notes", "loss", "metric")
    ones = {"bf16": dict.fromkeys(keys, odd), "fp16": odd}
    found = comparisons.verdict(ones) | {"machine": odd, "request": odd, "noise_floor": odd}
    run = comparisons.Written(comparisons.curve(5, 0))
    folder = comparisons.write(tmp_path / "run", found, {"fp32-0": run, "bf16-0": run})
    assert "bf16" in outline(folder).text


METRIC = "acc ([0-9.]+)"
COMMANDS: list[tuple[dict[str, Any], str]] = [
    ({"target": "t.py", "metric": METRIC, "argv": ["--x", "$(rm)"]},
     f"mezzo compare t.py --precision bf16 --metric '{METRIC}' --out run --fresh -- --x '$(rm)'"),
    ({"demo": "digits", "precisions": ["fp16"], "seeds": 5, "margin": 0.01},
     "mezzo compare --demo digits --precision fp16 --seeds 5 --margin 0.01 --out run --fresh"),
    ({}, "mezzo compare SCRIPT --precision bf16 --out run --fresh"),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "command"), COMMANDS)
def test_the_command_is_quoted_for_a_shell(request_: dict[str, Any], command: str, tmp_path: Path) -> None:
    folder = comparisons.one_step(tmp_path / "run")
    verdict = json.loads((folder / "verdict.json").read_text()) | {"request": request_}
    (folder / "verdict.json").write_text(json.dumps(verdict))
    assert command_line(read(folder)) == command
    assert escape(command) in build(folder).read_text(encoding="utf-8")


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2.2: 4.5 for text, 3 for a graphic."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_every_colour_can_be_read() -> None:
    css = files("mezzo.report").joinpath("style.css").read_text()
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", css)
    assert len(pairs) == css.count("--", 0, css.index("}")) > 20
    texts = [(text, ground) for text in ("ink", "muted", "link", "bad") for ground in ("bg", "panel")]
    texts += [(tone, f"{tone}-bg") for tone in ("good", "calm", "warn", "bad")] + [("ink", "bad-bg")]
    lines = ("s0", "s1", "s2", "s3", "s4", "s5", "s6", "margin", "skip", "noise")
    for theme in ({name: light for name, light, _ in pairs}, {name: dark for name, _, dark in pairs}):
        for text, ground in texts:
            assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)
        for line in lines:
            assert contrast(theme[line], theme["panel"]) >= 3.0, line


@pytest.mark.heavy
def test_a_run_of_40_000_steps_stays_a_small_page(tmp_path: Path) -> None:
    base = comparisons.curve(40_000, 0)
    spiked = comparisons.drift(base, 1, 0.05)
    spiked[33_333] = 9.0
    runs = {"fp32-0": comparisons.Written(base), "bf16-0": comparisons.Written(spiked)}
    page = build(comparisons.write(tmp_path / "run", {"candidates": {"bf16": comparisons.candidate()}}, runs))
    assert page.stat().st_size < 200_000
    text = page.read_text(encoding="utf-8")
    assert "averaged over 501 steps" in text
    raw = re.search(r'd="([^"]+)" class="raw s1"', text)
    assert raw
    # The spike of a single step touches the frame's upper end: thinning did not lose it.
    assert min(float(y) for y in re.findall(r"[ML][\d.-]+ ([\d.-]+)", raw[1])) < 60


# A verdict that cannot be read: its bytes, and a word of the error.
UNREADABLE = {
    "missing": (None, "no such file"),
    "candidates of a wrong type": (b'{"candidates": [1]}', 'it has no object "candidates"'),
    "another schema": (b'{"schema": 2, "candidates": {}}', "reads schema 1"),
    "deep": (b'{"a":' * 100_000, "recursion"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_verdict_that_cannot_be_read_is_refused(what: str, tmp_path: Path) -> None:
    text, says = UNREADABLE[what]
    if text is not None:
        (tmp_path / "verdict.json").write_bytes(text)
    with pytest.raises(UsageError, match=re.escape(says)) as told:
        build(tmp_path)
    assert str(tmp_path / "verdict.json") in str(told.value)
    assert not (tmp_path / "report.html").exists()


# The page of a run without a verdict.


def recorded(place: Path, records: list[Record]) -> Path:
    return run_records.write(place / "runs" / "run.jsonl", records)


def test_a_watched_run_shows_what_a_reader_asks(tmp_path: Path) -> None:
    watched = tmp_path / "r"
    recorded(watched, run_records.records())
    page = build_run(watched)
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
    recorded(tmp_path / "r", records)
    assert (
        "2 optimizers stepped: the curve holds the losses of all" in outline(tmp_path / "r", build_run).text
    ) is said


def test_a_users_own_loop_has_neither_start_nor_end(tmp_path: Path) -> None:
    """`MixedPrecision(records=RecordWriter(path))` writes losses, updates, ranges and overflows alone."""
    kinds = ("loss", "update", "ranges", "overflow")
    kept = [one for one in run_records.records(steps=20) if one.kind in kinds]
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
    recorded(tmp_path / "r", run_records.hostile())
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
    path = recorded(tmp_path / "r", run_records.records(steps=20, modules=["a"]))
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([*lines[:10], "?\n", *lines[11:]]), encoding="utf-8")
    run = read_run(path)
    assert run.failed
    assert run.records == 10
    text = outline(tmp_path / "r", build_run).text
    assert "run.jsonl:11: not a run record" in text
    assert text.count("this line and those after it were not read") == 1


def test_a_run_that_was_left_alone_is_not_headed_by_a_policy(tmp_path: Path) -> None:
    records = run_records.records(steps=5, findings=False)
    records[-1] = RunEnded(0, 1.0, ["left alone: it uses torch.autocast itself", "another"])
    recorded(tmp_path / "r", records)
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
    recorded(tmp_path / "s", records)
    assert "<h3>fp16</h3>" in build_run(tmp_path / "s").read_text(encoding="utf-8")


def test_the_page_of_a_file_has_the_records_of_the_other_ranks(tmp_path: Path) -> None:
    for name in ("run", "run-rank1", "runner"):
        run_records.write(tmp_path / f"{name}.jsonl", run_records.records(steps=5, modules=["a"]))
    page = build_run(tmp_path / "run.jsonl").read_text(encoding="utf-8")
    assert ("run-rank1" in page, "runner" in page) == (True, False)
