"""Measure the cost of watching ranges and of tracing: a training with it and one without, step by step.

    python benchmarks/watch.py                            # writes benchmarks/results/watch.json
    python benchmarks/watch.py --rows digits --windows 3
    python benchmarks/watch.py --every 20 --windows 2 --rows text-gpt

Both trainings run at once and take turns, step by step; both write records, which is when histograms are read. A window
is N steps of each, of which one is watched. The first column is the ratio of the medians of whole windows, with a 95 %
interval over windows. The second is the watched step relative to the median of the plain steps of its window, the
third the other steps of the watched training relative to plain ones.

Tracing (`trace=None`, on by default with a loss scale on a CPU) is measured on fp16 steps that are not skipped,
compared with `trace=False`. The rows are in `TRACED`; `tiny` is a perceptron whose step is nearly all Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

import mezzo
from clocks import seconds
from mezzo.core.records import RecordWriter
from mezzo.pytorch.hardware import describe
from mezzo.pytorch.monitor.ranges import DEFAULT_EVERY
from models import LARGE, WORKLOADS, Workload
from pairs import Ratio, ratio_of_medians

LIMIT = 1.02
"""What a training that is watched at the default interval may take, over one that is not."""


TRACED = {"tiny": 2000, "digits": 60, "lstm": 30}
"""Row -> steps of each training."""


def _tiny() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    return Workload(model, x, y, "a perceptron of 64, 64 and 10")


def traced(row: str, steps: int, device: str) -> dict[str, Any]:
    """Seconds of steps with and without tracing, in turns, and what they come to."""

    def one(trace: bool | None) -> Callable[[], object]:
        work = _tiny() if row == "tiny" else (LARGE if device == "cuda" else WORKLOADS)[row]()
        work = work.to(device)
        optimizer = torch.optim.AdamW(work.model.parameters(), lr=work.lr, fused=True)
        mp = mezzo.MixedPrecision(work.model, optimizer, "fp16", loss_scale=256.0, trace=trace)

        def step() -> None:
            with mp.autocast():
                loss = work.loss()
            mp.step(loss)

        return step

    sides = {"plain": one(False), "traced": one(None)}
    times: dict[str, list[float]] = {"plain": [], "traced": []}
    for number in range(-max(3, steps // 20), steps):
        for name in sides if number % 2 else reversed(sides):
            took = seconds(sides[name], device)
            if number >= 0:
                times[name].append(took)
    return {
        "plain_step_seconds": statistics.median(times["plain"]),
        "traced_step_seconds": statistics.median(times["traced"]),
        "traced_over_plain": _as_list(ratio_of_medians(times["traced"], times["plain"])),
        "steps": steps,
    }


def training(row: str, precision: str, every: int, device: str, records: Path) -> Callable[[], object]:
    """One step of a row's training, watched at every so many updates (0: never)."""
    work = (LARGE if device == "cuda" else WORKLOADS)[row]().to(device)
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=work.lr, fused=True)
    mp = mezzo.MixedPrecision(
        work.model, optimizer, precision, watch=every, trace=False, records=RecordWriter(records)
    )

    def step() -> None:
        with mp.autocast():
            loss = work.loss()
        mp.step(loss)

    return step


def measure(
    row: str, precision: str, every: int, windows: int, device: str, progress: Progress
) -> dict[str, Any]:
    """Seconds of every step of both trainings, and what they come to."""
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            name: training(row, precision, interval, device, Path(folder) / f"{name}.jsonl")
            for name, interval in (("plain", 0), ("watched", every))
        }
        times: dict[str, list[float]] = {"plain": [], "watched": []}
        task = progress.add_task(f"{row}, {precision}", total=windows * every)
        # The first window is thrown away: its watched update is the one that compiles.
        for number in range(-every, windows * every):
            for name in sides if number % 2 else reversed(sides):
                took = seconds(sides[name], device)
                if number >= 0:
                    times[name].append(took)
            if number >= 0:
                progress.advance(task)
    cut = {
        name: [values[start : start + every] for start in range(0, len(values), every)]
        for name, values in times.items()
    }
    whole = ratio_of_medians(*([sum(window) for window in cut[name]] for name in ("watched", "plain")))
    looks = [w[0] / statistics.median(p) for w, p in zip(cut["watched"], cut["plain"])]
    others = [t for window in cut["watched"] for t in window[1:]] or [t for (t,) in cut["watched"]]
    plain_steps = [t for window in cut["plain"] for t in window[1:]] or [t for (t,) in cut["plain"]]
    return {
        "plain_step_seconds": statistics.median(times["plain"]),
        "watched_training_over_plain": _as_list(whole),
        "watched_step_over_plain": statistics.median(looks),
        "other_steps_over_plain": _as_list(ratio_of_medians(others, plain_steps)),
        "windows": windows,
        "every": every,
    }


def _as_list(ratio: Ratio) -> list[float]:
    return [ratio.value, ratio.low, ratio.high]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=sorted(WORKLOADS), default=["digits", "lstm"])
    parser.add_argument("--precision", nargs="+", default=["bf16"])
    parser.add_argument(
        "--every", type=int, default=DEFAULT_EVERY, help="updates between watched steps (default %(default)s)"
    )
    parser.add_argument("--windows", type=int, default=8, help="windows per row (default %(default)s)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "watch.json")
    arguments = parser.parse_args()
    console = Console()
    table = Table(
        "row", "plain step", "watched training / plain", "watched step / plain", "other steps / plain"
    )
    rows: dict[str, Any] = {}
    with Progress(console=console, transient=True) as progress:
        for row in arguments.rows:
            for precision in arguments.precision:
                found = measure(
                    row, precision, arguments.every, arguments.windows, arguments.device, progress
                )
                rows[f"{row}, {precision}"] = found
                table.add_row(
                    f"{row}, {precision}",
                    f"{found['plain_step_seconds'] * 1e3:.2f} ms",
                    "{:.3f} [{:.3f}, {:.3f}]".format(*found["watched_training_over_plain"]),
                    f"{found['watched_step_over_plain']:.2f}",
                    "{:.3f} [{:.3f}, {:.3f}]".format(*found["other_steps_over_plain"]),
                )
    console.print(table)
    tracing = {row: traced(row, steps, arguments.device) for row, steps in TRACED.items()}
    table = Table("fp16", "plain step", "traced step", "traced / plain")
    for row, found in tracing.items():
        table.add_row(
            row,
            f"{found['plain_step_seconds'] * 1e3:.2f} ms",
            f"{found['traced_step_seconds'] * 1e3:.2f} ms",
            "{:.3f} [{:.3f}, {:.3f}]".format(*found["traced_over_plain"]),
        )
    console.print(table)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(
        json.dumps({"machine": describe(), "limit": LIMIT, "rows": rows, "tracing": tracing}, indent=1) + "\n"
    )
    console.print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
