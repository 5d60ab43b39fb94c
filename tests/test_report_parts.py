"""The report's parts: escaping, numbers, curves and axes, each against the plain code that it equals."""

from __future__ import annotations

import html
import re
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.report import series
from mezzo.report.charts import Axis, axis_over, gauge
from mezzo.report.numbers import (
    count,
    finite,
    number,
    pair,
    percent,
    power_of_two,
    ratio,
    scale_text,
    seconds,
    share_text,
    significant,
    size,
    tick_label,
)
from mezzo.report.page import _environment
from test_report import drawn


@given(st.text())
def test_escaped_text_reads_back_and_cannot_open_or_close_anything(text: str) -> None:
    escaped = _environment().from_string("{{ text }}").render(text=text)
    assert not set("<>\"'") & set(escaped)
    escaped.encode("utf-8")
    plain = text.replace("\r\n", "\n")
    if all(char.isprintable() or char == "\n" for char in plain):
        assert html.unescape(escaped) == plain


def test_no_template_and_no_filter_turns_escaping_off() -> None:
    for path in files("mezzo.report").iterdir():
        if path.name.endswith(".html"):
            assert not re.search(r"\|\s*safe|autoescape|Markup|tojson", path.read_text(encoding="utf-8")), (
                path.name
            )


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (significant(0.0123456), "0.01235"), (significant(-2.5e-7), "−2.500e-07"), (significant(12345.678), "12,346"),
        (significant(999999.0), "999,999"), (significant(1e6), "1.000e+06"), (significant(-0.0), "0"),
        (significant("-inf"), "−infinity"), (significant(None), "not measured"), (significant(True), "not measured"),
        (percent(0.005), "0.50\u00a0%"), (percent(-0.0131), "−1.3\u00a0%"), (percent(0.934, 0), "93\u00a0%"),
        (ratio(1.005), "1.00×"), (ratio("nan"), "not measured"), (size(421_700_000), "422 MB"),
        (scale_text(65536.0), "2¹⁶"), (scale_text(1.0), "1"), (scale_text(1000.0), "1,000"), (power_of_two(-3), "2⁻³"),
        (seconds(2e-5), "20.0 µs"), (seconds(0.1824), "182 ms"), (seconds(7.28), "7.28 s"), (seconds(125), "2 min 5 s"),
        (count(1234567), "1,234,567"), (count("x"), "not measured"), (tick_label(0.02), "0.02"),
        (tick_label(-1500.0), "−1,500"), (tick_label(20_000), "20k"), (tick_label(1e-5), "1e-5"),
        (tick_label(0.1 + 0.2), "0.3"), (share_text(0.0), "0"), (share_text(1e-7), "<0.01\u00a0%"),
        (share_text(0.0123), "1.23\u00a0%"), (share_text(0.5), "50.0\u00a0%"), (share_text(0.9996), ">99.9\u00a0%"),
        (share_text(1.0), "100\u00a0%"), (share_text(float("nan")), "–"),
    ],
)  # fmt: skip
def test_numbers_read_as_people_write_them(shown: str, text: str) -> None:
    assert shown == text


def test_an_interval_is_two_finite_numbers() -> None:
    assert pair([1, 2]) == pair([2, 1]) == (1.0, 2.0)
    assert [pair(odd) for odd in ([1], [1, "nan"], None, "12")] == [None] * 4
    assert finite("nan") is None
    assert (number("inf"), number(None), number(True), number(3)) == (float("inf"), None, None, 3.0)


values = st.lists(st.one_of(st.floats(-1e3, 1e3), st.sampled_from([np.nan, np.inf])), max_size=40)


@given(values, st.sampled_from([1, 3, 7]))
def test_smoothing_is_the_mean_of_a_centred_window(row: list[float], window: int) -> None:
    v = np.array(row)
    out = series.smooth(v, window)
    for i, value in enumerate(v):
        h = min(window // 2, i, len(v) - 1 - i)
        near = v[i - h : i + h + 1]
        if np.isfinite(value):
            np.testing.assert_allclose(out[i], near[np.isfinite(near)].mean(), rtol=1e-9, atol=1e-9)
        else:
            assert np.isnan(out[i])


def test_smoothing_survives_a_loss_that_explodes() -> None:
    assert series.smooth(np.array([1.0, 1.0, 1e300, 1.0, 1.0, 1.0, 1.0]), 3)[5] == 1.0


@given(st.lists(st.one_of(st.floats(-10, 10), st.just(np.nan)), min_size=41, max_size=400))
def test_thinning_keeps_every_bucket_s_extremes_in_order(row: list[float]) -> None:
    v = np.array(row)
    x, y = series.thin(v, buckets=20)
    assert len(x) <= 40
    assert (np.diff(x) > 0).all()
    for bucket in np.array_split(np.arange(len(v)), 20):
        kept = y[(x >= bucket[0]) & (x <= bucket[-1])]
        good = v[bucket][np.isfinite(v[bucket])]
        if len(good):
            assert (kept.min(), kept.max()) == (good.min(), good.max())
        else:
            assert np.isnan(kept).all()
    np.testing.assert_array_equal(y, v[x.astype(int)])


def test_a_band_leaves_gaps_out_and_is_a_gap_where_all_are() -> None:
    over = series.band(series.align([np.array([1.0, np.nan, 3.0]), np.array([3.0])]))
    np.testing.assert_array_equal(over, [[1.0, np.nan, 3.0], [2.0, np.nan, 3.0], [3.0, np.nan, 3.0]])
    assert series.align([]).shape == (0, 0)
    assert [part.shape for part in series.band(series.align([]))] == [(0,)] * 3


@given(st.floats(1e-12, 1e12), st.floats(1.0001, 1e9), st.booleans())
def test_ticks_are_few_round_and_on_the_axis(low: float, factor: float, log: bool) -> None:
    axis = Axis(low, low * factor, log)
    ticks = axis.ticks(5)
    assert len(ticks) <= 9
    assert all(-0.01 <= axis.place(tick) <= 1.01 for tick in ticks)
    if factor > 1.5:
        assert len(ticks) >= 2


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


def test_the_gauge_shows_a_gap_far_outside_as_an_arrow() -> None:
    inside = drawn("gauge", gauge(0.5, 1.0, (-0.2, 1.2), "s1"))
    outside = drawn("gauge", gauge(-9.0, 1.0, None, "s1"))
    assert "<circle" in inside
    assert "interval −0.200 to +1.20" in inside
    assert "<circle" not in outside
    for value, margin in ((None, 1.0), (0.5, 0.0), (0.5, None)):
        assert gauge(value, margin, None, "s1") is None
