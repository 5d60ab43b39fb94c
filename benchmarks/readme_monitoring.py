"""Parts of docs/monitoring.md and docs/tune.md: what looking costs, how many faults are named, what tuning gains."""

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


def tuned(results: dict[str, Any]) -> str:
    """A row for each demo that was tuned."""
    machine = results["machine"]
    lines = [
        f"`python benchmarks/tune.py` on {machine['threads']} threads of {machine['cpu']}, {results['processes']}",
        f"processes of {results['rounds']} rounds each. Speeds: above 1 is faster.",
        "",
        "| demo | preset | in FP32 | tuned / preset | predicted, of modules alone | tuned / FP32 | preset / FP32 |",
        "|---|---|---|---|---|---|---|",
    ]
    for demo, row in results["rows"].items():
        same = row["is_preset"]
        mine, over = (
            ("is the preset", "")
            if same
            else (_ratio(row[f"tuned over {name}"]) for name in ("preset", "fp32"))
        )
        lines.append(
            f"| {demo} | {row['preset']} | {len(row['fp32_modules'])} of {row['modules']} | {mine} |"
            f" {row['predicted']:.3f} | {over} | {_ratio(row['preset over fp32'])} |"
        )
    return "\n".join(lines)
