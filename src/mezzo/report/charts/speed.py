"""Speed of a training step, relative to FP32, with the interval."""

from __future__ import annotations

from mezzo.report.charts.bars import Bar, bars
from mezzo.report.markup import Markup
from mezzo.report.numbers import finite, pair, ratio, seconds
from mezzo.report.reading import Comparison


def speed(comparison: Comparison, colours: dict[str, str]) -> Markup | None:
    """The figure, or None where no candidate has a measured speed."""
    found = {name: finite(values.get("speedup")) for name, values in comparison.candidates.items()}
    if not any(found.values()):
        return None
    times = comparison.verdict.get("step_seconds")
    times = times if isinstance(times, dict) else {}
    rows = [Bar("FP32", "s0", 1.0, "1.00×", _step(times.get(comparison.baseline)))]
    for name, values in comparison.candidates.items():
        interval = pair(values.get("speedup_interval"))
        detail = [f"{interval[0]:.2f} to {interval[1]:.2f}"] if interval else []
        step = _step(values.get("step_seconds", times.get(name)))
        rows.append(
            Bar(
                name,
                colours[name],
                found[name],
                ratio(found[name]),
                ", ".join([*detail, *([step] if step else [])]),
                interval,
            )
        )
    return bars(
        "Speed of a training step",
        "Times FP32; longer is faster. The whisker is the interval.",
        rows,
        reference=1.0,
    )


def _step(value: object) -> str:
    return "" if finite(value) is None else f"{seconds(value)} a step"
