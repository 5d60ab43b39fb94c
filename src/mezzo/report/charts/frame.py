"""The frame that every curve is drawn in: an SVG as wide as the page lets it be, whose text keeps its size.

Curves live in an inner drawing of 1000 by 1000 units that is stretched to the frame; labels, markers and
grid lines are placed by percentages in the outer one, which is not stretched. So one drawing is readable at
340 pixels, at 1200 and on paper, without a script. Numbers for the read-out travel in an attribute, escaped
like any text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mezzo.report.charts.axis import Axis, power_of_two, tick_label
from mezzo.report.markup import Markup, element, printable
from mezzo.report.numbers import significant
from mezzo.report.series import Array, sample

UNITS = 1000.0
TABLE_ROWS = 13


@dataclass(frozen=True)
class Key:
    """One entry of a legend: the colour's class (``s0`` is FP32), how it is drawn, and its name."""

    series: str
    shape: str
    name: str


@dataclass
class Frame:
    """A figure under construction: add bands, lines and marks, then `render`.

    Args:
        title: the figure's heading.
        described: what a reader who cannot see it should know, in a sentence or two.
        x, y: the axes.
        x_name, y_name: what they measure.
        height: ``tall`` or ``low``.
        powers: whether heights are powers of two, and marked so.
    """

    title: str
    described: str
    x: Axis
    y: Axis
    x_name: str
    y_name: str
    height: str = "tall"
    powers: bool = False
    keys: list[Key] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _inner: list[Markup] = field(default_factory=list)
    _outer: list[Markup] = field(default_factory=list)
    _readout: dict[str, object] = field(default_factory=dict)
    _table: Markup | None = None

    def band(self, x: Array, low: Array, high: Array, series: str, name: str = "") -> None:
        """Shade between two curves; a gap in either is a gap."""
        shapes = []
        for part in _pieces(np.isfinite(low) & np.isfinite(high)):
            xs, tops, bottoms = x[part], high[part], low[part]
            if len(xs) == 1:  # one step alone has no width to shade
                continue
            path = _path(self._points(xs, tops)) + "L" + _path(self._points(xs, bottoms)[::-1])[1:] + "Z"
            shapes.append(path)
        if shapes:
            self._inner.append(element("path", d="".join(shapes), class_=f"band {series}"))
        if name:
            self.keys.append(Key(series, "band", name))

    def line(self, x: Array, y: Array, series: str, name: str = "", style: str = "line") -> None:
        """Draw a curve; a gap stays a gap, and a value alone between gaps is a dot."""
        pieces = []
        for part in _pieces(np.isfinite(y)):
            points = self._points(x[part], y[part])
            pieces.append(_path(points if len(points) > 1 else np.repeat(points, 2, axis=0)))
        if pieces:
            self._inner.append(element("path", d="".join(pieces), class_=f"{style} {series}"))
        if name:
            self.keys.append(Key(series, style, name))

    def span(self, low: float, high: float, start: float, stop: float, series: str, name: str) -> None:
        """Rule two heights from edge to edge, and shade what lies between them from ``start`` to ``stop``."""
        top, bottom = (1 - float(np.clip(self.y.place_one(v), 0, 1)) for v in (high, low))
        left, right = (float(np.clip(self.x.place_one(v), 0, 1)) for v in (start, stop))
        shape = {
            "x": _percent(left),
            "y": _percent(top),
            "width": _percent(right - left),
            "height": _percent(bottom - top),
        }
        self._outer.insert(0, element("rect", class_=f"band {series}", **shape))
        for edge in {high, low}:
            self.rule(edge, f"edge {series}")
        self.keys.append(Key(series, "band", name))

    def rule(self, height: float, style: str) -> None:
        """A horizontal line at one height, if the axis reaches it."""
        place = 1 - self.y.place_one(height)
        if 0 <= place <= 1:
            self._outer.append(
                element("line", x1=0, x2="100%", y1=_percent(place), y2=_percent(place), class_=style)
            )

    def mark(self, x: float, y: float, series: str, label: str, shape: str = "dot") -> None:
        """A dot, or a cross, at a point, with a label on hovering; above the frame it sits at the top."""
        left = _percent(float(np.clip(self.x.place_one(x), 0, 1)))
        place = 1 - self.y.place_one(y) if math.isfinite(y) else 0.0
        top = _percent(float(np.clip(place, 0, 1)))
        title = element("title", label)
        if shape == "cross":
            self._outer.append(
                element(
                    "svg",
                    # A finger's width to point at: the strokes alone would be hard to meet.
                    element("rect", title, x=-9, y=-9, width=18, height=18, class_="target"),
                    element("path", d="M-5-5L5 5M-5 5L5-5", class_=f"cross {series}"),
                    x=left,
                    y=top,
                    overflow="visible",
                )
            )
        else:
            self._outer.append(element("circle", title, cx=left, cy=top, r=4, class_=f"dot {series}"))

    def tick(self, x: float, series: str, label: str = "") -> None:
        """A vertical stroke through the whole frame at one x."""
        left = _percent(self.x.place_one(x))
        title = element("title", label) if label else None
        self._outer.append(element("line", title, x1=left, x2=left, y1=0, y2="100%", class_=f"tick {series}"))

    def readout(self, x: Sequence[float], columns: Sequence[tuple[str, str, Sequence[float]]]) -> None:
        """Give the numbers behind the curves, (name, series class, values), for pointer and table."""
        self._readout = {
            "x": [float(value) for value in x],
            "low": self.x.low,
            "high": self.x.high,
            "name": self.x_name,
            "columns": [
                {"name": printable(name), "series": series, "values": [_shown(value) for value in values]}
                for name, series, values in columns
            ],
        }
        rows = sample(len(x), TABLE_ROWS).tolist()
        head = element(
            "tr", element("th", self.x_name, scope="col"), [element("th", c[0], scope="col") for c in columns]
        )
        body = [
            element(
                "tr",
                element("th", tick_exact(x[i]), scope="row"),
                [element("td", _shown(c[2][i])) for c in columns],
            )
            for i in rows
        ]
        self._table = element("table", element("thead", head), element("tbody", body), class_="figures")

    def render(self) -> Markup:
        """The figure: heading, legend, drawing, notes, and the same numbers as a table."""
        legend = (
            element(
                "ul",
                [element("li", _swatch(key), key.name) for key in self.keys],
                class_="legend",
            )
            if self.keys
            else None
        )
        drawing = element(
            "svg",
            element("title", self.title),
            element("desc", self.described),
            self._grid(),
            element(
                "svg",
                self._inner,
                viewBox="0 0 1000 1000",
                preserveAspectRatio="none",
                width="100%",
                height="100%",
            ),
            self._outer,
            element("line", x1=0, x2=0, y1=0, y2="100%", class_="cursor", visibility="hidden"),
            class_=f"chart {self.height}",
            role="img",
            data_readout=json.dumps(self._readout, allow_nan=False) if self._readout else None,
        )
        table = (
            element(
                "details",
                element("summary", "These figures as a table"),
                element("div", self._table, class_="scroll"),
                class_="numbers",
            )
            if self._table
            else None
        )
        caption = element("figcaption", element("h4", self.title), element("p", self.y_name, class_="unit"))
        notes = [element("p", note, class_="note") for note in self.notes]
        return element("figure", caption, legend, drawing, notes, table, class_="plot")

    def _grid(self) -> list[Markup]:
        parts = []
        for value in self.y.powers(4) if self.powers else self.y.ticks(5):
            top = _percent(1 - self.y.place_one(value))
            parts.append(element("line", x1=0, x2="100%", y1=top, y2=top, class_="grid"))
            label = power_of_two(value) if self.powers else tick_label(value)
            parts.append(element("text", label, x=-8, y=top, dy="0.32em", class_="label end"))
        ticks = [value for value in self.x.ticks(5) if value == round(value) or self.x.high - self.x.low < 3]
        for value in ticks:
            left = _percent(self.x.place_one(value))
            parts.append(element("line", x1=left, x2=left, y1="100%", y2="100%", class_="nub"))
            parts.append(
                element("text", tick_label(value), x=left, y="100%", dy="1.45em", class_="label middle")
            )
        parts.append(element("line", x1=0, x2="100%", y1="100%", y2="100%", class_="base"))
        parts.append(element("text", self.x_name, x="100%", y="100%", dy="2.8em", class_="label end"))
        return parts

    def _points(self, x: Array, y: Array) -> Array:
        """Places in the inner drawing, cut at ten frames' height, where a renderer is still exact."""
        across = self.x.place(x) * UNITS
        down = (1 - np.clip(self.y.place(y), -10, 11)) * UNITS
        return np.stack([across, down], axis=1)


