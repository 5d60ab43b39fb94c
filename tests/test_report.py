"""The report as a file: whole, self-contained, escaped, the same each time, from whatever a folder holds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from markupsafe import escape

import comparisons
from mezzo.compare.comparison import schedule
from mezzo.compare.request import Request
from mezzo.core.errors import UsageError
from mezzo.report import build
from mezzo.report.comparison import command_line, read
from mezzo.report.page import _environment

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
        return [
            value or "" for _, attributes in self.tags for key, value in attributes.items() if key == name
        ]


def drawn(macro: str, *values: object, template: str = "charts.html") -> str:
    """What a template's macro writes."""
    return str(getattr(_environment().get_template(template).module, macro)(*values))


def outline(folder: Path) -> Outline:
    return Outline(build(folder).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", comparisons.FOLDERS)
def test_every_folder_gives_a_sound_page_that_asks_for_nothing(name: str, tmp_path: Path) -> None:
    page = build(comparisons.FOLDERS[name](tmp_path / name))
    assert page == tmp_path / name / "report.html"
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>\n")
    assert not re.search(r"https?:|//\w|url\(|@import", text)
    found = Outline(text)
    assert not found.open
    assert found.values("src") == []
    ids = found.values("id")
    assert len(ids) == len(set(ids))
    for link in found.values("href"):
        assert link == "data:," or link.removeprefix("#") in ids
    assert not [
        key for _, attributes in found.tags for key in attributes if key.startswith("on") or key == "style"
    ]
    assert sum(tag == "script" for tag, _ in found.tags) == 1
    assert "nan%" not in text
    assert not re.search(r'="[^"]*\b(nan|inf)\b', re.sub(r'data-readout="[^"]*"', "", text))


def test_a_healthy_folder_shows_what_a_reader_asks(tmp_path: Path) -> None:
    found = outline(comparisons.healthy(tmp_path / "run"))
    for words in (
        "bf16 equivalent", "fp16 consistent", "1.62×", "1.58 to 1.66", "0.61×", "251 MB of 412 MB",
        "Loss gap (−0.72 %) −0.00030 margin ±0.0021 (0.50 %)", "Metric gap (higher is better) +0.050",
        "of 900 updates", "98.40",
        "Difference: fp16 minus FP32 of the same seed", "averaged over 5 steps",
        "FP32 twins moved by one ulp", "2 of 300 updates skipped, at 1, 3 (inf in the gradients)",
        "1 op departed from the plan.", "Every op ran as planned.", "not as planned", "AMD EPYC 9R14",
        "mezzo compare --demo digits --precision bf16 --precision fp16 --seeds 3 --out run --fresh -- --epochs 3",
        "2¹⁶",
    ):  # fmt: skip
        assert words in found.text, words
    charts = [
        attributes for tag, attributes in found.tags if tag == "svg" and attributes.get("role") == "img"
    ]
    assert len(charts) == 2 * 2 + 1 + 3  # loss and difference, one loss scale, three gauges
    assert found.text.count("These figures as a table") == 4


def test_what_was_not_measured_is_said_and_leaves_no_empty_section(tmp_path: Path) -> None:
    found = outline(comparisons.one_seed(tmp_path / "run"))
    for section in ("metric", "scale", "formats"):
        assert section not in found.values("id")
    assert "Peak memory – not measured" in found.text
    assert "one seed" in found.text
    assert "one pair" in found.text
    assert "smallest to largest seed" not in found.text
    assert "no candidate" not in found.text.lower()
    bare = outline(comparisons.bare(tmp_path / "bare"))
    assert "bf16 no verdict No verdict was recorded." in bare.text
    assert "bf16 recorded no loss." in bare.text
    empty = comparisons.write(tmp_path / "empty", {"candidates": {}}, {})
    assert "No candidate was compared." in outline(empty).text


@pytest.mark.parametrize(
    "name",
    ["mezzo-calibrate-train/policy.toml", "/tmp/a b/p.v2.toml", "../policy.toml", "bf16,module.4.up=fp32"],
)
def test_the_runs_of_a_candidate_are_found_by_the_name_under_which_they_were_written(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "train.py").touch()
    planned = schedule(Request(str(tmp_path / "train.py"), precisions=(name,), seeds=1))
    runs = {plan.name: comparisons.Written([2.0, 1.0]) for plan in planned}
    folder = comparisons.write(tmp_path / "run", {"candidates": {name: {}}}, runs)
    found = outline(folder)
    assert [len(run.losses) for run in read(folder).of(name)] == [2]
    assert not list((folder / "runs").glob(".*"))
    assert "recorded no loss" not in found.text


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


def test_a_broken_record_is_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    folder = comparisons.one_seed(tmp_path / "run")
    path = folder / "runs" / "bf16-0.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([*lines[:12], "{broken\n", *lines[12:]]), encoding="utf-8")
    run = read(folder).of("bf16")[0]
    assert len(run.losses) == 11
    assert run.fault.startswith("bf16-0.jsonl:13: not a run record")
    assert "bf16-0.jsonl:13: not a run record" in outline(folder).text
    (folder / "runs" / "bf16-0.jsonl").write_bytes(b"\xff\xfe\x00")
    assert read(folder).of("bf16")[0].failed
    build(folder)


def test_departures_come_first_and_a_long_list_is_folded(tmp_path: Path) -> None:
    short = build(comparisons.healthy(tmp_path / "short", steps=20, seeds=1)).read_text(encoding="utf-8")
    fp16 = short[short.index("1 op departed") :]
    assert fp16.index("relu") < fp16.index("not as planned") < fp16.index("log_softmax")
    assert "<details" not in fp16[: fp16.index("</section>")]
    text = build(comparisons.many_ops(tmp_path / "run")).read_text(encoding="utf-8")
    section = text[text.index('id="formats"') :]
    assert section.index("op_07") < section.index("<details") < section.index("All 60 ops of bf16")
    assert section.index("op_09") < section.index("<details") < section.index("op_11")
    assert section.count('class="departs"') == 4  # short table and long


def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path) -> None:
    found = outline(comparisons.hostile(tmp_path / "run"))
    tags = {tag for tag, _ in found.tags}
    assert "img" not in tags
    assert sum(tag == "script" for tag, _ in found.tags) == 1
    shown = " ".join(
        comparisons.HOSTILE.replace("\x00", "\\x00")
        .replace("\x1b", "\\x1b")
        .replace("\u202e", "\\u202e")
        .split()
    ).replace("\udcff", "\\udcff")
    # Reason twice, op name, rule, formats, module, why, note, script's name, machine, rerun ...
    assert not re.search(
        "[\x00\x1b\u202e\udcff]", (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    )
    assert found.text.count(shown) >= 15
    for value in found.values("data-readout"):
        json.loads(value)


def test_the_file_is_the_same_each_time_and_replaces_the_last_one(tmp_path: Path) -> None:
    folder = comparisons.one_step(tmp_path / "run")
    first = build(folder).read_bytes()
    (folder / "report.html").write_text("an older report")
    assert build(str(folder)).read_bytes() == first
    before = os.umask(0)
    os.umask(before)
    assert (folder / "report.html").stat().st_mode & 0o777 == 0o666 & ~before
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "runs", "verdict.json"]


def test_a_full_disk_leaves_the_last_report_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = comparisons.one_step(tmp_path / "run")
    before = build(folder).read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mezzo.report.os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        build(folder)
    assert (folder / "report.html").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "runs", "verdict.json"]


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (None, "no such file. A report is made from the folder that `mezzo compare --out DIR` wrote."),
        ("{", "not a readable verdict"),
        ("[]", 'it has no object "candidates"'),
        ('{"candidates": []}', 'it has no object "candidates"'),
        ('{"schema": 2, "candidates": {}}', "schema 2, and this version of Mezzo reads schema 1"),
    ],
)
def test_a_folder_without_a_verdict_is_refused(verdict: str | None, says: str, tmp_path: Path) -> None:
    if verdict is not None:
        (tmp_path / "verdict.json").write_text(verdict)
    with pytest.raises(UsageError, match=re.escape(says)):
        build(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("odd", [None, "a word", [], {}, True, "nan", [1], ["a", None], 1e400, -1])
def test_no_value_in_the_verdict_stops_the_report(odd: object, tmp_path: Path) -> None:
    values = dict.fromkeys(
        (*comparisons.candidate(), "pairs", "power", "interval", "notes", "loss", "metric"), odd
    )
    verdict = {
        "schema": 1, "baseline": "fp32", "candidates": {"bf16": values, "fp16": odd}, "machine": odd,
        "request": odd, "noise_floor": odd, "step_seconds": odd,
    }  # fmt: skip
    base = comparisons.curve(5, 0)
    folder = comparisons.write(
        tmp_path / "run", verdict, {"fp32-0": comparisons.Written(base), "bf16-0": comparisons.Written(base)}
    )
    assert "bf16" in outline(folder).text


def test_the_door_needs_no_torch(tmp_path: Path) -> None:
    folder = comparisons.one_step(tmp_path / "run")
    code = (
        "import sys, runpy; sys.argv = ['mezzo.report', sys.argv[1]]\n"
        "try: runpy.run_module('mezzo.report', run_name='__main__')\n"
        "except SystemExit as stop: assert stop.code == 0, stop.code\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{folder / 'report.html'}\n"), done.stderr
    assert (folder / "report.html").exists()


@pytest.mark.parametrize(("words", "status"), [([], 2), (["--help"], 0), (["nowhere"], 2)])
def test_the_door_says_what_it_wants(
    words: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    from mezzo.report.__main__ import main

    assert main(words) == status
    out, err = capsys.readouterr()
    assert "nowhere: no run records" in err if words == ["nowhere"] else "mezzo.report DIR" in out


@pytest.mark.parametrize(
    ("request_", "command"),
    [
        ({"command": "mezzo compare x.py"}, "mezzo compare x.py"),
        ({"command": ["mezzo", "compare", "a b.py"]}, "mezzo compare 'a b.py'"),
        ({"target": "t.py", "metric": "acc ([0-9.]+)", "argv": ["--x", "$(rm)"]},
         "mezzo compare t.py --precision bf16 --metric 'acc ([0-9.]+)' --out run --fresh -- --x '$(rm)'"),
        ({"demo": "digits", "precisions": ["fp16"], "seeds": 5, "margin": 0.01},
         "mezzo compare --demo digits --precision fp16 --seeds 5 --margin 0.01 --out run --fresh"),
        ({}, "mezzo compare digits.py --precision bf16 --out run --fresh"),
    ],
)  # fmt: skip
def test_the_command_is_quoted_for_a_shell(request_: dict[str, object], command: str, tmp_path: Path) -> None:
    folder = comparisons.one_step(tmp_path / "run")
    verdict = json.loads((folder / "verdict.json").read_text()) | {"request": request_}
    (folder / "verdict.json").write_text(json.dumps(verdict))
    assert command_line(read(folder)) == command
    assert escape(command) in build(folder).read_text(encoding="utf-8")


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2.2: 4.5 for text, 3 for a graphic."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_every_colour_can_be_read() -> None:
    css = files("mezzo.report").joinpath("style.css").read_text()
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", css)
    assert len(pairs) == css.count("--", 0, css.index("}")) > 20
    for theme in ({name: light for name, light, _ in pairs}, {name: dark for name, _, dark in pairs}):
        for text in ("ink", "muted", "link", "bad"):
            for ground in ("bg", "panel"):
                assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)
        for tone in ("good", "calm", "warn", "bad"):
            assert contrast(theme[tone], theme[f"{tone}-bg"]) >= 4.5, tone
        assert contrast(theme["ink"], theme["bad-bg"]) >= 4.5
        for line in ("s0", "s1", "s2", "s3", "s4", "s5", "s6", "margin", "skip", "noise"):
            assert contrast(theme[line], theme["panel"]) >= 3.0, line


@pytest.mark.heavy
def test_a_run_of_100_000_steps_stays_a_small_page(tmp_path: Path) -> None:
    base = comparisons.curve(100_000, 0)
    spiked = comparisons.drift(base, 1, 0.05)
    spiked[77_777] = 9.0
    runs = {"fp32-0": comparisons.Written(base), "bf16-0": comparisons.Written(spiked)}
    page = build(comparisons.write(tmp_path / "run", {"candidates": {"bf16": comparisons.candidate()}}, runs))
    assert page.stat().st_size < 200_000
    text = page.read_text(encoding="utf-8")
    assert "averaged over 501 steps" in text
    raw = re.search(r'd="([^"]+)" class="raw s1"', text)
    assert raw
    # The spike of a single step touches the frame's upper end: thinning did not lose it.
    assert min(float(y) for y in re.findall(r"[ML][\d.-]+ ([\d.-]+)", raw[1])) < 60
