"""The numbers of a watched run as figures: exponents by kind of tensor, shares lost, updates over weights."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from mezzo.core.calibration import conclusions
from mezzo.core.ranges import GRADIENTS, WHAT, Histogram, RangeRow, Shares, shift_of
from mezzo.report.charts import UNITS, Axis, Table, across, box, down, shape, text
from mezzo.report.numbers import count, counted, power_of_two, share_text, significant
from mezzo.report.ranges import FORMATS, LIMITS, RATIO, Ranges, Track, shares_in, together
from mezzo.report.run import Run
from mezzo.report.series import Array

LISTED = 150  # rows of a table of tensors; those with the most to lose come first
LINES, COLUMNS = 48, 72  # of a map: the tensors that lose most, and columns, each the worst of its steps
# Gradients first: they are what a format loses first.
ORDER = ("activation gradient", "weight gradient", "activation", "weight")
MAPS = ("activation gradient", "activation", "weight gradient", RATIO)
SLIDER = (-24, 32)  # the ends of the loss scale's slider, as powers of two; from 0 if no scale was below 1
DECADES = 6  # a share of 10 to the minus this, or less, is a sliver in a histogram
# A cell's level is the first of these that its share does not exceed.
UP_TO = (0.0, 0.001, 0.01, 0.05, 0.2, 0.5, 1.0)
BROKEN, UNSEEN = "x", "u"
_SHARES = ("none", "to 0.1 %", "to 1 %", "to 5 %", "to 20 %", "to 50 %", "over 50 %")
LEVELS = [(f"h{place}", "cell", name) for place, name in enumerate(_SHARES)]
LEVELS += [(f"h{BROKEN}", "cell", "holds inf or NaN"), (f"h{UNSEEN}", "cell", "not seen")]
"""The legend of a map."""
_WINDOW = (-72, 44)
_PERCENT = {0: "100\u00a0%", 2: "1\u00a0%", 4: "0.01\u00a0%", 6: "10⁻⁴\u00a0%"}
_STRIP = 17


def range_figures(run: Run) -> dict[str, Any]:
    seen = run.ranges
    # An update that was not watched may have changed the scale since.
    scales = [update.loss_scale for update in run.updates] or seen.scales
    shift = shift_of(next((scale for scale in reversed(scales) if 0 < scale < math.inf), 1.0))
    used = [0, shift, *map(shift_of, scales)]
    tracks = {what: seen.of(what) for what in ORDER}
    rows = [RangeRow(key[2], one.what, one.format, one.total, key[3]) for key, one in seen.tracks.items()]
    return {
        "name": run.name,
        # Where a value overflowed, the findings say more.
        "conclusions": [] if run.alarms else conclusions(rows, 2.0**shift if shift else None),
        "seen": seen,
        "shift": shift,
        "slider": (min(SLIDER[0], *used) if min(used) < 0 else 0, max(SLIDER[1], *used)),
        "exponents": [exponents(one, of, _format(seen, one), shift) for one, of in tracks.items() if of],
        "maps": list(filter(None, (heat(what, seen, _format(seen, what)) for what in MAPS))),
    }


def _format(seen: Ranges, what: str) -> str:
    """The low format that a kind of tensor has in the run; if it has none, the one that the run computes in."""
    for kinds in ((what,), GRADIENTS, ("activation",)):
        found = Counter(track.format for kind in kinds for track in seen.of(kind) if track.format in FORMATS)
        if found:
            return found.most_common(1)[0][0]
    return FORMATS[0]


def exponents(what: str, tracks: Sequence[Track], format: str, shift: int) -> dict[str, Any]:
    """How often each exponent occurs in a kind of tensor; gradients are drawn at a loss scale of ``2**shift``."""
    moves = what in GRADIENTS
    shift = shift if moves else 0
    total = together(tracks)
    # Everything that occurs, and the ends of fp16 and the fp8 formats in any case. What lies beyond is at the edge.
    first, last = total.lowest + shift, total.lowest + len(total.counts) + shift
    axis = Axis(max(_WINDOW[0], min(first - 1, -28)), min(_WINDOW[1], max(last + 1, 20)))

    def gone(track: Track) -> float:
        shares = shares_in(format, track.total, shift)
        return (shares.underflow + shares.overflow if shares else 0.0) + bool(broken(track.total))

    rows = []
    for track in sorted(tracks, key=gone, reverse=True)[:LISTED]:
        lost, bad = _cells(shares_in(format, track.total, shift)), broken(track.total)
        numbers = [lost[0], lost[3], significant(track.total.largest, 3), count(bad)]
        rows.append((track.label, numbers, bool(bad)))
    shares = {
        name: total.shares(name, shift) if name in LIMITS else together(tracks, name).shares(name)
        for name in FORMATS
    }
    data = {"low": axis.low, "high": axis.high, "lowest": total.lowest, "counts": total.counts}
    return {
        "what": what,
        "sentence": WHAT[what],
        "power": power_of_two(shift) if moves else "",
        "total": total,
        "broken": broken(total),
        "grid": _grid(axis),
        "bins": _bar_path(total, axis, shift),
        "strips": _strips(axis),
        "strips_height": _STRIP * len(LIMITS),
        "lost": {name: found for name, found in shares.items() if found},
        "shares": Table(
            ("In", "to zero", "subnormal", "kept", "overflow"),
            [(name, _cells(found), False) for name, found in shares.items()],
        ),
        "tensors": Table(("Tensor", f"to zero in {format}", "overflow", "largest", "not finite"), rows),
        "of": len(tracks),
        "data": moves and {**data, "limits": LIMITS},
    }


def broken(histogram: Histogram) -> int:
    return histogram.infinities + histogram.nans


def _cells(shares: Shares | None) -> list[str]:
    if shares is None:
        return ["–"] * 4
    return [share_text(one) for one in (shares.underflow, shares.subnormal, shares.normal, shares.overflow)]


def _grid(axis: Axis) -> list[Markup]:
    parts = [across("100%", "base")]
    for decade, label in _PERCENT.items():
        y = f"{100 * decade / DECADES:.2f}%"
        parts += [across(y, "grid"), text(label, -6, y, "label end", "0.32em")]
    every = 10 if axis.high - axis.low > 36 else 5
    for exponent in range(-(-int(axis.low) // every) * every, int(axis.high) + 1, every):
        x = axis.at(exponent)
        parts += [down(x, "grid"), text(power_of_two(exponent), x, "100%", dy="1.45em")]
    return parts


def _strips(axis: Axis) -> list[Markup]:
    """A strip for each format: pale where it has fewer bits, full where it has all."""
    parts = []
    for place, (name, limits) in enumerate(LIMITS.items()):
        y = place * _STRIP
        parts.append(text(name, -6, y + 9, "label end", "0.32em"))
        ends = (("subnormal", limits.zero, limits.normal), ("normal", limits.normal, limits.overflow))
        for style, start, stop in ends:
            if axis.at(start) != axis.at(stop):
                title = f"{name}: {style} from 2^{start} to 2^{stop}"
                parts.append(box(axis, start, stop, y + 2, _STRIP - 4, f"strip {style}", title))
    return parts


def _bar_path(histogram: Histogram, axis: Axis, shift: int) -> str:
    """One path for all bars of numbers times ``2**shift``, in `UNITS`: a bar's height is the logarithm of its share."""
    bins = [0] * int(axis.high - axis.low)
    for exponent, number in enumerate(histogram.counts, histogram.lowest + shift - int(axis.low)):
        bins[min(len(bins) - 1, max(0, exponent))] += number
    total, width, parts = sum(bins), UNITS / max(1, len(bins)), []
    for place, number in enumerate(bins):
        if number:
            height = max(0.004, 1 + math.log10(number / total) / DECADES)
            edges = (place * width, UNITS * (1 - height), (place + 1) * width)
            left, top, right = (math.floor(edge + 0.5) for edge in edges)  # as the script's Math.round
            parts.append(f"M{left} 1000V{top}H{right}V1000Z")
    return "".join(parts)