def _shown(value: float) -> str:
    return significant(value) if math.isfinite(value) else "–"


def tick_exact(value: float) -> str:
    """A step's number in full."""
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def _pieces(ok: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> list[slice]:
    """The stretches of an array that are True, as slices."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], ok.astype(np.int8), [0]))))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2])]


def _path(points: Array) -> str:
    """An SVG path through points, to a tenth of a unit; what a log axis cannot show is passed over."""
    kept = points[np.isfinite(points).all(axis=1)]
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in kept) if len(kept) else ""


def _percent(part: float) -> str:
    return f"{100 * part:.2f}%"


def _swatch(key: Key) -> Markup:
    drawn = {
        "band": element("rect", x=0, y=1, width=20, height=10, class_=f"band {key.series}"),
        "cross": element("path", d="M6 2L14 10M6 10L14 2", class_=f"cross {key.series}"),
        "tick": element("line", x1=10, x2=10, y1=0, y2=12, class_=f"tick {key.series}"),
        "dot": element("circle", cx=10, cy=6, r=4, class_=f"dot {key.series}"),
    }.get(key.shape) or element("line", x1=0, x2=20, y1=6, y2=6, class_=f"{key.shape} {key.series}")
    return element("svg", drawn, width=20, height=12, class_="swatch", aria_hidden="true")
