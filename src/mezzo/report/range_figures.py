"""Where the numbers of a watched run lie, as figures: exponents by kind of tensor, shares lost, updates over weights.

The script picks one tensor in place of all, moves gradients by another loss scale, and shows maps in another format.
Without it the figures show all tensors, gradients at the loss scale of the run's last update.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mezzo.core.ranges import GRADIENTS, WHAT, Histogram, shift_of
from mezzo.report.charts import (
    DECADES,
    Axis,
    Chart,
    Key,
    Shape,
    Table,
    across,
    bar_height,
    bar_path,
    cells,
    down,
    level,
    shape,
    text,
)
from mezzo.report.numbers import (
    count,
    counted,
    percent,
    power_of_two,
    printable,
    share_text,
    significant,
)
from mezzo.report.ranges import FORMATS, LIMITS, RATIO, Ranges, Track, together
from mezzo.report.run import Run
from mezzo.report.series import Array, sample

LISTED = 150
"""Rows of a table of tensors; those with the most to lose come first."""
LINES, COLUMNS = 48, 72
"""Tensors in a map, of more those that lose most; columns of a map, of more steps each is the worst of its share."""
FIGURES, POINTS = 36, 80
"""Of update ratios: figures drawn, and steps in each."""
MOVES = (("bf16", -8, "margin"), ("fp16", -11, "skip"))
"""Formats whose weights move by every ratio above 2 to this power, and by none below half of that."""
# Gradients first: they are what a format loses first.
ORDER = ("activation gradient", "weight gradient", "activation", "weight")
MAPS = ("activation gradient", "activation", "weight gradient", RATIO)
SLIDER = (-24, 32)
"""The ends of the loss scale's slider as powers of two, moved out for a run that went further; from 0 on where no scale
was below."""
_WINDOW = (-72, 44)
_PERCENT = {0: "100\u00a0%", 2: "1\u00a0%", 4: "0.01\u00a0%", 6: "10⁻⁴\u00a0%"}
_STRIP = 17


def range_figures(run: Run) -> dict[str, Any]:
    """All figures of one watched run, for the template."""
    seen = run.ranges
    formats = {what: _format(seen, what) for what in WHAT}
    # An update that was not watched may have changed the scale since.
    scales = [update.loss_scale for update in run.updates] or seen.scales
    shift = shift_of(next((scale for scale in reversed(scales) if 0 < scale < math.inf), 1.0))
    used = [shift, *(shift_of(scale) for scale in scales)]
    least = min(0, *used)
    to = f" to {seen.updates[-1]:,}" if len(seen.updates) > 1 else ""
    return {
        "name": run.name,
        "told": f"{counted(len(seen.updates), 'watched step')}, update {seen.updates[0]:,}{to}; "
        f"{counted(len(seen.tracks), 'tensor')}. Histograms are of all watched steps together; zeros are left out.",
        "shift": shift,
        "slider": (min(SLIDER[0], least) if least < 0 else 0, max(SLIDER[1], *used)),
        "format": formats["activation gradient"],
        "formats": FORMATS,
        "exponents": [
            exponents(what, tracks, formats[what], shift) for what in ORDER if (tracks := seen.of(what))
        ],
        "maps": [found for what in MAPS if (found := heat(what, seen, formats[what]))],
        "ratios": update_ratios(seen),
    }


def _format(seen: Ranges, what: str) -> str:
    """The low format that a kind of tensor has in the run; where it has none, that which the run computes in."""
    for kinds in ((what,), GRADIENTS, ("activation",)):
        found = Counter(track.format for kind in kinds for track in seen.of(kind) if track.format in FORMATS)
        if found:
            return found.most_common(1)[0][0]
    return FORMATS[0]


@dataclass(frozen=True)
class Exponents:
    """How often each exponent occurs in a kind of tensor, over strips that show what each format can hold."""

    title: str
    sentence: str
    scale: str
    described: str
    grid: list[Shape]
    bins: str
    ends: list[Shape]
    strips: list[Shape]
    strips_height: int
    broken: bool
    not_finite: str
    shares: Table
    told: str
    tensors: Table
    tensors_name: str
    data: dict[str, Any]


def exponents(what: str, tracks: Sequence[Track], format: str, shift: int) -> Exponents:
    """The figure of one kind.

    Args:
        what: a key of `WHAT`.
        tracks: the tensors, in the model's order; at least one.
        format: the one whose ends are drawn, and by which the table is sorted.
        shift: log2 of the loss scale at which gradients are drawn.
    """
    moves = what in GRADIENTS
    shift = shift if moves else 0
    total = together(tracks)
    # Everything that occurs, and the ends of fp16 and the fp8 formats in any case. What lies beyond is at the edge.
    low = max(_WINDOW[0], min(total.lowest + shift - 1, -28))
    high = min(_WINDOW[1], max(total.lowest + len(total.counts) + shift + 1, 20))
    axis = Axis(low, high)
    worst = sorted(tracks, key=lambda track: -_gone(track, format, shift))[:LISTED]
    name = f"Each of {counted(len(tracks), 'tensor')}"
    if len(worst) < len(tracks):
        name = f"The {len(worst):,} with the most to lose, of {len(tracks):,} tensors"
    shares = {one: total.shares(one, shift) for one in FORMATS}
    described = "; ".join(
        f"in {one} {percent(found.underflow)} become zero and {percent(found.overflow)} overflow"
        for one, found in shares.items()
        if found
    )
    described = f"Of all tensors together, {described}." if described else "No finite number but zero."
    broken, elements = _broken(total), total.elements
    not_finite = (
        f"{broken:,} of {counted(elements, 'number')} ({share_text(broken / elements if elements else 0.0)}) "
        f"{'is' if broken == 1 else 'are'} infinite or NaN already. The shares below are of the finite ones."
    )
    return Exponents(
        title=what.capitalize(),
        sentence=f"{WHAT[what][0].upper()}{WHAT[what][1:]}.",
        scale=power_of_two(shift) if moves else "",
        described=f"{not_finite} {described}" if broken else described,
        grid=_grid(axis),
        bins=bar_path(_bins(total, axis, shift)),
        ends=[
            down(axis.at(edge), "edge skip", words)
            for edge, words in (
                (LIMITS[format].zero, f"below: zero in {format}"),
                (LIMITS[format].overflow, f"from here on: beyond {format}"),
            )
            if low < edge < high
        ],
        strips=_strips(axis),
        strips_height=_STRIP * len(LIMITS),
        broken=bool(broken),
        not_finite=not_finite,
        shares=Table(
            ("In", "to zero", "subnormal", "kept", "overflow"),
            [
                (
                    one,
                    [
                        share_text(part)
                        for part in (found.underflow, found.subnormal, found.normal, found.overflow)
                    ]
                    if found
                    else ["–"] * 4,
                    False,
                    None,
                )
                for one, found in shares.items()
            ],
        ),
        told=f"{counted(elements, 'number')}: {count(total.zeros)} of them zero, "
        f"{count(broken)} infinite or NaN, the largest {significant(total.largest, 3)}.",
        tensors=_tensors(worst, format, shift, axis),
        tensors_name=name,
        data={
            "low": low,
            "high": high,
            "moves": moves,
            "limits": {name: [one.zero, one.normal, one.overflow] for name, one in LIMITS.items()},
            "names": [printable(track.label) for track in worst],
            "rows": [_plain(total), *(_plain(track.total) for track in worst)],
        },
    )


def _broken(histogram: Histogram) -> int:
    return histogram.infinities + histogram.nans


def _gone(track: Track, format: str, shift: int) -> float:
    shares = track.total.shares(format, shift)
    return (shares.underflow + shares.overflow if shares else 0.0) + (1.0 if _broken(track.total) else 0.0)


def _bins(histogram: Histogram, axis: Axis, shift: int) -> list[int]:
    """A count for each exponent of the axis, of numbers times ``2**shift``."""
    found = [0] * int(axis.high - axis.low)
    for exponent, number in enumerate(histogram.counts, histogram.lowest + shift - int(axis.low)):
        found[min(len(found) - 1, max(0, exponent))] += number
    return found


def _plain(histogram: Histogram) -> list[float]:
    """A histogram for the script: lowest exponent, zeros, infinities and NaNs, largest, and the counts."""
    largest = float(f"{histogram.largest:.4g}")
    return [histogram.lowest, histogram.zeros, _broken(histogram), largest, *histogram.counts]


def _grid(axis: Axis) -> list[Shape]:
    parts = []
    for decade, label in _PERCENT.items():
        y = f"{100 * decade / DECADES:.2f}%"
        parts += [across(y, "grid"), text(label, -6, y, "label end", "0.32em")]
    every = 10 if axis.high - axis.low > 36 else 5
    for exponent in range(-(-int(axis.low) // every) * every, int(axis.high) + 1, every):
        x = axis.at(exponent)
        parts += [down(x, "grid"), text(power_of_two(exponent), x, "100%", dy="1.45em")]
    return [*parts, across("100%", "base")]


def _strips(axis: Axis) -> list[Shape]:
    """A strip for each format: pale where it has fewer bits, full where it has all."""
    parts = []
    for place, (name, limits) in enumerate(LIMITS.items()):
        top = place * _STRIP
        parts.append(text(name, -6, top + 9, "label end", "0.32em"))
        for start, stop, style in (
            (limits.zero, limits.normal, "subnormal"),
            (limits.normal, limits.overflow, "normal"),
        ):
            left, right = axis.at(start), axis.at(stop)
            if left != right:
                width = f"{float(right[:-1]) - float(left[:-1]):.2f}%"
                title = f"{name}: {style} from 2^{start} to 2^{stop}"
                parts.append(
                    shape("rect", f"strip {style}", title, x=left, y=top + 2, width=width, height=_STRIP - 4)
                )
    return parts


def _tensors(tracks: Sequence[Track], format: str, shift: int, axis: Axis) -> Table:
    """Each tensor with its own small histogram and what the format makes of it."""
    rows = []
    for track in tracks:
        shares, broken = track.total.shares(format, shift), _broken(track.total)
        lost = [share_text(shares.underflow), share_text(shares.overflow)] if shares else ["–", "–"]
        numbers = [*lost, significant(track.total.largest, 3), count(broken)]
        rows.append((track.label, numbers, bool(broken), _small(track.total, axis, shift, format)))
    return Table(("Tensor", "Exponents", f"to zero in {format}", "overflow", "largest", "not finite"), rows)


def _small(total: Histogram, axis: Axis, shift: int, format: str) -> dict[str, Any]:
    """One outline in a unit for each exponent, from the first that occurs to the last."""
    bins = _bins(total, axis, shift)
    number = sum(bins)
    used = [place for place, one in enumerate(bins) if one]
    shapes = []
    if used:
        heights = [
            bins[place] and max(0.02, bar_height(bins[place] / number))
            for place in range(used[0], used[-1] + 1)
        ]
        path = "".join(f"V{20 - round(20 * height)}h1" for height in heights)
        shapes.append(shape("path", "fill s1", d=f"M{used[0]} 20{path}V20Z"))
    for edge in (LIMITS[format].zero, LIMITS[format].overflow):
        if axis.low < edge < axis.high:
            shapes.append(shape("path", "edge skip", d=f"M{edge - int(axis.low)} 0V20"))
    return {"width": len(bins), "shapes": shapes}


@dataclass(frozen=True)
class Heat:
    """Tensors by watched steps: how much of each is lost in a format, with a colour for each range of shares."""

    title: str
    format: str
    unit: str
    described: str
    broken: bool
    labels: list[str]
    width: int
    cells: list[Shape]
    first: int
    last: int
    left_out: str
    table: Table
    table_name: str
    data: dict[str, Any]


def heat(what: str, ranges: Ranges, format: str) -> Heat | None:
    """The map of one kind of tensor in a format, or None where it was seen in fewer than two steps."""
    tracks = ranges.of(what)
    columns = sorted({column for track in tracks for column in track.columns})
    if len(columns) < 2:
        return None
    size = math.ceil(len(columns) / COLUMNS)
    groups = [columns[start : start + size] for start in range(0, len(columns), size)]
    shown, listed = _worst(tracks, format, LINES), _worst(tracks, format, LISTED)
    levels = {name: [_levels(track, name, groups) for track in shown] for name in FORMATS}
    updates = [ranges.updates[group[0]] for group in groups]
    most = {name: _described(tracks, name, ranges) for name in FORMATS}
    unit = (
        "Share of the updates too small to move a weight stored in this format, estimated from their ratios"
        if what == RATIO
        else "Share of the numbers that round to zero or overflow in this format"
    )
    if size > 1:
        unit += f"; each column is the worst of up to {size} watched steps"
    cut, every = len(listed) < len(tracks), "These figures as a table, for every format"
    return Heat(
        title="Updates lost by weights" if what == RATIO else f"{what.capitalize()}: lost",
        format=format,
        unit=f"{unit}.",
        described=most[format],
        broken=any(any(track.broken) for track in tracks),
        labels=[track.label for track in shown],
        width=len(groups),
        cells=cells(levels[format]),
        first=updates[0],
        last=ranges.updates[columns[-1]],
        left_out=f"{len(shown)} of {len(tracks):,} tensors: those that lose most."
        if len(shown) < len(tracks)
        else "",
        table=_heat_table(listed, format, ranges),
        table_name=f"{every}: the {len(listed):,} that lose most" if cut else every,
        data={
            "names": [printable(track.label) for track in shown],
            "updates": updates,
            "levels": levels,
            "most": {name: printable(words) for name, words in most.items()},
        },
    )


def _worst(tracks: Sequence[Track], format: str, most: int) -> list[Track]:
    """Those that lose most in a format, in the order in which they came."""

    def weight(place: int) -> tuple[bool, float]:
        mean = tracks[place].mean_lost(format)
        return any(tracks[place].broken), 0.0 if math.isnan(mean) else mean

    kept = sorted(range(len(tracks)), key=weight, reverse=True)[:most]
    return [tracks[place] for place in sorted(kept)]


def _levels(track: Track, format: str, groups: Sequence[Sequence[int]]) -> str:
    """A line of the map: of each column the worst."""
    seen = dict(zip(track.columns, zip(track.lost[format], track.broken)))
    line = ""
    for group in groups:
        found = [seen[column] for column in group if column in seen]
        shares = [share for share, _ in found if not math.isnan(share)]
        line += level(max(shares, default=math.nan), sum(broken for _, broken in found))
    return line


def _described(tracks: Sequence[Track], format: str, ranges: Ranges) -> str:
    """What is lost at most; before it, what is beyond any share: elements that are not finite at all."""
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
    found = [(*track.worst_lost(format), track.label) for track in tracks]
    share, column, label = max(found, key=lambda one: one[0] if one[1] >= 0 else -1.0)
    if column < 0 or share == 0:
        return told or f"Nothing is lost in {format}."
    most = f"{share_text(share)} of {label}, at update {ranges.updates[column]:,}."
    return f"{told} Of the finite ones the most is {most}" if told else f"The most is {most}"


def _heat_table(tracks: Sequence[Track], format: str, ranges: Ranges) -> Table:
    rows = []
    for track in tracks:
        share, column = track.worst_lost(format)
        at = f"{ranges.updates[column]:,}" if column >= 0 else "–"
        means = [share_text(track.mean_lost(name)) for name in FORMATS]
        broken = sum(track.broken)
        rows.append((track.label, [*means, share_text(share), at, f"{broken:,}"], bool(broken), None))
    head = ("Tensor", *(f"{name}, mean" for name in FORMATS), f"{format}, most", "at update", "inf or NaN")
    return Table(head, rows)


def update_ratios(ranges: Ranges) -> dict[str, Any] | None:
    """Updates over weights, a chart for each tensor, those with the most lost updates first.

    None where fewer than two steps have any.
    """
    tracks = [track for track in ranges.of(RATIO) if len(track.columns) > 1]
    if not tracks:
        return None
    means = {id(track): track.mean_lost("bf16") for track in tracks}
    tracks.sort(key=lambda track: 0.0 if math.isnan(means[id(track)]) else -means[id(track)])
    charts = [_ratio_chart(track, ranges) for track in tracks[:FIGURES]]
    rows = []
    for track in tracks[:LISTED]:
        medians = [track.quantiles[1][end] for end in (0, -1)]
        cells = [f"2^{one:.1f}" if math.isfinite(one) else "–" for one in medians]
        cells += [share_text(track.mean_lost(name)) for name, _, _ in MOVES]
        rows.append((track.label, cells, False, None))
    cut = f"{LISTED} of " if len(tracks) > LISTED else ""
    return {
        "charts": charts,
        "table": Table(
            (
                "Tensor",
                "first median",
                "last median",
                *(f"lost in {name}, estimated" for name, _, _ in MOVES),
            ),
            rows,
        ),
        "name": f"Update ratios of {cut}{len(tracks):,} tensors as a table",
    }


def _ratio_chart(track: Track, ranges: Ranges) -> Chart:
    picks = sample(len(track.columns), POINTS)
    at = np.array([ranges.updates[track.columns[pick]] for pick in picks], dtype=float)
    low, middle, high = (
        np.exp2(np.clip(np.array([values[pick] for pick in picks], dtype=float), -200, 200))
        for values in track.quantiles
    )
    lost = " and ".join(
        f"{share_text(track.mean_lost(name))} of the updates would be lost in {name}" for name, _, _ in MOVES
    )
    ends = [one for part in (0, 2) for one in track.quantiles[part] if math.isfinite(one)]
    bottom, top = min([-14.0, *ends]), max([-4.0, *ends])
    chart = Chart(
        title=track.label,
        described=f"{_course(at, middle)} On average an estimated {lost}.",
        x=Axis(float(at[0]), max(float(at[-1]), float(at[0]) + 1.0)),
        y=Axis(2.0 ** (math.floor(max(bottom, -60)) - 1), 2.0 ** (math.ceil(min(top, 20)) + 1), log=True),
        x_name="update",
        unit="Update over weight.",
        height="low",
        powers=True,
    )
    chart.notes.append(chart.described)
    chart.band(at, low, high, "s1", "5 % to 95 %")
    chart.line(at, middle, "s1", "median")
    for name, power, style in MOVES:
        chart.rule(2.0**power, f"edge {style}")
        words = f"{power_of_two(power)}: {name} loses none above, all below {power_of_two(power - 1)}"
        chart.keys.append(Key(style, "edge", words))
    return chart


def _course(at: Array, middle: Array) -> str:
    """From where to where the median goes; a step has none where nothing moved but weights that were 0."""
    seen = np.flatnonzero(np.isfinite(middle)).tolist()
    if not seen:
        return "No update has a ratio: nothing moved, or only weights that were 0."
    ends = [
        power_of_two(math.log2(middle[place])) + (f" at update {int(at[place]):,}" if place != end else "")
        for place, end in ((seen[0], 0), (seen[-1], len(middle) - 1))
    ]
    told = f"The median ratio goes from {ends[0]} to {ends[1]}."
    if len(seen) < len(middle):
        told += " A step has none where nothing moved, or only weights that were 0."
    return told
