"""Which ops ran in which format: planned beside observed, departures first, a long list folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mezzo.core.records import OpFormats
from mezzo.report.markup import Markup, element
from mezzo.report.numbers import counted
from mezzo.report.run import Run

SHOWN = 14
_COLUMNS = ("Op", "Module", "Rule", "Planned", "Observed", "Calls", "Casts", "Why")
_RULES = {
    "lower": "computed in the 16-bit format",
    "fp32": "computed in FP32",
    "internal_fp32": "16 bits in and out, FP32 inside",
    "promote": "computed in the widest input's format",
    "banned": "refused in this format",
}


def ops(runs: Sequence[Run], name: str) -> Markup | None:
    """The table of one precision, from its first run that watched its formats; None where none did."""
    found = next((run for run in runs if run.ops), None)
    if found is None:
        return None
    # Departures first, then what was called most: what a reader looks for is at the top.
    rows = sorted(found.ops, key=lambda op: (op.as_planned, op.rule, -op.calls, op.op, op.module))
    departed = [op for op in rows if not op.as_planned]
    parts = [element("h3", name), _summary(rows, departed, found.seed if len(runs) > 1 else None)]
    if len(rows) <= SHOWN:
        parts.append(_table(rows))
    else:
        if departed:
            parts.append(_table(departed))
        parts.append(element("details", element("summary", f"All {len(rows)} ops of {name}"), _table(rows)))
    return element("div", parts, class_="ops")


def _summary(rows: Sequence[OpFormats], departed: Sequence[OpFormats], seed: int | None) -> Markup:
    rules = Counter(op.rule for op in rows)
    told = "; ".join(
        f"{number} {rule or 'without a rule'}" + (f" ({_RULES[rule]})" if rule in _RULES else "")
        for rule, number in rules.most_common()
    )
    verdict = (
        element("strong", f"{counted(len(departed), 'op')} departed from the plan.", class_="bad")
        if departed
        else element("strong", "Every op ran as planned.")
    )
    where = "" if seed is None else f" of seed {seed}"
    return element(
        "p",
        verdict,
        f" {counted(len(rows), 'op')} in one watched step{where}: {told}.",
        class_="note",
    )


def _table(rows: Sequence[OpFormats]) -> Markup:
    modules = any(op.module for op in rows)
    columns = [name for name in _COLUMNS if name != "Module" or modules]
    numeric = {"Calls", "Casts"}
    head = element(
        "tr", [element("th", name, scope="col", class_="n" if name in numeric else None) for name in columns]
    )
    body = []
    for op in rows:
        observed: list[Markup | str] = [element("code", op.observed or "–")]
        if not op.as_planned:
            observed.append(element("span", "not as planned", class_="flag"))
        cells = {
            "Module": element("td", element("code", op.module)),
            "Rule": element("td", op.rule),
            "Planned": element("td", element("code", op.planned or "–")),
            "Observed": element("td", observed),
            "Calls": element("td", f"{op.calls:,}", class_="n"),
            "Casts": element("td", f"{op.casts:,}", class_="n"),
            "Why": element("td", op.reason, class_="why"),
        }
        body.append(
            element(
                "tr",
                element("th", element("code", op.op), scope="row"),
                [cells[name] for name in columns[1:]],
                class_=None if op.as_planned else "departs",
            )
        )
    table = element("table", element("thead", head), element("tbody", body), class_="list sortable")
    return element(
        "div", table, class_="scroll", tabindex=0, role="region", aria_label="Ops and their formats"
    )
