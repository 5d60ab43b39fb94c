"""Histogram: what it says of a format is what rounding to that format does, exponent by exponent."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.core import formats
from mezzo.core.ranges import BINS, INFINITE, NAN, ZERO, Histogram, Shares

FORMATS = ("fp16", "bf16", "tf32", "fp32", "e4m3fn", "e5m2")
EXPONENTS = range(-150, 129)
SHIFTS = (-20, 0, 16)


def fate(value: float, name: str) -> str:
    """What rounding makes of a number: a field of `Shares`."""
    rounded = float(formats.round(value, name))
    if not math.isfinite(rounded):
        return "overflow"
    if rounded == 0:
        return "underflow"
    return "normal" if abs(value) >= formats.named(name).smallest_normal else "subnormal"


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("name", FORMATS)
def test_shares_of_every_exponent_are_what_rounding_does(name: str, shift: int) -> None:
    """At 1.25 times the power of two: above the tie to zero, and below the largest number of a top binade."""
    for exponent in EXPONENTS:
        shares = Histogram(exponent, [3]).shares(name, shift)
        expected = {"underflow": 0.0, "subnormal": 0.0, "normal": 0.0, "overflow": 0.0}
        expected[fate(1.25 * 2.0 ** (exponent + shift), name)] = 1.0
        assert shares == Shares(**expected), f"2**{exponent} in {name}"


# The number at which each format overflows, and the one below it that does not.
EDGES = [
    ("fp16", 65520.0, 65519.99609375),
    ("bf16", 3.3961775292304957e38, 3.39617752923e38),
    ("e4m3fn", 464.00003, 464.0),  # a tie, and 448 is even: the pattern above it is NaN
    ("e5m2", 61440.0, 61439.996),
    ("tf32", 3.4020e38, 3.4011e38),
    ("fp32", math.inf, 3.4028234663852886e38),
]


@pytest.mark.parametrize(("name", "over", "under"), EDGES, ids=[row[0] for row in EDGES])
def test_overflows_is_exact(name: str, over: float, under: float) -> None:
    for value, expected in ((over, True), (under, False)):
        assert (fate(value, name) == "overflow") is expected
        assert Histogram(largest=value).overflows(name) is expected
        for shift in (-12, 5):
            assert Histogram(largest=math.ldexp(value, -shift)).overflows(name, shift) is expected
    assert not Histogram().overflows(name)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize(("size", "spread"), [(1e-4, 0.1), (1e-2, 0.1), (1e-3, 0.0), (1e-1, 0.0)])
def test_lost_is_near_what_rounding_loses_and_never_off_by_more_than_it_says(
    name: str, size: float, spread: float
) -> None:
    """Of weights that are spread around 0, or all 1."""
    draw = np.random.default_rng(0)
    round_ = np.vectorize(lambda value: float(formats.round(value, name)))
    weight = round_(draw.normal(0, spread, 2000) if spread else np.ones(2000))
    update = draw.normal(0, size, 2000)
    true = float(np.mean(round_(weight + update) == weight))
    exponents = np.frexp(np.abs(update / weight))[1] - 1
    lowest = int(exponents.min())
    lost = Histogram(lowest, np.bincount(exponents - lowest).tolist()).lost(name)
    half = float(np.mean(exponents == -(formats.named(name).nmant + 2))) / 2
    # A few of the weights are subnormal in fp16.
    assert lost == pytest.approx(true, abs=min(half + 0.005, 0.03) if spread else half + 0.005)


def test_lost_without_ratios() -> None:
    assert Histogram(zeros=3, infinities=2).lost("bf16") is None
    assert Histogram(-20, [1, 0, 3], zeros=3).lost("fp16") == 1.0
    assert Histogram(-13, [1, 3]).lost("fp16") == 0.625  # half of what lies between 2^-12 and 2^-11


def test_from_bins_trims_and_keeps_apart_what_has_no_exponent() -> None:
    bins = [0] * BINS
    bins[0], bins[127], bins[130], bins[INFINITE], bins[ZERO], bins[NAN] = 1, 2, 3, 4, 5, 6
    seen = Histogram.from_bins(bins, 15.5)
    assert (seen.lowest, len(seen.counts), seen.counts[0], seen.counts[-1]) == (-127, 131, 1, 3)
    assert (seen.infinities, seen.zeros, seen.nans, seen.largest, seen.elements) == (4, 5, 6, 15.5, 21)
    assert Histogram.from_bins([0] * BINS) == Histogram()


histograms = st.builds(
    lambda lowest, counts, zeros, largest: Histogram(lowest, [1, *counts, 1], zeros, 1, 2, largest),
    st.integers(-60, 60),
    st.lists(st.integers(0, 5), max_size=30),
    st.integers(0, 9),
    st.floats(0, 1e6),
)


@given(histograms, histograms)
def test_plus_counts_both(one: Histogram, other: Histogram) -> None:
    both = one.plus(other)
    assert both == other.plus(one)
    assert both.elements == one.elements + other.elements
    assert both.largest == max(one.largest, other.largest)
    for name in FORMATS:
        lost = [h.shares(name).underflow * sum(h.counts) for h in (both, one, other)]
        assert lost[0] == pytest.approx(lost[1] + lost[2])
    assert one.plus(Histogram()) == one
