"""The part of docs/monitoring.md that says how many planted faults are named."""

from __future__ import annotations

from typing import Any


def faults(results: dict[str, Any]) -> str:
    """The score, a row for each thing that was asked."""
    lines = ["| asked | right | of |", "|---|---|---|"]
    lines += [f"| {what} | {right} | {total} |" for what, (right, total) in results["counts"].items()]
    families = ", ".join(f"{name} {total}" for name, (_, total) in results["by_family"].items())
    return "\n".join(lines) + f"\n\nFaults by family: {families}."