def heat(what: str, ranges: Ranges, format: str) -> dict[str, Any] | None:
    """A map of tensors by watched steps: how much of each is lost in a format; None for fewer than two steps."""
    tracks = ranges.of(what)
    columns = sorted({column for track in tracks for column in track.columns})
    if len(columns) < 2:
        return None
    lost, bad = np.full((len(tracks), len(columns)), np.nan), np.zeros((len(tracks), len(columns)), dtype=int)
    for row, track in enumerate(tracks):
        at = np.searchsorted(columns, track.columns)
        lost[row, at], bad[row, at] = track.lost[format], track.broken
    # Those that lose most, in the model's order.
    weights = [(any(track.broken), float(np.nan_to_num(track.mean_lost(format)))) for track in tracks]
    by_weight = sorted(range(len(tracks)), key=weights.__getitem__, reverse=True)
    shown, listed = sorted(by_weight[:LINES]), sorted(by_weight[:LISTED])
    size = math.ceil(len(columns) / COLUMNS)
    starts = range(0, len(columns), size)
    worst = np.fmax.reduceat(lost[shown], starts, axis=1)
    rows = []
    for track in (tracks[place] for place in listed):
        share, column = track.worst_lost(format)
        numbers = [share_text(one) for one in (*map(track.mean_lost, FORMATS), share)]
        numbers += [f"{ranges.updates[column]:,}" if column >= 0 else "–", f"{sum(track.broken):,}"]
        rows.append((track.label, numbers, any(track.broken)))
    head = ["Tensor", *(f"{name}, mean" for name in FORMATS), f"{format}, most", "at update", "inf or NaN"]
    return {
        "title": "Updates lost by weights" if what == RATIO else f"{what.capitalize()}: lost",
        "is_ratio": what == RATIO,
        "format": format,
        "every": size,
        "described": _described(tracks, format, ranges),
        "broken": bad.any(),
        "labels": [tracks[place].label for place in shown],
        "width": len(starts),
        "cells": cells(levels(worst, np.add.reduceat(bad[shown], starts, axis=1))),
        "updates": (ranges.updates[columns[0]], ranges.updates[columns[-1]]),
        "of": len(tracks),
        "table": Table(head, rows),
    }


