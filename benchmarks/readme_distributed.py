"""Tables of docs/dev/benchmarks.md: restarts after kills, and what Mezzo adds to the collectives of a step."""

from __future__ import annotations

import itertools
from typing import Any

from readme_steps import header

_MEZZO = ("MixedPrecision", "GradScaler", "mezzo run")
_GRADIENTS = "torch bf16"  # the contender whose collectives are only those of gradients and parameters


def elastic(results: dict[str, Any]) -> str:
    """A row for each training whose ranks were killed."""
    lines = header("training", "policy", "kills", "steps", "skipped", "weights and momentum at the end")
    for row in results["rows"]:
        end = "the bits of the undisturbed run" if row["same_bits"] else "differ"
        counts = " | ".join(str(row[key]) for key in ("kills", "steps", "skipped"))
        lines.append(f"| {row['row']} | `{row['policy']}` | {counts} | {end} |")
    return "\n".join(lines)


def collectives(results: dict[str, Any]) -> str:
    """The collectives of a step besides those of gradients and parameters, alike on all numbers of ranks."""
    rows = {(row["wrapper"], row["contender"], row["ranks"]): row for row in results["steps"]}
    worlds = sorted({row["ranks"] for row in results["steps"]})
    lines = header("", "PyTorch", *(f"`{name}`" for name in _MEZZO))
    for wrapper, kind in itertools.product(("DDP", "FSDP2"), ("bf16", "bf16, clip", "fp16", "fp16, clip")):
        cells = []
        for contender in (f"{name} {kind}" for name in ("torch", *_MEZZO)):
            found = {_more(rows, wrapper, contender, world) for world in worlds}
            if (wrapper, contender, worlds[0]) in rows:
                cells.append(found.pop() if len(found) == 1 else "differs by the number of ranks")
            else:
                cells.append("")  # bf16 needs no GradScaler
        lines.append(f"| {wrapper}, {kind.replace('clip', 'clipping')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _more(rows: dict[Any, Any], wrapper: str, contender: str, world: int) -> str:
    if (wrapper, contender, world) not in rows:
        return ""
    row, least = rows[wrapper, contender, world], rows[wrapper, _GRADIENTS, world]
    count = sum(row["collectives"].values()) - sum(least["collectives"].values())
    size = sum(row["bytes"].values()) - sum(least["bytes"].values())
    return f"{count} all-reduce{'s' * (count > 1)}, {size} bytes" if count else "none"


def at_scale(results: dict[str, Any]) -> str:
    """Microseconds of one small all-reduce by NCCL's own model."""
    rows = results["at_scale"]
    lines = header("ranks", *(f"{row['ranks']:,}" for row in rows))
    for name in ("tree", "ring"):
        times = (f"{row[f'{name}_s'] * 1e6:,.0f} µs" for row in rows)
        lines.append(f"| {name} | {' | '.join(times)} |")
    return "\n".join(lines)
