"""Parts of docs/monitoring.md: what looking costs, how many faults are named, which predictions come true."""

from __future__ import annotations

from typing import Any


def _ratio(found: list[float]) -> str:
    value, low, high = found
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def watch(results: dict[str, Any]) -> str:
    """A row for each training that was watched."""
    machine = results["machine"]
    lines = [
        f"On {machine['threads']} threads of {machine['cpu']} (`python benchmarks/watch.py`). At most",
        f"{results['limit']:g} is wanted:",
        "",
        "| training | plain step | at every | watched training / plain | the watched step / plain |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {found['plain_step_seconds'] * 1e3:.0f} ms | {found['every']} updates |"
        f" {_ratio(found['watched_training_over_plain'])} | {found['watched_step_over_plain']:.2f} |"
        for name, found in results["rows"].items()
    ]
    return "\n".join(lines)


def tracing(results: dict[str, Any]) -> str:
    """A row for each training that was traced."""
    machine = results["machine"]
    lines = [
        f"Steps in fp16 that are not skipped, on {machine['threads']} threads of {machine['cpu']} (`python",
        "benchmarks/watch.py`); `tiny` is a perceptron whose step is nearly all Python:",
        "",
        "| training | plain step | traced step | traced / plain |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {found['plain_step_seconds'] * 1e3:.2f} ms | {found['traced_step_seconds'] * 1e3:.2f} ms |"
        f" {_ratio(found['traced_over_plain'])} |"
        for name, found in results["tracing"].items()
    ]
    return "\n".join(lines)


def faults(results: dict[str, Any]) -> str:
    """The score, a row for each thing that was asked."""
    lines = ["| asked | right | of |", "|---|---|---|"]
    lines += [f"| {what} | {right} | {total} |" for what, (right, total) in results["counts"].items()]
    families = ", ".join(f"{name} {total}" for name, (_, total) in results["by_family"].items())
    return "\n".join(lines) + f"\n\nFaults by family: {families}."


def sensitivity(results: dict[str, Any]) -> str:
    """A row for each model and format: the actual change of the loss over the predicted one."""
    sums = {"squares": "square root of sum of e^2", "signed": "signed sum", "expected": "the larger (used)"}
    lines = [f"| model | format | {' | '.join(sums.values())} |", "|---|---|---|---|---|"]
    for row in results["rows"]:
        cells = (f"{row[name]['ratio']:.2g} (x/ {row[name]['spread']:.2g})" for name in sums)
        lines.append(f"| {row['model']} | {row['format']} | {' | '.join(cells)} |")
    return "\n".join(lines)
