"""The runs one by one: how long each was, how it ended, what it has to say; a failed one's last lines."""

from __future__ import annotations

from collections.abc import Sequence

from mezzo.report.markup import Markup, element, prose
from mezzo.report.numbers import seconds
from mezzo.report.run import Run


def runs(found: Sequence[Run]) -> Markup | None:
    """Every run in a row; below them what they noted, and what those that failed printed last."""
    if not found:
        return None
    columns = ("Run", "Steps", "Updates", "Skipped", "Time", "Ended")
    head = element(
        "tr",
        [
            element("th", name, scope="col", class_="n" if 0 < i < 5 else None)
            for i, name in enumerate(columns)
        ],
    )
    body = [
        element(
            "tr",
            element("th", element("code", run.name), scope="row"),
            [
                element("td", text, class_="n")
                for text in (
                    f"{run.recorded_losses:,}",
                    f"{len(run.updates):,}",
                    f"{len(run.skipped):,}",
                    seconds(run.ended.seconds) if run.ended else "–",
                )
            ],
            element("td", ended(run)),
            class_="departs" if run.failed else None,
        )
        for run in found
    ]
    table = element("table", element("thead", head), element("tbody", body), class_="list")
    return element(
        "div",
        element("div", table, class_="scroll", tabindex=0, role="region", aria_label="Runs"),
        notes(found),
    )


def ended(run: Run) -> str:
    """How a run ended, in words."""
    if run.fault:
        return run.fault
    if run.ended is None:
        return "not told"
    return exited(run.ended.status)


def exited(status: int) -> str:
    """A script's exit status in words."""
    return "well" if status == 0 else f"exit status {status}"


def notes(found: Sequence[Run]) -> list[Markup]:
    """What runs noted, and what those that failed printed last."""
    parts = []
    # The same note from every seed is one note.
    told: dict[str, list[str]] = {}
    for run in found:
        for note in run.ended.notes if run.ended else []:
            told.setdefault(str(note), []).append(run.name)
    if told:
        rows = [
            element("li", prose(note), " ", element("span", ", ".join(names), class_="muted"))
            for note, names in told.items()
        ]
        parts.append(element("ul", rows, class_="notes"))
    for run in found:
        if run.failed and run.log:
            parts.append(
                element(
                    "details",
                    element("summary", f"The last lines that {run.name} printed"),
                    element("pre", run.log),
                    open=True,
                )
            )
    return parts
