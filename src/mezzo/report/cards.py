"""The verdict cards: for each candidate the word, the reason and the six numbers that a decision needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mezzo.report.charts.gap import gap as gauge
from mezzo.report.gaps import Gap, gaps
from mezzo.report.markup import Markup, element
from mezzo.report.numbers import count, finite, number, pair, percent, ratio, signed, significant, size
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
    found = gaps(values)
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
            _skips(comparison, name, values),
            class_="stats",
        ),
        [_gap(one, series) for one in found],
        element(
            "dl",
            [element("div", element("dt", term), element("dd", text)) for term, text in _rest(values, found)],
            class_="rest",
        ),
        _told(values),
        class_=f"card p-{word}" if word in PARITY else "card",
        id=f"card-{series}",
    )


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
    word = values.get("speed_word")
    return _stat(
        "Speed", ratio(speedup), ", ".join(part for part in (detail, word) if isinstance(part, str) and part)
    )


def _memory(comparison: Comparison, name: str, values: Mapping[str, Any]) -> Markup:
    found = finite(values.get("peak_memory_ratio"))
    if found is None:
        return _stat("Peak memory", "–", "not measured")
    peaks = [comparison.peak(one) for one in (name, comparison.baseline)]
    both = f"{size(peaks[0])} of {size(peaks[1])}" if None not in peaks else "of FP32's"
    return _stat("Peak memory", ratio(found), both)


def _gap(found: Gap, series: str) -> Markup:
    """A gap in numbers, and beside them the gauge; parity needs every gap of a card to be harmless."""
    term = f"{found.quantity.capitalize()} gap"
    if found.value is None:
        numbers = _stat(term, "–", "not measured")
    else:
        share = f" ({found.better} is better)" if found.better else ""
        if found.share is not None:
            share = f" ({percent(found.share)})"
        detail = "" if found.margin is None else f"margin ±{significant(found.margin, 2)}"
        if detail and found.margin_share is not None:
            detail += f" ({percent(found.margin_share)})"
        numbers = _stat(term + share, signed(found.value, 2), detail)
    drawn = gauge(found.value, found.margin, found.interval, series)
    return element("div", element("dl", numbers), drawn, class_="gap")


def _skips(comparison: Comparison, name: str, values: Mapping[str, Any]) -> Markup:
    skipped = finite(values.get("skipped_steps"))
    updates = sum(len(run.updates) for run in comparison.of(name))
    if skipped is None:
        return _stat("Skipped steps", "–", "not recorded")
    return _stat(
        "Skipped steps", count(skipped), f"of {updates:,} updates" if updates >= skipped and updates else ""
    )


_COUNTS = (("seeds", "Paired seeds"), ("steps", "Steps a run"), ("steps_timed", "Steps timed"))


def _rest(values: Mapping[str, Any], found: list[Gap]) -> list[tuple[str, str]]:
    rows = []
    for quantity in ("loss", "metric"):
        final, base = values.get(f"final_{quantity}"), values.get(f"fp32_{quantity}")
        if number(final) is not None or quantity == "loss":
            rows.append((f"Final {quantity}", significant(final)))
        if number(base) is not None:
            rows.append((f"FP32's final {quantity}", significant(base)))
    for key, term in _COUNTS:
        if finite(values.get(key)) is not None:
            rows.append((term, count(values.get(key))))
    loss = found[0]
    for noise, source in ((loss.noise, "of a one-ulp twin"), (loss.seed_noise, "between seeds")):
        if noise is not None:
            rows.append((f"Noise {source}", significant(noise, 2)))
    for one in found:
        if one.power is not None:
            rows.append(("Power" if len(found) == 1 else f"Power, {one.quantity}", percent(one.power, 0)))
    if finite(values.get("pairs_needed")) is not None:
        rows.append(("Pairs for 80 % power", count(values.get("pairs_needed"))))
    status = finite(values.get("exit_status"))
    if status:
        rows.append(("Exit status", f"{status:.0f}"))
    return rows


def _told(values: Mapping[str, Any]) -> Markup | None:
    """The notes that the verdict adds to its reason."""
    notes = values.get("notes")
    told = [note for note in notes if isinstance(note, str)] if isinstance(notes, (list, tuple)) else []
    return element("ul", [element("li", note) for note in told], class_="notes") if told else None
