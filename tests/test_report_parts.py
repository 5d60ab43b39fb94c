"""The report's parts: ranges, escaping, numbers and axes, each against the plain code that it equals."""

from __future__ import annotations

import html
import math
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import run_records
from mezzo.core.ranges import WHAT, Histogram, RangeRow, shift_of
from mezzo.core.records import RangesRecord
from mezzo.report import numbers as n
from mezzo.report.charts import axis_over
from mezzo.report.page import _environment, render_runs
from mezzo.report.range_figures import COLUMNS, exponents, heat
from mezzo.report.ranges import FORMATS, Ranges
from mezzo.report.run import read_run
from test_report import Outline, drawn

histograms = st.builds(
    lambda lowest, counts: Histogram(lowest, [1, *counts, 1]),
    st.integers(-127, 100),
    st.lists(st.integers(0, 1000), max_size=25),
)


def record(update: int, rows: list[RangeRow], scale: float = 1.0, optimizer: int = 0) -> RangesRecord:
    return RangesRecord(update, optimizer, 0.1 * update, scale, rows)


def gathered(*records: RangesRecord) -> Ranges:
    seen = Ranges()
    for one in records:
        seen.add(one)
    return seen


def activation(module: str, histogram: Histogram) -> RangeRow:
    return RangeRow(module, "activation", "fp16", histogram)


def map_of(*records: RangesRecord) -> str:
    return drawn("heat", heat("activation", gathered(*records), "fp16"))


@given(histograms, st.sampled_from(sorted(WHAT)), st.sampled_from([1.0, 2.0**10, 2.0**24, 0.25]))
def test_a_track_keeps_the_shares_that_the_histogram_gives(
    histogram: Histogram, what: str, scale: float
) -> None:
    seen = gathered(record(0, [RangeRow("m", what, "fp16", histogram)], scale))
    track = seen.of(what)[0]
    shift = shift_of(scale) if "gradient" in what else 0
    for name in FORMATS:
        scaled = name.startswith("e")  # as fp8 scales a tensor: nothing overflows, whatever the loss scale
        shares = histogram.scaled_to(name).shares(name) if scaled else histogram.shares(name, shift)
        assert not (scaled and shares.overflow)
        want = histogram.lost(name) if what == "update ratio" else shares.underflow + shares.overflow
        assert track.lost[name][0] == pytest.approx(want, abs=1e-6)


def test_steps_add_up_and_parameters_stay_apart() -> None:
    one, two = Histogram(-3, [1, 2]), Histogram(-4, [5], zeros=1, infinities=2, nans=3, largest=9.0)
    weight, bias = (RangeRow("a", "weight", "fp32", *row) for row in ((one, "weight"), (two, "bias")))
    again = RangeRow("a", "weight", "fp32", two, "weight")
    later = record(8, [again, activation("", one)], 4.0, optimizer=1)
    seen = gathered(record(0, [weight, bias]), later, record(16, [again]))
    labels = ["a.weight", "a.bias", "optimizer 1: a.weight", "optimizer 1: (the model)"]
    assert [track.label for track in seen.tracks.values()] == labels
    first = seen.of("weight")[0]
    assert first.total == one.plus(two)
    assert list(first.columns) == [0, 2]
    assert list(first.broken) == [0, 5]
    assert seen.updates == [0, 8, 16]
    assert seen.scales == [1.0, 4.0, 1.0]


def cells(figure: str) -> dict[tuple[int, int], str]:
    """Of a map as drawn, (line, column) -> level."""
    found: dict[tuple[int, int], str] = {}
    svg = figure[figure.index('class="heatmap"') :]
    for d, name in re.findall(r'<path d="([^"]+)" class="h(\w)"', svg[: svg.index("</svg>")]):
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1", d):
            for column in range(int(x), int(x) + int(width)):
                assert (int(y), column) not in found
                found[int(y), column] = name
    return found


