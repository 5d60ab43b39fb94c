"""What a comparison prints: one table, a sentence a candidate, and where the rest is."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

STYLES = {"equivalent": "green", "consistent": "green", "inconclusive": "yellow", "divergent": "bold red"}
NARROW = 90


def show(console: Console, verdict: Mapping[str, Any], report: Path | None, rerun: list[str]) -> None:
    """Print a verdict: a table where it fits, else a block for each candidate, which pipes and narrow
    terminals get.
    """
    candidates: Mapping[str, Mapping[str, Any]] = verdict["candidates"]
    if console.is_terminal and console.width >= NARROW:
        console.print(_table(candidates))
    else:
        for name, one in candidates.items():
            console.print(Text.assemble((name, "bold"), ": ", (one["parity"], STYLES.get(one["parity"], ""))))
            for label, value in _cells(one)[1:]:
                console.print(f"  {label:<16}{value}", markup=False, highlight=False, soft_wrap=True)
    for name, one in candidates.items():
        line = Text.assemble(
            (name, "bold"), " is ", (one["parity"], STYLES.get(one["parity"], "")), ". ", one["reason"]
        )
        console.print(line, soft_wrap=not console.is_terminal)
        for note in one["notes"]:
            console.print(
                Padding(Text(f"note: {note}", style="dim"), (0, 0, 0, 2)), soft_wrap=not console.is_terminal
            )
    console.print()
    if report is not None:
        console.print(f"Report: {report}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Again:  {shlex.join(rerun)}", markup=False, highlight=False, soft_wrap=True)


def _table(candidates: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title="against FP32", title_justify="left")
    table.add_column("precision", style="bold", no_wrap=True)
    first = next(iter(candidates.values()))
    for label, _ in _cells(first):
        table.add_column(label, justify="left" if label == "parity" else "right")
    for name, one in candidates.items():
        cells = [value for _, value in _cells(one)]
        table.add_row(Text(name), Text(cells[0], style=STYLES.get(cells[0], "")), *map(Text, cells[1:]))
    return table


def _cells(one: Mapping[str, Any]) -> list[tuple[str, str]]:
    cells = [
        ("parity", one["parity"]),
        ("speed", _speed(one)),
        ("peak memory", _times(one["peak_memory_ratio"])),
        ("final loss", f"{_number(one['final_loss'])} (FP32 {_number(one['fp32_loss'])})"),
        ("gap", _signed(one["loss_gap"], one["loss_gap_interval"])),
        ("margin", f"±{_number(one['margin'], 3)}"),
    ]
    if one["final_metric"] is not None:
        cells.append(("metric", f"{_number(one['final_metric'])} (FP32 {_number(one['fp32_metric'])})"))
    cells += [
        ("pairs", f"{one['seeds']} x {one['steps']} steps"),
        ("skipped", str(one["skipped_steps"])),
        ("power", "-" if one["power"] is None else f"{one['power']:.0%}"),
    ]
    return cells


def _speed(one: Mapping[str, Any]) -> str:
    if one["speedup"] is None:
        return "-"
    low, high = one["speedup_interval"]
    return f"{one['speedup']:.2f}x ({low:.2f} to {high:.2f})"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _number(value: float | None, digits: int = 5) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _signed(value: float | None, interval: list[float] | None) -> str:
    if value is None:
        return "-"
    return f"{value:+.2g}" + (f" ({interval[0]:+.2g} to {interval[1]:+.2g})" if interval else "")
