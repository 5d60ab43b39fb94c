"""The tables of docs/dev/benchmarks.md on formats that the machine lacks, on fp8 and on block formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NATIVE = {"own": "its own", "none": "none"}


def _where(results: dict[str, Any], command: str, **settings: object) -> str:
    machine = results["machine"]
    options = "".join(f", {value} {name}" for name, value in settings.items())
    return f"`python benchmarks/{command}` on {machine['cpu']}, torch {machine['torch']}{options}."


def _ratio(found: Sequence[float]) -> str:
    value, low, high = found
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def emulation(results: dict[str, Any]) -> str:
    """One row per demo, policy and choice of native formats."""
    bars = results["bars"]
    goals = ", ".join(
        f"{name} {' and '.join(f'{what} {most:g}' for what, most in bar.items() if most is not None)}"
        for name, bar in bars.items()
    )
    lines = [
        f"{_where(results, 'emulation.py')} Goals, at most: {goals}.",
        "",
        "| demo | native formats | policy | time / FP32's | kept for backward / FP32's | |",
        "|---|---|---|---|---|---|",
    ]
    for demo, settings in results["demos"].items():
        for native, found in settings.items():
            for policy, row in found["policies"].items():
                if policy == "fp32":
                    continue
                bar = bars.get(policy.partition(",")[0], {})
                missed = [
                    what
                    for what, most in bar.items()
                    if most is not None and (row["time"][1] if what == "time" else row["kept"]) > most
                ]
                verdict = f"**{' and '.join(missed)} missed**" if missed else ("met" if bar else "")
                cells = (
                    demo,
                    NATIVE[native],
                    f"`{policy}`",
                    _ratio(row["time"]),
                    f"{row['kept']:.3f}",
                    verdict,
                )
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fp8(results: dict[str, Any]) -> str:
    """One row per block and precision."""
    lines = [
        f"{_where(results, 'fp8.py', threads=results['threads'], rounds=results['rounds'])} "
        f"Emulated in {results['emulated_in']}.",
        "",
        "| transformer block | precision | time / FP32's | kept / FP32's | error of the gradients |",
        "|---|---|---|---|---|",
    ]
    for block in results["blocks"]:
        for name in ("bf16", "tensorwise", "rowwise"):
            row = block.get(name)
            if row is None:
                continue
            title = name if name == "bf16" else f"fp8, {name}"
            lines.append(
                f"| width {block['width']}, {block['tokens']} tokens | {title} | {_ratio(row['over_fp32'])} | "
                f"{row['saved_over_fp32']:.2f} | {row['gradient_error']:.1e} |"
            )
    unmeasured = sum(not layer.get("measured") for layer in results["layers"])
    if unmeasured:
        lines += [
            "",
            f"Native fp8: {unmeasured} layer sizes were not measured, because this machine has no such GPU.",
        ]
    return "\n".join(lines)


def block_formats(results: dict[str, Any]) -> str:
    """One row per precision."""
    settings = {name: results[name] for name in ("rounds", "processes")}
    lines = [
        _where(results, "block_formats.py", threads=results["machine"]["threads"], **settings),
        "",
        "| precision | time / bf16's | goal, at most | kept for backward | of it, quantized inputs | these on a GPU |",
        "|---|---|---|---|---|---|",
    ]
    for policy, row in results["rows"].items():
        bar = results["bars"].get(policy)
        missed = bar is not None and row["time"][1] > bar
        goal = "" if bar is None else f"{bar:g}, {'**missed**' if missed else 'met'}"
        megabytes = [f"{row[key] / 1e6:.1f} MB" for key in ("kept_bytes", "inputs", "inputs_on_a_gpu")]
        lines.append(f"| `{policy}` | {_ratio(row['time'])} | {goal} | {' | '.join(megabytes)} |")
    return "\n".join(lines)
