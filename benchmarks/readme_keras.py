"""The table of fine-tuning in docs/dev/benchmarks.md, from `transfer.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from readme_steps import busy

NOT_MEASURED = (
    "Not measured yet: `python benchmarks/transfer.py` writes the file that this table is made from."
)
NAMES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
STAGES = {"pretraining": "all layers", "head": "base frozen", "fine-tuning": "last stage"}


def table(path: Path) -> str:
    """One row for each backend and precision; times of a machine that did something else as well are left out."""
    if not path.exists():
        return NOT_MEASURED
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    machine, load = results["machine"], results["load_at_start"]
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("keras", "tensorflow", "torch", "jax") if name in machine
    )
    where = f"`python benchmarks/transfer.py` on {machine['threads']} threads of {machine['cpu']}, {versions}"
    if results["argv"]:
        where += f", with `-- {' '.join(results['argv'])}`"
    where += f"; {_runs(results['backends'])}, ended after {results['limit']:g} s at the latest"
    if busy(results):
        where += f" (busy with something else, load {load:g}, so times are left out)"
    columns = "".join(f" {column} |" for column in STAGES.values())
    lines = [
        f"{where}. Columns of time: a step's median, and its ratio to FP32's with a 95 % interval, below 1 faster.",
        "",
        f"| backend | policy | accuracy |{columns} whole run | peak memory |",
        "|---|---|---|" + "---|" * len(STAGES) + "---|---|",
    ]
    for backend, rows in results["backends"].items():
        for name, row in rows.items():
            times = [_time(row["stages"].get(stage), name == "fp32") for stage in STAGES]
            times.append("" if row["seconds"] is None else f"{row['seconds']:.0f} s")
            times = ["" for _ in times] if busy(results) else times
            peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f} MB"
            cells = " | ".join([backend, NAMES[name], _accuracy(row, results["limit"]), *times, peak])
            lines.append(f"| {cells} |")
    return "\n".join(lines)


def _runs(backends: dict[str, Any]) -> str:
    """How many runs stand behind the rows: of most of them, and of those with fewer."""
    of: dict[str, int] = {}
    for name, row in ((name, row) for rows in backends.values() for name, row in rows.items()):
        of[name] = max(of.get(name, 0), row["runs"])
    most = max(of.values())
    fewer = [f"{runs} in {NAMES[name]}" for name, runs in of.items() if runs < most]
    return f"{most} run{'s' if most > 1 else ''} of each" + (f" ({', '.join(fewer)})" if fewer else "")


def _time(found: dict[str, Any] | None, is_baseline: bool) -> str:
    if found is None:
        return ""
    if is_baseline:
        return f"{found['median_ms']:.0f} ms"
    low, high = found["interval"]
    return f"{found['median_ms']:.0f} ms, {found['ratio']:.2f} ({low:.2f} to {high:.2f})"


def _accuracy(row: dict[str, Any], limit: float) -> str:
    if not row["accuracies"]:
        return f"ended after {limit:g} s"
    return ", ".join(f"{one:.1f} %" for one in row["accuracies"])
