"""What tuning prints: a line a module, what is predicted, and where the policy is."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mezzo.core.tuning import Choice, Tuned
from mezzo.verify.tune.tune import Outcome


def show(console: Console, outcome: Outcome) -> None:
    """Print the choices: a table on a terminal, lines elsewhere."""
    tuned = outcome.tuned
    if console.is_terminal:
        table = Table()
        for name, justify in (
            ("module", "left"),
            ("runs in", "left"),
            ("loss changes by", "right"),
            ("why", "left"),
        ):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        for choice in tuned.choices:
            table.add_row(*map(Text, _cells(choice)), style="bold" if choice.line else "")
        console.print(table)
    else:
        for choice in tuned.choices:
            module, fmt, _, reason = _cells(choice)
            console.print(f"{module}: {fmt}: {reason}", markup=False, highlight=False, soft_wrap=True)
    saved = _share(tuned.fp32_seconds, tuned.seconds)
    preset = _share(tuned.fp32_seconds, tuned.preset_seconds)
    changes = f"{tuned.preset_change:.1g}" if math.isfinite(tuned.preset_change) else "not finite"
    for line in (
        f"Expected change of the loss: {tuned.change:.1g} of {tuned.loss:.4g} ({tuned.preset} everywhere: {changes}); "
        f"margin {tuned.margin * tuned.loss:.1g}",
        f"Predicted speed of the modules' work: {saved} of FP32's ({tuned.preset} everywhere: {preset})",
        *(f"note: {note}" for note in tuned.notes),
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if tuned.policy.is_fp32:
        console.print(_all_fp32(tuned), soft_wrap=True)
    console.print(Text.assemble(("Policy: ", "bold"), str(outcome.policy)), soft_wrap=True)
    if outcome.finding:
        console.print(Text(outcome.finding, style="bold red"), soft_wrap=True)


def _all_fp32(tuned: Tuned) -> str:
    """Why nothing is lowered, by what was measured."""
    if tuned.goal == "memory":
        return "FP32 it is: no module can run in 16 bits here without harm."
    if all(choice.saved_seconds <= 0.0 for choice in tuned.choices):
        return "FP32 it is: no module runs faster in 16 bits here."
    return "FP32 it is: what runs faster in 16 bits here does harm, or its casts take more than it saves."


def _cells(choice: Choice) -> tuple[str, str, str, str]:
    change = f"{choice.change:.1g}" if math.isfinite(choice.change) else "not finite"
    return choice.module or "(the model itself)", choice.format, change, choice.reason


def _share(whole: float, part: float) -> str:
    return f"{whole / part:.2f}x" if part else "-"
