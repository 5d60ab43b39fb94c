"""The gap gauge: a candidate's gap from FP32, its interval and the margin, on one line."""

from __future__ import annotations

from mezzo.report.markup import Markup, element
from mezzo.report.numbers import signed, significant

# A gap beyond so many margins is drawn at the edge, with an arrow's end instead of a dot.
EDGE = 3.0


def gap(
    value: float | None, margin: float | None, interval: tuple[float, float] | None, series: str
) -> Markup | None:
    """The gauge, or None without a gap and a margin above 0; all in one unit."""
    if value is None or not margin or margin < 0:
        return None
    reach = max([abs(value)] + [abs(edge) for edge in interval or ()]) / margin
    half = margin * min(EDGE, max(1.6, 1.15 * reach))

    def place(at: float) -> str:
        return f"{50 + 50 * max(-1.0, min(1.0, at / half)):.2f}%"

    left, right = place(-margin), place(margin)
    parts = [
        element("title", "Loss gap, its interval and the margin"),
        element(
            "desc",
            f"gap {signed(value)}, margin ±{significant(margin, 3)}"
            + (f", interval {signed(interval[0])} to {signed(interval[1])}" if interval else ""),
        ),
        element("line", x1=0, x2="100%", y1=12, y2=12, class_="rail"),
        element(
            "rect",
            x=left,
            y=4,
            width=f"{float(right[:-1]) - float(left[:-1]):.2f}%",
            height=16,
            class_="band margin",
        ),
        [element("line", x1=edge, x2=edge, y1=2, y2=22, class_="edge margin") for edge in (left, right)],
        element("line", x1="50%", x2="50%", y1=5, y2=19, class_="zero"),
    ]
    if interval:
        low, high = place(interval[0]), place(interval[1])
        parts.append(element("line", x1=low, x2=high, y1=12, y2=12, class_=f"gapline {series}"))
        parts += [
            element("line", x1=end, x2=end, y1=8, y2=16, class_=f"gapline {series}") for end in (low, high)
        ]
    if abs(value) > half:
        turn = "M-5-5L2 0L-5 5" if value > 0 else "M5-5L-2 0L5 5"
        arrow = element("path", d=turn, class_=f"cross {series}")
        parts.append(element("svg", arrow, x=place(value), y=12, overflow="visible"))
    else:
        parts.append(element("circle", cx=place(value), cy=12, r=4.5, class_=f"dot {series}"))
    parts += [
        element("text", signed(-margin, 2), x=left, y=36, class_="label middle"),
        element("text", "0", x="50%", y=36, class_="label middle"),
        element("text", signed(margin, 2), x=right, y=36, class_="label middle"),
    ]
    return element("svg", parts, class_="gauge", role="img")
