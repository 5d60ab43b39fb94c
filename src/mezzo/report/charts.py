"""Charts as SVG, from arrays: axes, curves, gauges. `charts.html` frames them.

Curves lie in an inner drawing of 1000 by 1000 units that is stretched to the frame; labels and marks are placed by
percentages in the outer one, so text keeps its size at any width and on paper, without a script.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike

from mezzo.report.numbers import power_of_two, printable, signed, significant, tick_label
from mezzo.report.series import Array, sample, thin, thin_band

LOG_FROM = 20.0  # from this ratio of largest to smallest a loss axis is logarithmic
LARGEST = 1e280
UNITS = 1000
TABLE_ROWS = 13
EDGE = 3.0  # a gap beyond so many margins is an arrow at the gauge's end


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from ``low`` to ``high`` (``low < high``; both above 0 if ``log``)."""

    low: float
    high: float
    log: bool = False

    def place(self, values: ArrayLike) -> Array:
        """Where values lie, 0 at ``low`` and 1 at ``high``; NaN for NaN and for what a log axis lacks."""
        found, low, high = np.asarray(values, dtype=float), self.low, self.high
        if self.log:
            with np.errstate(invalid="ignore", divide="ignore"):
                found = np.where(found > 0, np.log(found), np.nan)
            low, high = math.log(low), math.log(high)
        return np.asarray((found - low) / (high - low))

    def percent(self, value: float) -> float:
        """The place of one value, 0 to 100; what lies beyond an end is at the end."""
        return round(100 * float(np.clip(self.place(value), 0, 1)), 2)

    def at(self, value: float, *, up: bool = False) -> str:
        """`percent` for an attribute; ``up`` counts from the top."""
        place = self.percent(value)
        return f"{100 - place if up else place:.2f}%"

    def ticks(self, about: int = 5) -> list[float]:
        """About so many round numbers on the axis: 1, 2 or 5 times a power of ten."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for factors in ((1, 2, 5), (1, 3), (1,)):
                found = [f * 10.0**d for d in decades for f in factors]
                found = [one for one in found if self.low * 0.999 <= one <= self.high * 1.001]
                if len(found) <= about + 2:
                    break
            if len(found) >= 2:
                return found[:: math.ceil(len(found) / (about + 2))]
        raw = (self.high - self.low) / max(1, about)
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def axis_over(parts: Iterable[Array], *, log: bool | None = None, about_zero: bool = False) -> Axis:
    """The axis of every finite value; logarithmic by ``log`` (None: if all are positive and span `LOG_FROM`)."""
    values = np.concatenate([np.ravel(part) for part in parts] or [np.zeros(0)])
    values = values[np.isfinite(values)]
    if not len(values):
        return Axis(0.0, 1.0)
    # The bound keeps the arithmetic of the axis itself finite.
    low, high = (float(np.clip(edge, -LARGEST, LARGEST)) for edge in (values.min(), values.max()))
    if low > 0 and (log if log is not None else high / low >= LOG_FROM):
        logs = math.log(max(low, 1 / LARGEST)), math.log(high)
        reach = 0.05 * (logs[1] - logs[0]) or 0.4
        return Axis(math.exp(logs[0] - reach), math.exp(logs[1] + reach), log=True)
    if about_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Axis(low - room, high + room)


# Shapes: SVG elements as escaped text.


def shape(tag: str, style: str, content: str | Markup = "", **attributes: str | float) -> Markup:
    """An SVG element with a class; ``content`` is a text's label, elements, or a title shown on hovering."""
    named = {**attributes, "class": style}
    written = Markup().join(Markup(' {}="{}"').format(name, value) for name, value in named.items())
    if content and not isinstance(content, Markup):
        content = Markup("{}" if tag == "text" else "<title>{}</title>").format(printable(content))
    return Markup("<{0}{1}>{2}</{0}>").format(tag, written, content)


