"""Tensors by watched steps: how much of each is lost in a format, as a map with a colour for each range of shares."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from mezzo.report.charts.exponents import share_text
from mezzo.report.markup import Markup, element, printable
from mezzo.report.numbers import counted
from mezzo.report.ranges import FORMATS, RATIO, Ranges, Track

LINES = 48
"""Tensors in a map; of more, those that lose most, in the model's order."""
COLUMNS = 72
"""Columns of a map; of more steps, each column is the worst of its share of them."""
LISTED = 150
UP_TO = (0.0, 0.001, 0.01, 0.05, 0.2, 0.5, 1.0)
"""A cell's level is the first of these that its share does not exceed."""
NAMES = ("none", "to 0.1 %", "to 1 %", "to 5 %", "to 20 %", "to 50 %", "over 50 %")
BROKEN = "x"
UNSEEN = "."
HEIGHT = 15


def heat(what: str, ranges: Ranges, format: str) -> Markup | None:
    """The figure of one kind, or None where it was seen in fewer than two steps.

    Args:
        what: a key of `mezzo.core.ranges.WHAT`.
        ranges: of the run.
        format: the one that is shown without a script.
    """
    tracks = ranges.of(what)
    columns = sorted({column for track in tracks for column in track.columns})
    if len(columns) < 2:
        return None
    shown = _worst(tracks, format, LINES)
    groups = _groups(columns)
    levels = {name: [_levels(track, name, groups) for track in shown] for name in FORMATS}
    updates = [ranges.updates[group[0]] for group in groups]
    title = "Updates lost by weights" if what == RATIO else f"{what.capitalize()}: lost"
    data = {
        "names": [printable(track.label) for track in shown],
        "updates": updates,
        "levels": levels,
        "most": {name: printable(_described(tracks, name, ranges)) for name in FORMATS},
    }
    unit = (
        "Share of the updates too small to move a weight stored in this format, estimated from their ratios"
        if what == RATIO
        else "Share of the numbers that round to zero or overflow in this format"
    )
    if len(columns) > len(groups):
        unit += f"; each column is the worst of up to {len(groups[0])} watched steps"
    names = element(
        "ol",
        [element("li", element("bdi", track.label), title=track.label) for track in shown],
        class_="names",
    )
    drawing = element(
        "svg",
        element("title", f"{title} in {format}"),
        element("desc", _described(tracks, format, ranges)),
        _cells(levels[format]),
        viewBox=f"0 0 {len(groups)} {len(shown)}",
        preserveAspectRatio="none",
        height=HEIGHT * len(shown),
        class_="heatmap",
        role="img",
    )
    return element(
        "figure",
        element(
            "figcaption",
            element("h4", f"{title} in ", element("span", format, class_="chosen")),
            element("p", unit + ".", class_="unit"),
        ),
        element(
            "p",
            _described(tracks, format, ranges),
            class_="note most" + (" bad" if any(any(track.broken) for track in tracks) else ""),
        ),
        _legend(),
        element("div", names, drawing, class_="heatbox"),
        element(
            "p",
            element("span", f"update {updates[0]:,}"),
            element("span", f"{ranges.updates[columns[-1]]:,}"),
            class_="heataxis",
        ),
        element("p", f"{len(shown)} of {len(tracks):,} tensors: those that lose most.", class_="note")
        if len(shown) < len(tracks)
        else None,
        _table(_worst(tracks, format, LISTED), len(tracks), format, ranges),
        class_="plot heat",
        data_heat=json.dumps(data, separators=(",", ":")),
    )


def level(share: float, broken: int = 0) -> str:
    """The character of a cell.

    >>> [level(share) for share in (0.0, 0.0005, 0.03, 1.0)], level(0.0, broken=3), level(float("nan"))
    (['0', '1', '3', '6'], 'x', '.')
    """
    if broken:
        return BROKEN
    if math.isnan(share):
        return UNSEEN
    return str(next(place for place, edge in enumerate(UP_TO) if share <= edge + 1e-9))


def _worst(tracks: Sequence[Track], format: str, most: int) -> list[Track]:
    """Those that lose most in a format, in the order in which they came."""
    if len(tracks) <= most:
        return list(tracks)

    def weight(track: Track) -> tuple[bool, float]:
        mean = track.mean_lost(format)
        return any(track.broken), 0.0 if math.isnan(mean) else mean

    kept = {id(track) for track in sorted(tracks, key=weight, reverse=True)[:most]}
    return [track for track in tracks if id(track) in kept]


