"""The tables of docs/dev/reproduce.md: what each experiment expected and found, from its summary file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "benchmarks/results/reproduce"
ROOT = Path(__file__).parent.parent

NAMES = ("lstm-loss-scale", "gradient-histogram", "lost-updates", "accumulation", "side-by-side", "gan")


def experiment(name: str) -> Callable[[], str]:
    """The figure of an experiment, and one row per finding."""

    def part() -> str:
        summary: dict[str, Any] = json.loads((ROOT / FOLDER / "summary.json").read_text(encoding="utf-8"))
        found, words = summary["experiments"][name], summary["words"]
        script = f"experiments/{name.replace('-', '_')}.py{' --full' if found['effort'] == 'full' else ''}"
        lines = [
            f"![{found['title']}](figures/{name}.svg)",
            "",
            f"`python {script}` (`{FOLDER}/summary.json`):",
            "",
            "| finding | expected | found | result |",
            "|---|---|---|---|",
        ]
        for each in found["findings"]:
            result = words[each["fate"]]
            if each["fate"] == "known":
                result += f". {each['known']}"
            cells = (each["name"], each["expected"], each["seen"], result)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(lines)

    return part
