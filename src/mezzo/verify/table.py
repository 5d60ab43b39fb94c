"""What a comparison prints: one table, a sentence a candidate, and where the rest is."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

STYLES = {"equivalent": "green", "consistent": "green", "inconclusive": "yellow", "divergent": "bold red"}
MISSING = "-"
MB = 1_000_000  # as the report writes it


def show(console: Console, verdict: Mapping[str, Any], report: Path | None, rerun: list[str]) -> None:
    """Print a verdict: a table on a terminal where it fits, else lines for each candidate."""
    candidates: Mapping[str, Mapping[str, Any]] = verdict["candidates"]
    table = _table(str(verdict["baseline"]), candidates)
    if console.is_terminal and console.measure(table, options=_wide(console)).maximum <= console.width:
        console.print(table)
    else:
        for name, one in candidates.items():
            console.print(Text.assemble((name, "bold"), ": ", _word(one)))
            for label, _, value in _rows(one)[1:]:
                if value != MISSING:
                    console.print(f"  {label:<15}{value}", markup=False, highlight=False, soft_wrap=True)
    wraps = console.is_terminal or "COLUMNS" in os.environ  # who names a width wants it, in a pipe too
    for name, one in candidates.items():
        line = Text.assemble((name, "bold"), " is ", _word(one), ". ", one["reason"])
        console.print(line, soft_wrap=not wraps)
        for note in one["notes"]:
            hint = Text(f"note: {note}", style="dim")
            if wraps:
                console.print(Padding(hint, (0, 0, 0, 2)))
            else:  # a Padding is cut at the width, however it is printed
                console.print(Text.assemble("  ", hint), soft_wrap=True)
    console.print()
    if report is not None:
        console.print(f"Report: {report}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Again:  {shlex.join(rerun)}", markup=False, highlight=False, soft_wrap=True)


def _wide(console: Console) -> Any:
    return console.options.update(max_width=10_000)


def _word(one: Mapping[str, Any]) -> tuple[str, str]:
    return one["parity"], STYLES.get(one["parity"], "")


def _table(baseline: str, candidates: Mapping[str, Mapping[str, Any]]) -> Table:
    """A quantity a row, a precision a column, so that eighty columns hold FP32 and two candidates."""
    table = Table()
    table.add_column("")
    for name in (baseline, *candidates):
        table.add_column(Text(name), justify="right")
    columns = {name: _rows(one) for name, one in candidates.items()}
    for i, (label, _, _) in enumerate(next(iter(columns.values()))):
        ours = [rows[i][2] for rows in columns.values()]
        fp32 = next((rows[i][1] for rows in columns.values() if rows[i][1]), "")
        if any(value != MISSING for value in ours):
            table.add_row(label, fp32, *(Text(value, style=STYLES.get(value, "")) for value in ours))
    return table


def _rows(one: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Each quantity: its name, FP32's value, the candidate's."""
    peak, fp32_peak = one["peak_memory_bytes"], one["fp32_peak_memory_bytes"]
    return [
        ("parity", "", one["parity"]),
        ("speed", "1.00x" if one["speedup"] else "", _times(one["speedup"], one["speedup_interval"])),
        ("peak memory", _size(fp32_peak), _memory(peak, one["peak_memory_ratio"])),
        ("final loss", _number(one["fp32_loss"]), _number(one["final_loss"]) or MISSING),
        ("loss gap", "", MISSING if one["loss_gap"] is None else f"{one['loss_gap']:+.2g}"),
        ("90 % interval", "", _interval(one["loss_gap_interval"])),
        ("margin", "", MISSING if one["margin"] is None else f"±{one['margin']:.3g}"),
        ("metric", _number(one["fp32_metric"]), _number(one["final_metric"]) or MISSING),
        ("pairs", "", f"{one['seeds']} x {one['steps']} steps" if one["steps"] else MISSING),
        ("skipped", "", str(one["skipped_steps"]) if one["steps"] else MISSING),
        ("power (loss)", "", MISSING if one["power"] is None else f"{one['power']:.0%}"),
    ]


def _times(value: float | None, interval: list[float] | None) -> str:
    if value is None:
        return MISSING
    return f"{value:.2f}x" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def _size(value: int | None) -> str:
    return "" if value is None else f"{value / MB:.3g} MB"


def _memory(peak: int | None, ratio: float | None) -> str:
    return MISSING if ratio is None else f"{ratio:.2f}x ({_size(peak)})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _interval(interval: list[float] | None) -> str:
    return f"{interval[0]:+.2g} to {interval[1]:+.2g}" if interval else MISSING
