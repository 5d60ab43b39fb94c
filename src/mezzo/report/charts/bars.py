"""Horizontal bars in a table: a name, a bar, its number; the table is the figure and its own fallback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.report.markup import Markup, element

MOST = 2.0
"""How many times the longest bar an interval may make the axis: an uncertain one would leave no bar to be seen."""
CUT = "An arrow: it goes on to the number beside it."


@dataclass(frozen=True)
class Bar:
    """One bar: its length, the interval around its end if there is one, and what is printed beside it."""

    name: str
    series: str
    value: float | None
    shown: str
    detail: str = ""
    interval: tuple[float, float] | None = None


def bars(title: str, unit: str, rows: Sequence[Bar], *, reference: float | None = None) -> Markup:
    """The figure; ``reference`` draws a line at that value through every row (FP32 itself)."""
    shown = max([bar.value or 0.0 for bar in rows] + [reference or 0.0, 1e-30])
    whole = max([shown] + [bar.interval[1] for bar in rows if bar.interval])
    most = min(whole, MOST * shown)
    body = [
        element(
            "tr",
            element("th", element("span", bar.name), scope="row"),
            element("td", _drawn(bar, most, reference), class_="bar"),
            element(
                "td",
                element("b", bar.shown),
                element("span", bar.detail) if bar.detail else None,
                class_="value",
            ),
        )
        for bar in rows
    ]
    return element(
        "figure",
        element(
            "figcaption",
            element("h4", title),
            element("p", f"{unit} {CUT}" if whole > most else unit, class_="unit"),
        ),
        element("table", element("tbody", body), class_="bars"),
        class_="plot",
    )


def _drawn(bar: Bar, most: float, reference: float | None) -> Markup:
    # A little room on the right, so that the whisker's cap is not cut.
    def place(value: float) -> str:
        return f"{98 * max(0.0, value) / most:.2f}%"

    parts = []
    if bar.value is not None:
        parts.append(
            element("rect", x=0, y=3, width=place(bar.value), height=14, rx=2, class_=f"fill {bar.series}")
        )
    if reference is not None:
        parts.append(
            element("line", x1=place(reference), x2=place(reference), y1=0, y2=20, class_="reference")
        )
    if bar.interval:
        low, high = (place(min(edge, most)) for edge in bar.interval)
        parts.append(element("line", x1=low, x2=high, y1=10, y2=10, class_="whisker"))
        parts += [
            element("line", x1=edge, x2=edge, y1=6, y2=14, class_="whisker")
            for edge in (low, high)[: 1 if bar.interval[1] > most else 2]
        ]
        if bar.interval[1] > most:
            head = [element("line", x1=-5, x2=0, y1=y, y2=10, class_="whisker") for y in (6, 14)]
            parts.append(element("svg", head, x=high, overflow="visible"))
    return element("svg", parts, height=20, class_="barsvg", aria_hidden="true")
