"""The final metric, a dot for each seed: a row for FP32 and one for each candidate, on one scale."""

from __future__ import annotations

import numpy as np

from mezzo.report.charts.axis import axis_over, tick_label
from mezzo.report.markup import Child, Markup, element
from mezzo.report.numbers import significant
from mezzo.report.reading import Comparison


def metric(comparison: Comparison, colours: dict[str, str]) -> Markup | None:
    """The figure, or None where no metric was found in what the script printed."""
    rows = [("FP32", "s0", comparison.metrics(comparison.baseline))]
    rows += [(name, colour, comparison.metrics(name)) for name, colour in colours.items()]
    if not any(values for _, _, values in rows):
        return None
    axis = axis_over([np.array(list(values.values())) for _, _, values in rows], log=False)
    # One number alone gives no scale.
    ticks = next((found for about in (4, 6, 9) if len(found := axis.ticks(about)) > 1), axis.ticks(20))
    body = []
    for name, colour, values in rows:
        drawn: list[Child] = [
            [
                element(
                    "line",
                    x1=_at(axis.place_one(t)),
                    x2=_at(axis.place_one(t)),
                    y1=0,
                    y2="100%",
                    class_="grid",
                )
                for t in ticks
            ]
        ]
        for seed, value in values.items():
            drawn.append(
                element(
                    "circle",
                    element("title", f"seed {seed}: {significant(value, 5)}"),
                    cx=_at(axis.place_one(value)),
                    cy=14,
                    r=4.5,
                    class_=f"dot {colour}",
                )
            )
        mean = float(np.mean(list(values.values()))) if values else None
        body.append(
            element(
                "tr",
                element("th", element("span", name), scope="row"),
                element(
                    "td", element("svg", drawn, height=28, class_="barsvg", aria_hidden="true"), class_="bar"
                ),
                element(
                    "td",
                    element("b", significant(mean, 5) if mean is not None else "–"),
                    element(
                        "span",
                        "; ".join(f"seed {k}: {significant(v, 5)}" for k, v in values.items()),
                        class_="sr",
                    ),
                    class_="value",
                ),
            )
        )
    labels = element(
        "svg",
        [
            element("text", tick_label(t), x=_at(axis.place_one(t)), y=12, class_="label middle")
            for t in ticks
        ],
        height=16,
        class_="barsvg",
        aria_hidden="true",
    )
    foot = element("tr", element("td"), element("td", labels, class_="bar"), element("td"))
    return element(
        "figure",
        element(
            "figcaption",
            element("h4", "Final metric"),
            element("p", "A dot for each seed; the number is their mean.", class_="unit"),
        ),
        element("table", element("tbody", body), element("tfoot", foot), class_="bars"),
        class_="plot",
    )


def _at(place: float) -> str:
    return f"{100 * place:.2f}%"
