"""Updates over weights, step by step: the median and where 90 % of the elements lie, with the ends of formats."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mezzo.report.charts.axis import Axis, power_of_two
from mezzo.report.charts.exponents import share_text
from mezzo.report.charts.frame import Frame, Key
from mezzo.report.markup import Markup, element
from mezzo.report.ranges import RATIO, Ranges, Track
from mezzo.report.series import Array, sample

OPEN = 4
FIGURES = 36
LISTED = 150
POINTS = 80
LINES = (("bf16", -8, "margin"), ("fp16", -11, "skip"))
"""Formats whose weights move by every ratio above 2 to this power, and by none below half of that."""


def update_ratios(ranges: Ranges, series: str) -> Markup | None:
    """A figure for each tensor, those with the most lost updates first; None where fewer than two steps have any."""
    tracks = [track for track in ranges.of(RATIO) if len(track.columns) > 1]
    if not tracks:
        return None
    tracks.sort(key=lambda track: -_or_zero(track.mean_lost("bf16")))
    figures = [_figure(track, ranges, series, _axis(track)) for track in tracks[:FIGURES]]
    parts: list[Markup] = [element("div", figures[:OPEN], class_="plots")]
    if len(figures) > OPEN:
        parts.append(
            element(
                "details",
                element("summary", f"{len(figures) - OPEN} more, in the order of what bf16 would lose"),
                element("div", figures[OPEN:], class_="plots"),
                class_="more",
            )
        )
    parts.append(_table(tracks))
    return element("div", parts)


def _axis(track: Track) -> Axis:
    ends = [
        value
        for values in (track.quantiles[0], track.quantiles[2])
        for value in values
        if math.isfinite(value)
    ]
    low, high = min([-14.0, *ends]), max([-4.0, *ends])
    return Axis(2.0 ** (math.floor(max(low, -60)) - 1), 2.0 ** (math.ceil(min(high, 20)) + 1), log=True)


def _figure(track: Track, ranges: Ranges, series: str, axis: Axis) -> Markup:
    picks = sample(len(track.columns), POINTS)
    at = np.array([ranges.updates[track.columns[pick]] for pick in picks], dtype=float)
    low, middle, high = (_powers(values, picks) for values in track.quantiles)
    frame = Frame(
        title=track.label,
        described=(
            f"{_course(at, middle)} On average an estimated "
            + " and ".join(
                f"{share_text(track.mean_lost(name))} of the updates would be lost in {name}"
                for name, _, _ in LINES
            )
            + "."
        ),
        x=Axis(float(at[0]), max(float(at[-1]), float(at[0]) + 1.0)),
        y=axis,
        x_name="update",
        y_name="Update over weight.",
        height="low",
        powers=True,
    )
    frame.band(at, low, high, series, "5 % to 95 %")
    frame.line(at, middle, series, "median")
    for name, power, style in LINES:
        frame.rule(2.0**power, f"edge {style}")
        frame.keys.append(Key(style, "edge", _edge(name, power)))
    frame.notes.append(frame.described)
    return frame.render()


def _powers(values: Sequence[float], picks: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Array:
    found: Array = np.exp2(np.clip(np.array([values[pick] for pick in picks], dtype=float), -200, 200))
    return found


def _edge(name: str, power: int) -> str:
    above, below = power_of_two(2.0**power), power_of_two(2.0 ** (power - 1))
    return f"{above}: {name} loses none above, all below {below}"


def _course(at: Array, middle: Array) -> str:
    """From where to where the median goes; a step has none where nothing moved but weights that were 0."""
    seen = np.flatnonzero(np.isfinite(middle))
    if not len(seen):
        return "No update has a ratio: nothing moved, or only weights that were 0."
    first, last = int(seen[0]), int(seen[-1])
    ends = [
        power_of_two(middle[place]) + (f" at update {int(at[place]):,}" if place != end else "")
        for place, end in ((first, 0), (last, len(middle) - 1))
    ]
    told = f"The median ratio goes from {ends[0]} to {ends[1]}."
    if len(seen) < len(middle):
        told += " A step has none where nothing moved, or only weights that were 0."
    return told


def _or_zero(share: float) -> float:
    return 0.0 if math.isnan(share) else share


def _table(tracks: Sequence[Track]) -> Markup:
    head = ("Tensor", "first median", "last median", *(f"lost in {name}, estimated" for name, _, _ in LINES))
    body = [
        element(
            "tr",
            element("th", element("code", track.label), scope="row"),
            element("td", _power_of(track.quantiles[1][0])),
            element("td", _power_of(track.quantiles[1][-1])),
            [element("td", share_text(track.mean_lost(name))) for name, _, _ in LINES],
        )
        for track in tracks[:LISTED]
    ]
    table = element(
        "table",
        element("thead", element("tr", [element("th", word, scope="col") for word in head])),
        element("tbody", body),
        class_="figures",
    )
    shown = f"{len(tracks):,} tensors" if len(tracks) <= LISTED else f"{LISTED} of {len(tracks):,} tensors"
    return element(
        "details",
        element("summary", f"Update ratios of {shown} as a table"),
        element("div", table, class_="scroll", tabindex=0, role="region", aria_label="Update ratios"),
        class_="numbers",
    )


def _power_of(exponent: float) -> str:
    return f"2^{exponent:.1f}" if math.isfinite(exponent) else "–"