def levels(lost: Array, broken: NDArray[np.int_]) -> NDArray[np.str_]:
    """The character of each cell of a map: 0 to 6 for a share lost, `BROKEN`, or `UNSEEN` for NaN."""
    found = np.searchsorted(UP_TO, lost - 1e-9).astype(str)
    return np.where(broken > 0, BROKEN, np.where(np.isnan(lost), UNSEEN, found))


def cells(levels: NDArray[np.str_]) -> list[Markup]:
    """A map, a unit for each cell: a path for each level, of runs of equal cells."""
    paths: dict[str, str] = {}
    for y, line in enumerate(levels.tolist()):
        for run in re.finditer(r"(.)\1*", "".join(line)):
            width = len(run[0])
            paths[run[1]] = paths.get(run[1], "") + f"M{run.start()} {y}h{width}v1h{-width}z"
    return [shape("path", f"h{name}", d=path) for name, path in sorted(paths.items())]


def _described(tracks: Sequence[Track], format: str, ranges: Ranges) -> str:
    """First the elements that are not finite at all, then the largest share lost."""
    bad = [track for track in tracks if any(track.broken)]
    told = ""
    if bad:
        column = min(next(c for c, broken in zip(track.columns, track.broken) if broken) for track in bad)
        broken = sum(sum(track.broken) for track in bad)
        elements = counted(sum(track.total.elements for track in tracks), "element")
        what = "NaN" if all(track.what == RATIO for track in bad) else "infinite or NaN"
        told = (
            f"{broken:,} of {elements} {'is' if broken == 1 else 'are'} {what}, "
            f"in {len(bad):,} of {counted(len(tracks), 'tensor')}, first at update {ranges.updates[column]:,}."
        )
    worst = max(tracks, key=lambda track: track.worst_lost(format)[0])
    share, column = worst.worst_lost(format)
    if share <= 0:
        return told or f"Nothing is lost in {format}."
    most = f"{share_text(share)} of {worst.label}, at update {ranges.updates[column]:,}."
    return f"{told} Of the finite ones the most is {most}" if told else f"The most is {most}"
