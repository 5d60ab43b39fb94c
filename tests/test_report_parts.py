"""The report's parts: escaping, numbers, curves and axes, each against the plain code that it equals."""

from __future__ import annotations

import html
import re
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.report.charts import axis_over
from mezzo.report.numbers import (
    count,
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
