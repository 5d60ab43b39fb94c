"""The machine that the runs were made on, as they recorded it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mezzo.report.markup import Markup, element
from mezzo.report.numbers import size
from mezzo.report.run import Run


def machine(known: object, runs: Sequence[Run]) -> Markup | None:
    """The machine as it is known, else as the first run that says so recorded it; None where nobody does."""
    found = known
    if not isinstance(found, dict) or not found:
        found = next((run.started.machine for run in runs if run.started), {})
    if not found:
        return None
    rows = [
        element(
            "div",
            element("dt", str(key).removesuffix("_bytes").replace("_", " ")),
            element("dd", size(value) if str(key).endswith("_bytes") else _plain(value)),
        )
        for key, value in found.items()
    ]
    return element("dl", rows, class_="facts")


def _plain(value: Any) -> str:
    if value is None or value == "" or value == [] or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_plain(item) for item in value)
    return str(value)