def test_the_map_shows_each_step() -> None:
    """A level for each share; "x" where something is not finite, "u" where nothing was seen."""
    kept = Histogram(0, [1000])
    lines = [
        [Histogram(-40, [1000]), kept, Histogram(0, [1000], nans=1)],
        [kept, *(Histogram(-40, [lost, *[0] * 39, 1000 - lost]) for lost in (1, 2))],
        [Histogram(-40, [lost, *[0] * 39, 1000 - lost]) for lost in (199, 201, 510)],
    ]
    records = [
        record(10 * step, [activation(f"m{n}", line[step]) for n, line in enumerate(lines)])
        for step in range(3)
    ]
    records[1].rows.pop(0)
    figure = map_of(*records)
    assert cells(figure) == {
        (0, 0): "6", (0, 1): "u", (0, 2): "x",
        (1, 0): "0", (1, 1): "1", (1, 2): "2",
        (2, 0): "4", (2, 1): "5", (2, 2): "6",
    }  # fmt: skip
    assert "1 of 8,001 elements is infinite or NaN" in figure
    assert "Of the finite ones the most is 100" in figure
    assert heat("activation", gathered(records[0]), "fp16") is None


def test_a_maps_columns_are_the_worst_of_their_steps() -> None:
    """One step in a thousand loses everything, and is on the map."""
    steps = [Histogram(30 if step == 777 else 0, [4]) for step in range(1000)]
    records = [record(step, [activation("m", seen)]) for step, seen in enumerate(steps)]
    figure = map_of(*records)
    found = cells(figure)
    assert len(found) <= COLUMNS
    assert [place for place, name in found.items() if name == "6"] == [(0, 777 // math.ceil(1000 / COLUMNS))]
    assert "at update 777" in figure


def test_what_is_not_finite_is_said_before_any_share() -> None:
    """A "nothing is lost" above a map of infinities, or "overflow 0" beside them, is the opposite of the truth."""
    kept, bad = Histogram(0, [4], largest=1.0), Histogram(0, [2], infinities=5, nans=1, largest=1.0)
    lost = Histogram(-40, [2], nans=2, largest=2.0**-40)

    def figures(*histograms: Histogram) -> tuple[str, str]:
        steps = [[activation("m", one), activation("n", kept)] for one in histograms]
        records = [record(4 * step, rows) for step, rows in enumerate(steps)]
        bars = drawn("exponents", exponents("activation", gathered(*records).of("activation"), "fp16", 0))
        return Outline(map_of(*records)).text, Outline(bars).text.replace("\u00a0", " ")

    text, told = figures(kept, bad)
    assert "6 of 20 elements are infinite or NaN, in 1 of 2 tensors, first at update 4." in text
    assert "Nothing is lost" not in text
    words = "6 of 20 numbers (30.0 %) are infinite or NaN already. The shares below are of the finite ones."
    assert told.index(words) < told.index("overflow")
    assert "first at update 4. Of the finite ones the most is 100" in figures(kept, lost)[0]
    text, told = figures(kept, kept)
    assert "Nothing is lost in fp16." in text
    assert "infinite or NaN already" not in told


@pytest.mark.heavy
def test_200_modules_watched_75_times_stay_a_small_page(tmp_path: Path) -> None:
    """More steps add nothing to a page: a map has at most 72 columns."""
    draw = np.random.default_rng(0)
    parts = [f"part{index}.projection" for index in range(8)]
    drawn = [run_records.rows(draw, parts, progress, "fp16") for progress in (0.0, 0.5, 1.0)]
    prefixes = [f"transformer.blocks.{index}." for index in range(25)]
    some = [
        [replace(row, module=prefix + row.module) for prefix in prefixes for row in rows] for rows in drawn
    ]
    path = run_records.write(tmp_path / "run.jsonl", run_records.records(steps=20, every=50, modules=["a"]))
    seen = gathered(*(record(50 * n, some[n // 25], 2.0**16) for n in range(75)))
    text = render_runs([replace(read_run(path), ranges=seen)], "run")
    assert len(text.encode()) < 400_000
    assert "75 watched steps, update 0 to 3,700; 1,000 tensors." in text
    assert Outline(text).open == []


TEXT = _environment().from_string("{{ text }}")


@given(st.text())
def test_escaped_text_reads_back_and_cannot_open_or_close_anything(text: str) -> None:
    escaped = TEXT.render(text=text)
    assert not set("<>\"'") & set(escaped)
    escaped.encode("utf-8")
    plain = text.replace("\r\n", "\n")
    if all(char.isprintable() or char == "\n" for char in plain):
        assert html.unescape(escaped) == plain


def test_no_template_and_no_filter_turns_escaping_off() -> None:
    for path in files("mezzo.report").iterdir():
        if path.name.endswith(".html"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"\|\s*safe|autoescape|Markup|tojson", text), path.name


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (n.significant(0.0123456), "0.01235"), (n.significant(-2.5e-7), "−2.500e-07"),
        (n.significant(12345.678), "12,346"), (n.significant(999999.0), "999,999"), (n.significant(1e6), "1.000e+06"),
        (n.significant(-0.0), "0"), (n.significant("-inf"), "−infinity"), (n.significant(None), "not measured"),
        (n.significant(True), "not measured"), (n.percent(0.005), "0.50\u00a0%"), (n.percent(-0.0131), "−1.3\u00a0%"),
        (n.percent(0.934, 0), "93\u00a0%"), (n.ratio(1.005), "1.00×"), (n.ratio("nan"), "not measured"),
        (n.size(421_700_000), "422 MB"), (n.scale_text(65536.0), "2¹⁶"), (n.scale_text(1.0), "1"),
        (n.scale_text(1000.0), "1,000"), (n.power_of_two(-3), "2⁻³"), (n.seconds(2e-5), "20.0 µs"),
        (n.seconds(0.1824), "182 ms"), (n.seconds(7.28), "7.28 s"), (n.seconds(125), "2 min 5 s"),
        (n.count(1234567), "1,234,567"), (n.count("x"), "not measured"), (n.tick_label(0.02), "0.02"),
        (n.tick_label(-1500.0), "−1,500"), (n.tick_label(20_000), "20k"), (n.tick_label(1e-5), "1e-5"),
        (n.tick_label(0.1 + 0.2), "0.3"), (n.share_text(0.0), "0"), (n.share_text(1e-7), "<0.01\u00a0%"),
        (n.share_text(0.0123), "1.23\u00a0%"), (n.share_text(0.5), "50.0\u00a0%"),
        (n.share_text(0.9996), ">99.9\u00a0%"), (n.share_text(1.0), "100\u00a0%"), (n.share_text(float("nan")), "–"),
    ],
)  # fmt: skip
def test_numbers_read_as_people_write_them(shown: str, text: str) -> None:
    assert shown == text


@pytest.mark.parametrize(
    ("parts", "log", "covers"),
    [
        ([[1.0, 2.0]], False, (1.0, 2.0)), ([[0.01, 2.0]], True, (0.01, 2.0)),
        ([[-1.0, 100.0]], False, (-1.0, 100.0)), ([[5.0]], False, (5.0, 5.0)),
        ([[]], False, (0.0, 1.0)), ([[np.nan, np.inf]], False, (0.0, 1.0)),
        ([[1e-270, 1e270]], True, (1e-270, 1e270)), ([[-1e308, 1e308]], False, (-1e280, 1e280)),
        ([[1e-310, 1.7e308]], True, (1e-280, 1e280)),
    ],
)  # fmt: skip
def test_the_axis_covers_what_is_finite_and_is_never_empty(
    parts: list[list[float]], log: bool, covers: tuple[float, float]
) -> None:
    axis = axis_over([np.array(part, dtype=float) for part in parts])
    assert axis.log is log
    assert axis.low < axis.high
    assert axis.low <= covers[0]
    assert covers[1] <= axis.high
    assert len(axis.ticks()) >= 2
