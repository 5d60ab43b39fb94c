"""The parts of the pages on formats that the machine lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NATIVE = {"own": "what it has", "none": "nothing"}


def _where(results: dict[str, Any], command: str, **settings: object) -> str:
    machine = results["machine"]
    told = "".join(f", {value} {name}" for name, value in settings.items())
    return f"`python benchmarks/{command}` on {machine['cpu']}, torch {machine['torch']}{told}."


def _ratio(found: Sequence[float]) -> str:
    value, low, high = found
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def emulation(results: dict[str, Any]) -> str:
    """One row a demo, a policy and what counts as native."""
    bars = results["bars"]
    asked = ", ".join(
        f"{name} {' and '.join(f'{what} {most:g}' for what, most in bar.items() if most is not None)}"
        for name, bar in bars.items()
    )
    lines = [
        f"{_where(results, 'emulation.py')} At most: {asked}.",
        "",
        "| demo | native | policy | time / FP32's | kept for backward / FP32's | |",
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
    """One row a block and a way of computing it."""
    lines = [
        f"{_where(results, 'fp8.py', threads=results['threads'], rounds=results['rounds'])} "
        f"Emulated in {results['emulated_in']}.",
        "",
        "| transformer block | computed in | time / FP32's | kept / FP32's | error of the gradients |",
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
        lines += ["", f"Native fp8: {unmeasured} layer sizes not measured in this file, for want of a GPU."]
    return "\n".join(lines)