def box(
    axis: Axis, left: float, right: float, y: str | int, height: str | int, style: str, title: str = ""
) -> Markup:
    """A rectangle from one value of an axis to another."""
    width = f"{axis.percent(right) - axis.percent(left):.2f}%"
    return shape("rect", style, title, x=axis.at(left), y=y, width=width, height=height)


def across(y: str | int, style: str, start: str | int = 0, stop: str = "100%") -> Markup:
    return shape("line", style, x1=start, x2=stop, y1=y, y2=y)


def down(x: str, style: str, title: str = "", top: str | int = 0, bottom: str | int = "100%") -> Markup:
    return shape("line", style, title, x1=x, x2=x, y1=top, y2=bottom)


def text(label: str, x: str | int, y: str | int, style: str = "label middle", dy: str = "0") -> Markup:
    return shape("text", style, label, x=x, y=y, dy=dy)


def placed(x: str, y: int, content: Markup) -> Markup:
    """Elements drawn in pixels around one place."""
    return Markup('<svg x="{}" y="{}" overflow="visible">{}</svg>').format(x, y, content)


Key = tuple[str, str, str]
"""One entry of a legend: the colour's class (``s0`` is FP32), how it is drawn, and its name."""


class Table(NamedTuple):
    """Numbers in a table: headings, and rows of (first cell, others, whether it is marked)."""

    head: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str], bool]]


@dataclass
class Chart:
    """Curves in a frame: add bands, lines and marks; the template draws what was added."""

    title: str
    x: Axis
    y: Axis
    unit: str
    x_name: str = "step"
    described: str = ""  # for a reader who cannot see it
    powers: bool = False  # whether a height is an exponent of two, in a lower frame
    keys: list[Key] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    inner: list[Markup] = field(default_factory=list)
    outer: list[Markup] = field(default_factory=list)
    readout: dict[str, Any] = field(default_factory=dict)
    table: Table | None = None

    def band(self, low: Array, high: Array, series: str, name: str = "") -> None:
        """Shade between two curves, thinned; a gap in either is a gap."""
        x, low, high = thin_band(low, high)
        paths = []
        for part in _pieces(np.isfinite(low) & np.isfinite(high)):
            if part.stop - part.start > 1:  # one step alone has no width to shade
                upper, lower = self._path(x[part], high[part]), self._path(x[part][::-1], low[part][::-1])
                paths.append(f"{upper}L{lower[1:]}Z")
        self._draw(paths, "band", series, name)

    def line(self, y: Array, series: str, key: str = "", style: str = "line", x: Array | None = None) -> None:
        """Draw a curve, thinned unless ``x`` is given; a gap stays a gap, a value between gaps is a dot."""
        if x is None:
            x, y = thin(y)
        paths = []
        for part in _pieces(np.isfinite(y)):
            path = self._path(x[part], y[part])
            paths.append(path if "L" in path else f"{path}L{path[1:]}")
        self._draw(paths, style, series, key)

    def _draw(self, paths: Sequence[str], style: str, series: str, key: str) -> None:
        if paths:
            self.inner.append(shape("path", f"{style} {series}", d="".join(paths)))
        if key:
            self.keys.append((series, style, key))

    def span(self, low: float, high: float, start: float, stop: float, series: str, name: str) -> None:
        """Rule two heights from edge to edge, and shade what lies between them from ``start`` to ``stop``."""
        height = f"{self.y.percent(high) - self.y.percent(low):.2f}%"
        self.outer.insert(0, box(self.x, start, stop, self.y.at(high, up=True), height, f"band {series}"))
        for edge in (high, low):
            self.rule(edge, f"edge {series}")
        self.keys.append((series, "band", name))

    def rule(self, height: float, style: str) -> None:
        if 0 <= self.y.place(height) <= 1:
            self.outer.append(across(self.y.at(height, up=True), style))

    def cross(self, x: float, series: str, label: str) -> None:
        """A cross at the top of the frame, with a label on hovering."""
        target = shape("rect", "target", label, x=-9, y=-9, width=18, height=18)
        mark = shape("path", f"cross {series}", d="M-5-5L5 5M-5 5L5-5")
        self.outer.append(placed(self.x.at(x), 0, target + mark))

    def tick(self, x: float, series: str, label: str) -> None:
        self.outer.append(down(self.x.at(x), f"tick {series}", label))

    def read(self, x: Sequence[int], columns: Sequence[tuple[str, Sequence[float]]]) -> None:
        """Give the numbers behind the curves, (name, values), for pointer and table."""
        shown = [[significant(one) if math.isfinite(one) else "–" for one in values] for _, values in columns]
        named = [{"name": printable(name), "values": values} for (name, _), values in zip(columns, shown)]
        self.readout = {"x": x, "low": self.x.low, "high": self.x.high, "name": self.x_name, "columns": named}
        picks = sample(len(x), TABLE_ROWS)
        rows = [(f"{x[i]:,}", [values[i] for values in shown], False) for i in picks]
        self.table = Table([self.x_name, *(name for name, _ in columns)], rows)

    @property
    def grid(self) -> list[Markup]:
        parts = []
        for value in (one for one in self.y.ticks(5) if not self.powers or one == round(one)):
            y = self.y.at(value, up=True)
            label = power_of_two(value) if self.powers else tick_label(value)
            parts += [across(y, "grid"), text(label, -8, y, "label end", "0.32em")]
        for value in self.x.ticks(5):
            if value == round(value) or self.x.high - self.x.low < 3:
                parts.append(text(tick_label(value), self.x.at(value), "100%", dy="1.45em"))
        return [*parts, across("100%", "base"), text(self.x_name, "100%", "100%", "label end", "2.8em")]

    def _path(self, x: Array, y: Array) -> str:
        """An SVG path, to a unit (a thousandth of the frame), cut at ten frames' height."""
        points = np.stack([self.x.place(x), 1 - np.clip(self.y.place(y), -10, 11)], axis=1) * UNITS
        kept = points[np.isfinite(points).all(axis=1)]
        return "M" + "L".join(f"{x:.0f} {y:.0f}" for x, y in kept) if len(kept) else ""


