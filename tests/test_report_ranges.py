"""Ranges in the report: what is gathered from records equals the plain code; what is drawn is bounded and correct."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import run_records
from mezzo.core.ranges import WHAT, Histogram, RangeRow, shift_of
from mezzo.core.records import RangesRecord, Record, UpdateRecord
from mezzo.report.page import render_runs
from mezzo.report.range_figures import COLUMNS, LINES, bar_path, exponents, heat, range_figures
from mezzo.report.ranges import FORMATS, Ranges
from mezzo.report.run import Run, read_run
from test_report import Outline, drawn

histograms = st.builds(
    lambda lowest, counts: Histogram(lowest, [1, *counts, 1]),
    st.integers(-127, 100),
    st.lists(st.integers(0, 1000), max_size=25),
)


def record(update: int, rows: list[RangeRow], scale: float = 1.0, optimizer: int = 0) -> RangesRecord:
    return RangesRecord(update, optimizer, 0.1 * update, scale, rows)


def section(run: Run) -> str:
    """What the page says of a run's ranges."""
    return drawn("ranges", range_figures(run), False, template="sections.html")


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


def test_gradients_take_the_order_of_the_activations() -> None:
    """They arrive backwards; a module that only gradients know comes last."""
    one = Histogram(0, [1])
    rows = [activation(name, one) for name in "abc"]
    rows += [RangeRow(name, "activation gradient", "fp16", one) for name in "zcba"]
    labels = [track.label for track in gathered(record(0, rows)).of("activation gradient")]
    assert labels == ["a", "b", "c", "z"]


def test_bars_are_logarithms_of_shares() -> None:
    # A thousandth is three of six decades.
    assert bar_path([0, 999_000, 1000, 0]) == "M250 1000V0H500V1000ZM500 1000V500H750V1000Z"
    assert bar_path([0, 0]) == ""
    assert re.search(r"V996H", bar_path([10**9, 1]))  # too rare for a height: a sliver all the same


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
    records = [record(n, [activation("m", Histogram(30 if n == 777 else 0, [4]))]) for n in range(1000)]
    figure = map_of(*records)
    found = cells(figure)
    assert len(found) <= COLUMNS
    assert [place for place, name in found.items() if name == "6"] == [(0, 777 // math.ceil(1000 / COLUMNS))]
    assert "at update 777" in figure


def test_of_many_tensors_those_that_lose_most_are_drawn_in_their_order() -> None:
    rows = [activation(f"m{n}", Histogram(-40 if n % 10 == 3 else 0, [4])) for n in range(300)]
    records = [record(step, rows) for step in range(2)]
    figure = map_of(*records)
    names = re.findall(r'<li title="(m\d+)"', figure)
    assert len(names) == LINES
    assert {f"m{module}" for module in range(300) if module % 10 == 3} <= set(names)
    assert names == sorted(names, key=lambda name: int(name[1:]))
    assert f"{LINES} of 300 tensors" in figure


def test_the_table_of_ratios_counts_what_is_lost() -> None:
    rows = [RangeRow("fc", "update ratio", "fp32", Histogram(-6 - 2 * n, [10]), "weight") for n in range(4)]
    found = heat("update ratio", gathered(*(record(5 * n, [row]) for n, row in enumerate(rows))), "bf16")
    assert found is not None
    # Of the medians 2^-6, 2^-8, 2^-10, 2^-12 the last two lie below 2^-8, the last below 2^-11.
    # Of the second binade below each of them, which 2^-12 is for fp16, half.
    label, cells, _ = found["table"].rows[0]
    assert (label, cells[0], cells[1]) == ("fc.weight", "12.5\u00a0%", "50.0\u00a0%")
    assert cells[-2:] == ["2^-5.5", "2^-11.5"]
    still = RangeRow(
        "fc", "update ratio", "fp32", Histogram(infinities=3), "bias"
    )  # updates of a weight of 0
    found = heat("update ratio", gathered(record(0, [still]), record(1, [still])), "bf16")
    assert found is not None
    assert found["table"].rows[0][1][-3:] == ["0", "–", "–"]


def test_formats_are_the_runs_own_and_else_those_it_computes_in(tmp_path: Path) -> None:
    def shown(format: str) -> str:
        records = run_records.records(steps=20, every=5, modules=["a", "b"], format=format)
        return Outline(section(read_run(run_records.write(tmp_path / f"{format}.jsonl", records)))).text

    assert "Activation gradient: lost in fp16" in shown("fp16")
    assert "Activation gradient: lost in bf16" in shown("bf16")
    assert "Weight gradient: lost in bf16" in shown("bf16")
    assert "Activation: lost in fp16" in shown("fp32")  # an FP32 run is asked what fp16 would make of it


def test_gradients_are_drawn_at_the_scale_that_the_run_ended_with(tmp_path: Path) -> None:
    """Not at the last watched step's, and however small: the slider reaches down to it."""
    histogram = Histogram(-3, [7], largest=0.125)
    rows = [RangeRow("m", "activation gradient", "fp16", histogram)]
    for name, scales, want in (
        ("sunk", [1.0, 2.0**-14], (-24, 32, -14)), ("later", [2.0**16, 2.0**14], (0, 32, 14)),
        ("deep", [2.0**-30, 2.0**-30], (-30, 32, -30)), ("high", [2.0**40, 2.0**34], (0, 40, 34)),
        ("never", [1.0, 1.0], (0, 32, 0)),
    ):  # fmt: skip
        made: list[Record] = [record(0, rows, scales[0])]
        made += [UpdateRecord(index, 0, True, False, scale, 0.1) for index, scale in enumerate(scales)]
        content = section(read_run(run_records.write(tmp_path / f"{name}.jsonl", made)))
        lost = re.search(r'<th scope="row">fp16</th><td>(.*?)</td>', content)
        assert lost
        assert (lost[1] == "0") is (want[2] > -22)  # 2^-3 times the scale is at least 2^-25
        slider = re.search(r'type="range" min="(-?\d+)" max="(\d+)" step="1" value="(-?\d+)"', content)
        assert slider
        assert tuple(map(int, slider.groups())) == want, name
        power = str(want[2]).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        assert f'Drawn at a loss scale of <span class="scaled">2{power}</span>.' in content


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
def test_200_modules_watched_150_times_stay_a_small_page(tmp_path: Path) -> None:
    """More steps add nothing to a page: a map has at most 72 columns."""
    draw = np.random.default_rng(0)
    modules = [f"transformer.blocks.{index // 8}.part{index % 8}.projection" for index in range(200)]
    some = [run_records.rows(draw, modules, progress, "fp16") for progress in (0.0, 0.5, 1.0)]
    path = run_records.write(tmp_path / "run.jsonl", run_records.records(steps=20, every=50, modules=["a"]))
    seen = gathered(*(record(50 * n, some[n // 50], 2.0**16) for n in range(150)))
    text = render_runs([replace(read_run(path), ranges=seen)], "run")
    assert len(text.encode()) < 400_000
    assert "150 watched steps, update 0 to 7,450; 1,000 tensors." in text
    assert Outline(text).open == []
