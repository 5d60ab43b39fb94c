"""Parts of docs/dev/benchmarks.md: the cost of looking, how many faults are named, loss scales compared."""

from __future__ import annotations

from typing import Any


def _ratio(found: list[float]) -> str:
    value, low, high = found
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def watch(results: dict[str, Any]) -> str:
    """A row for each training that was watched."""
    machine = results["machine"]
    lines = [
        f"Cost on {machine['threads']} threads of {machine['cpu']} (`python benchmarks/watch.py`):",
        "",
        "| training | step | watched training / plain | the watched step / plain |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name}, every {found['every']} updates | {found['plain_step_seconds'] * 1e3:.0f} ms |"
        f" {_ratio(found['watched_training_over_plain'])} | {found['watched_step_over_plain']:.2f} |"
        for name, found in results["rows"].items()
    ]
    return "\n".join(lines)


def tracing(results: dict[str, Any]) -> str:
    """The cost of a step that is traced and not skipped."""
    machine = results["machine"]
    costs = ", ".join(
        f"{100 * (found['traced_over_plain'][0] - 1):.1f} % for {found['plain_step_seconds'] * 1e3:.3g} ms ({name})"
        for name, found in results["tracing"].items()
    )
    where = f"on {machine['threads']} threads of {machine['cpu']} (`python benchmarks/watch.py`)"
    return f"Tracing makes a step that is not skipped slower, {where}:\n{costs}."


def faults(results: dict[str, Any]) -> str:
    """How many planted faults are named."""
    named, total = results["counts"]["named (module, direction, operation)"]
    quiet, clean = results["counts"]["clean runs without an alarm"]
    return (
        f"`python benchmarks/faults.py` plants faults in small models: {named} of {total} are named with the right "
        f"module, direction and\noperation, and {quiet} of {clean} runs without a fault give no alarm. The tracer was "
        "developed on these faults."
    )


def loss_scales(results: dict[str, Any]) -> str:
    """Skipped steps and unused range, a row for each training."""
    lines = [
        "| training | largest gradient | calibrated constant: skipped steps, unused bits | `dynamic` |",
        "|---|---|---|---|",
    ]
    for name, row in results["trainings"].items():
        low, high = row["largest_log2"]
        cells = [
            f"{row['scales'][kind]['skipped']}, {row['scales'][kind]['unused_bits_mean']:.1f}"
            for kind in ("constant", "dynamic")
        ]
        lines.append(f"| {name} | 2^{low:.1f} to 2^{high:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)