def _pieces(ok: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> list[slice]:
    """The stretches of an array that are True, as slices."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], ok.astype(np.int8), [0]))))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2])]


def gauge(
    value: float | None, margin: float | None, interval: tuple[float, float] | None, series: str
) -> tuple[str, list[Markup]] | None:
    """A gap, its interval and the margin on one line, described and drawn; None without gap or margin."""
    if value is None or not margin or margin < 0:
        return None
    reach = max([abs(value)] + [abs(edge) for edge in interval or ()]) / margin
    half = margin * min(EDGE, max(1.6, 1.15 * reach))
    axis = Axis(-half, half)
    described = f"gap {signed(value)}, margin ±{significant(margin, 3)}"
    parts = [across("12", "rail"), box(axis, -margin, margin, 4, 16, "band margin")]
    parts += [down(axis.at(edge), "edge margin", "", 2, 22) for edge in (-margin, margin)]
    parts.append(down("50%", "zero", "", 5, 19))
    if interval:
        described += f", interval {signed(interval[0])} to {signed(interval[1])}"
        low, high = axis.at(interval[0]), axis.at(interval[1])
        parts.append(across(12, f"gapline {series}", low, high))
        parts += [down(end, f"gapline {series}", "", 8, 16) for end in (low, high)]
    if abs(value) > half:
        turn = "M-5-5L2 0L-5 5" if value > 0 else "M5-5L-2 0L5 5"
        parts.append(placed(axis.at(value), 12, shape("path", f"cross {series}", d=turn)))
    elif math.isfinite(value):
        parts.append(shape("circle", f"dot {series}", cx=axis.at(value), cy=12, r=4.5))
    labels = ((signed(-margin, 2), -margin), ("0", 0.0), (signed(margin, 2), margin))
    return described, [*parts, *(text(label, axis.at(at), 36) for label, at in labels)]