def _groups(columns: Sequence[int]) -> list[list[int]]:
    size = math.ceil(len(columns) / COLUMNS)
    return [list(columns[start : start + size]) for start in range(0, len(columns), size)]


def _levels(track: Track, format: str, groups: Sequence[Sequence[int]]) -> str:
    """A line of the map: of each column the worst."""
    seen = dict(zip(track.columns, zip(track.lost[format], track.broken)))
    line = ""
    for group in groups:
        cells = [seen[column] for column in group if column in seen]
        shares = [share for share, _ in cells if not math.isnan(share)]
        line += level(max(shares, default=math.nan), sum(broken for _, broken in cells))
    return line


def _cells(lines: Sequence[str]) -> list[Markup]:
    """A path for each level: runs of equal cells, a unit high."""
    paths: dict[str, list[str]] = {}
    for y, line in enumerate(lines):
        start = 0
        for x in range(1, len(line) + 1):
            if x == len(line) or line[x] != line[start]:
                name = "u" if line[start] == UNSEEN else line[start]
                paths.setdefault(name, []).append(f"M{start} {y}h{x - start}v1h{start - x}z")
                start = x
    return [element("path", d="".join(parts), class_=f"h{name}") for name, parts in sorted(paths.items())]


def _legend() -> Markup:
    entries = [(f"h{place}", name) for place, name in enumerate(NAMES)]
    entries += [(f"h{BROKEN}", "holds inf or NaN"), ("hu", "not seen")]
    return element(
        "ul",
        [
            element(
                "li",
                element(
                    "svg",
                    element("rect", width=14, height=12, class_=style),
                    width=14,
                    height=12,
                    class_="swatch",
                    aria_hidden="true",
                ),
                name,
            )
            for style, name in entries
        ],
        class_="legend",
    )


def _described(tracks: Sequence[Track], format: str, ranges: Ranges) -> str:
    """What is lost at most; before it, what is beyond any share: elements that are not finite at all."""
    bad = [track for track in tracks if any(track.broken)]
    told = ""
    if bad:
        column = min(next(c for c, broken in zip(track.columns, track.broken) if broken) for track in bad)
        broken = sum(sum(track.broken) for track in bad)
        elements = sum(track.total.elements for track in tracks)
        what = "NaN" if all(track.what == RATIO for track in bad) else "infinite or NaN"
        told = (
            f"{broken:,} of {counted(elements, 'element')} {'is' if broken == 1 else 'are'} {what}, "
            f"in {len(bad):,} of {counted(len(tracks), 'tensor')}, first at update {ranges.updates[column]:,}."
        )
    worst = max(
        (
            (share, column, track)
            for track in tracks
            for share, column in [track.worst_lost(format)]
            if column >= 0
        ),
        key=lambda found: found[0],
        default=None,
    )
    if worst is None or worst[0] == 0:
        return told or f"Nothing is lost in {format}."
    share, column, track = worst
    most = f"{share_text(share)} of {track.label}, at update {ranges.updates[column]:,}."
    return f"{told} Of the finite ones the most is {most}" if told else f"The most is {most}"


def _table(tracks: Sequence[Track], all_of_them: int, format: str, ranges: Ranges) -> Markup:
    head = ("Tensor", *(f"{name}, mean" for name in FORMATS), f"{format}, most", "at update", "inf or NaN")
    body = []
    for track in tracks:
        share, column = track.worst_lost(format)
        body.append(
            element(
                "tr",
                element("th", element("code", track.label), scope="row"),
                [element("td", share_text(track.mean_lost(name))) for name in FORMATS],
                element("td", share_text(share)),
                element("td", f"{ranges.updates[column]:,}" if column >= 0 else "–"),
                element("td", f"{sum(track.broken):,}"),
                class_="departs" if any(track.broken) else None,
            )
        )
    table = element(
        "table",
        element("thead", element("tr", [element("th", word, scope="col") for word in head])),
        element("tbody", body),
        class_="figures",
    )
    name = "These figures as a table, for every format"
    if len(tracks) < all_of_them:
        name += f": the {len(tracks):,} that lose most"
    return element(
        "details",
        element("summary", name),
        element("div", table, class_="scroll", tabindex=0, role="region", aria_label=name),
        class_="numbers",
    )
