"""The verdict cards: for each candidate the word, the reason and the six numbers that a decision needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mezzo.report.charts.gap import gap
from mezzo.report.markup import Markup, element
from mezzo.report.numbers import count, finite, number, pair, ratio, signed, significant, size
from mezzo.report.reading import Comparison

# Parity word -> (the icon's path in a 16-unit square, the word in one line). Colour never stands alone.
PARITY = {
    "equivalent": ("M3 8.5L6.5 12L13 4.5", "The gap's whole interval lies within the margin."),
    "consistent": (
        "M2.5 6.5C5 4 6.5 8 8 6.5S11 5 13.5 6.5M2.5 10.5C5 8 6.5 12 8 10.5S11 9 13.5 10.5",
        "No harm seen, with fewer pairs than would prove its absence.",
    ),
    "inconclusive": (
        "M5.5 6A2.5 2.5 0 1 1 8.9 8.3C8.2 8.6 8 9 8 9.8M8 12.6V12.7",
        "The runs cannot tell; more seeds may.",
    ),
    "divergent": (
        "M4 4L12 12M12 4L4 12",
        "The result differs from FP32 by more than the margin, or training broke.",
    ),
}
_UNKNOWN = ("M3 8H13", "No verdict was recorded.")


def parity_of(values: Mapping[str, Any]) -> str:
    """The parity word as recorded; ``no verdict`` where there is none."""
    word = values.get("parity")
    return word if isinstance(word, str) and word else "no verdict"


def card(comparison: Comparison, name: str, series: str) -> Markup:
    """One candidate's card."""
    values = comparison.candidates[name]
    word = parity_of(values)
    icon, meaning = PARITY.get(word, _UNKNOWN)
    badge = element(
        "span",
        element("svg", element("path", d=icon), viewBox="0 0 16 16", width=16, height=16, aria_hidden="true"),
        word,
        class_="badge",
    )
    reason = values.get("reason")
    return element(
        "article",
        element("header", element("h3", element("i", class_=f"chip {series}"), name), badge),
        element("p", reason if isinstance(reason, str) and reason else meaning, class_="reason"),
        element(
            "dl",
            _speed(values),
            _memory(comparison, name, values),
            _loss(values),
            _skips(comparison, name, values),
            class_="stats",
        ),
        gap(finite(values.get("loss_gap")), finite(values.get("margin")), gap_interval(values), series),
        element(
            "dl",
            [
                element("div", element("dt", term), element("dd", text))
                for term, text in _rest(comparison, values)
            ],
            class_="rest",
        ),
        class_=f"card p-{word}" if word in PARITY else "card",
        id=f"card-{series}",
    )


def gap_interval(values: Mapping[str, Any]) -> tuple[float, float] | None:
    """The interval of the loss gap, under either name that a verdict may give it."""
    return pair(values.get("loss_gap_interval")) or pair(values.get("interval"))


def _stat(term: str, value: str, detail: str = "") -> Markup:
    return element(
        "div",
        element("dt", term),
        element("dd", element("b", value), element("span", detail) if detail else None),
    )


def _speed(values: Mapping[str, Any]) -> Markup:
    speedup, interval = finite(values.get("speedup")), pair(values.get("speedup_interval"))
    detail = f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else ""
    if speedup is None:
        return _stat("Speed", "–", "not measured")
    return _stat("Speed", ratio(speedup), detail or ("times FP32" if speedup else ""))


def _memory(comparison: Comparison, name: str, values: Mapping[str, Any]) -> Markup:
    found = finite(values.get("peak_memory_ratio"))
    if found is None:
        return _stat("Peak memory", "–", "not measured")
    peaks = [
        next((run.memory.peak_bytes for run in comparison.of(one) if run.memory), None)
        for one in (name, comparison.baseline)
    ]
    both = f"{size(peaks[0])} of {size(peaks[1])}" if None not in peaks else "of FP32's"
    return _stat("Peak memory", ratio(found), both)


def _loss(values: Mapping[str, Any]) -> Markup:
    found, margin = number(values.get("loss_gap")), finite(values.get("margin"))
    return _stat(
        "Loss gap",
        "–" if found is None else signed(found, 2),
        "not measured"
        if found is None
        else f"margin ±{significant(margin, 3)}"
        if margin is not None
        else "",
    )


def _skips(comparison: Comparison, name: str, values: Mapping[str, Any]) -> Markup:
    skipped = finite(values.get("skipped_steps"))
    updates = sum(len(run.updates) for run in comparison.of(name))
    if skipped is None:
        return _stat("Skipped steps", "–", "not recorded")
    return _stat(
        "Skipped steps", count(skipped), f"of {updates:,} updates" if updates >= skipped and updates else ""
    )


def _rest(comparison: Comparison, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("Final loss", significant(values.get("final_loss")))]
    if number(values.get("final_metric")) is not None:
        rows.append(("Final metric", significant(values.get("final_metric"))))
    for key, term, shape in _EXTRA:
        if number(values.get(key)) is not None:
            rows.append((term, shape(values[key])))
    seeds = finite(values.get("seeds"))
    rows.append(("Paired seeds", count(seeds) if seeds is not None else "not recorded"))
    steps = finite(values.get("steps"))
    rows.append(("Steps", count(steps) if steps is not None else "not recorded"))
    timed = finite(values.get("steps_timed"))
    if timed is not None:
        rows.append(("Steps timed", count(timed)))
    power = finite(values.get("power"))
    if power is not None:
        rows.append(("Power", f"{100 * power:.0f} %"))
    status = finite(values.get("exit_status"))
    if status:
        rows.append(("Exit status", f"{status:.0f}"))
    return rows


_EXTRA = (
    ("fp32_loss", "FP32's final loss", significant),
    ("fp32_metric", "FP32's final metric", significant),
    ("metric_gap", "Metric gap", signed),
    ("noise_floor", "Noise of a one-ulp twin", significant),
)
