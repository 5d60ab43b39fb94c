"""Measure AdamW steps of torch, of Mezzo in each mode and of other libraries: time, bytes and distance from FP64.

    python benchmarks/optimizers.py                                # writes benchmarks/results/optimizers.json
    python benchmarks/optimizers.py --sizes 1M --layouts one --rounds 10 --only "mezzo split/fp32"
    python benchmarks/optimizers.py --device cuda

Every round runs one step of each contender, in an order that rotates from round to round, so each step finds the
caches full of other data, as after a backward pass. Times are divided by those of torch's fused AdamW on FP32
weights of the same size and layout: medians over common rounds, with a 95 % bootstrap interval. If not all contenders
fit in memory at once they run in batches, each including torch's fused AdamW. Bytes per parameter are counted from
live tensors. Bytes moved are the minimum for a step: weights and state read and written, gradients read. Compilation
happens before the clock starts; `first_step` times it in separate processes, with empty and with full caches.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import statistics
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import modes
from clocks import copy_bandwidth, launches, seconds
from contenders import BASELINE, CONTENDERS, HYPER, PACKAGES, Contender
from distance import distances
from first_step import both_starts
from live import alive, parts
from mezzo.pytorch.hardware import describe
from pairs import ratio_of_medians
from shapes import LAYOUTS, SIZES, parameters
from training_bytes import measure_in_a_process

PARTS = ("training", "modes", "first_step", "cells", "distance")
MOST_BYTES = 24  # per parameter: the most that a contender and its step may allocate


@dataclass
class Running:
    """A contender with its parameters, and its timings so far."""

    contender: Contender
    params: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    held: dict[str, int]
    warm: float
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        self.optimizer.step()


def start(contender: Contender, size: str, layout: str, device: str) -> Running:
    """Build it, let it make its state in two steps, and count what came into being meanwhile."""
    before = alive()
    params = parameters(size, layout, contender.dtype, device)
    optimizer = contender.build(params)
    optimizer.step()
    warm = min(seconds(optimizer.step, device) for _ in range(2))
    held = parts(optimizer)
    held["alive"] = sum(bytes_ for storage, bytes_ in alive().items() if storage not in before)
    return Running(contender, params, optimizer, held, warm)


def race(
    runners: dict[str, Running], rounds: int, patience: float, device: str, console: Console, what: str
) -> None:
    """Step each once a round, the order rotating; one whose steps took `patience` seconds has had enough after 3."""
    order = list(runners)
    for number in track(range(rounds), description=what, console=console):
        turn = number % len(order)
        for name in order[turn:] + order[:turn]:
            runner = runners[name]
            if number >= 3 and name != BASELINE and sum(runner.seconds) > patience:
                continue
            with runner.contender.environment():
                runner.seconds.append(seconds(runner.step, device))


def row(runner: Running, baseline: Running, numel: int, copies: float) -> dict[str, Any]:
    """What is written about one contender of one cell."""
    rounds = min(len(runner.seconds), len(baseline.seconds))
    ratio = ratio_of_medians(runner.seconds[:rounds], baseline.seconds[:rounds])
    median = statistics.median(runner.seconds)
    held = runner.held
    moved = 2 * (held["weights"] + held["state"]) + held["gradients"]
    total = held["weights"] + held["gradients"] + held["state"]
    return {
        "median_ms": round(median * 1e3, 4),
        "quartiles_ms": [
            round(q * 1e3, 4)
            for q in torch.tensor(runner.seconds).quantile(torch.tensor([0.25, 0.75])).tolist()
        ],
        "rounds": rounds,
        "ratio": round(ratio.value, 4),
        "interval": [round(ratio.low, 4), round(ratio.high, 4)],
        "gb_per_s": round(moved / median / 1e9, 3),
        "of_copy": round(moved / median / copies, 4),
        "bytes_per_parameter": {
            **{part: round(count / numel, 4) for part, count in held.items()},
            "total": round(total / numel, 4),
        },
    }


def cell(
    size: str, layout: str, chosen: list[str], arguments: argparse.Namespace, copies: float, console: Console
) -> dict[str, Any]:
    """Every chosen contender at one size in one layout, in as many batches as memory asks for."""
    device = arguments.device
    numel = sum(torch.Size(shape).numel() for shape in LAYOUTS[layout](size))
    rows: dict[str, Any] = {}
    raised: dict[str, str] = {}
    waiting = [name for name in chosen if name != BASELINE]
    batches = 0
    while waiting or not batches:
        batches += 1
        runners = {BASELINE: start(CONTENDERS[BASELINE], size, layout, device)}
        while waiting:
            used = sum(runner.held["alive"] for runner in runners.values())
            if len(runners) > 1 and used + MOST_BYTES * numel > arguments.memory * 2**30:
                break
            name = waiting.pop(0)
            contender = CONTENDERS[name]
            why = refusal(contender, size, device)
            if not why:
                try:
                    with contender.environment(), warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # a peer's own
                        runners[name] = start(contender, size, layout, device)
                except Exception as error:  # whatever a contender does, the others run
                    why = (
                        f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
                    )
            if why:
                raised[name] = why
        race(
            runners,
            arguments.rounds,
            arguments.patience,
            device,
            console,
            f"{size}, {layout}, batch {batches}",
        )
        for name, runner in runners.items():
            if name not in rows:
                rows[name] = row(runner, runners[BASELINE], numel, copies)
                if device == "cuda":
                    with runner.contender.environment():
                        rows[name]["launches"] = launches(runner.step)
        runners.clear()
        gc.collect()
    return {
        "size": size,
        "layout": layout,
        "parameters": numel,
        "tensors": len(LAYOUTS[layout](size)),
        "batches": batches,
        "rows": {name: rows[name] for name in CONTENDERS if name in rows},
        "raised": raised,
    }


def refusal(contender: Contender, size: str, device: str) -> str:
    """Why it is not even tried; "" if it is."""
    if device not in contender.devices:
        return f"not run on {device}: it exists for {' and '.join(contender.devices)}"
    if SIZES[size] > SIZES[contender.up_to]:
        return f"not run above {contender.up_to}: it is slow"
    return ""


def versions() -> dict[str, str | None]:
    """The versions of optional packages; None if not installed."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def show(found: dict[str, Any], console: Console) -> None:
    """The cell as a table."""
    table = Table(title=f"{found['size']} parameters, {found['tensors']} tensors")
    for column in ("contender", "median", "ratio to torch fused FP32", "GB/s", "bytes per parameter"):
        table.add_column(column)
    for name, value in found["rows"].items():
        low, high = value["interval"]
        table.add_row(
            name,
            f"{value['median_ms']:.3f} ms",
            f"{value['ratio']:.3f}  [{low:.3f}, {high:.3f}]  ({value['rounds']})",
            f"{value['gb_per_s']:.1f}",
            f"{value['bytes_per_parameter']['total']:.3f}",
        )
    for name, why in found["raised"].items():
        table.add_row(name, why)
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument(
        "--rounds", type=int, default=40, help="timed steps of each contender (default %(default)s)"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=12,
        help="seconds after which a slow contender is not run again (default %(default)s)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=tuple(CONTENDERS), help="run only these and torch's fused AdamW"
    )
    parser.add_argument(
        "--memory", type=float, default=10, help="GiB per batch of contenders (default %(default)s)"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="what to measure (default: all)",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "optimizers.json")
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    device, begun = arguments.device, time.perf_counter()
    console = Console() if sys.stdout.isatty() else Console(width=120)
    chosen = [name for name in CONTENDERS if name in (arguments.only or CONTENDERS)]
    tried = {name: c for name in chosen if device in (c := CONTENDERS[name]).devices}
    copies = copy_bandwidth(device)
    results: dict[str, Any] = {
        "machine": describe(),
        "device": device,
        "load_at_start": round(os.getloadavg()[0], 2),  # of the last minute: what else ran here
        "versions": versions(),
        "hyperparameters": HYPER,
        "copy_gb_per_s": round(copies / 1e9, 3),
        "contenders": {name: CONTENDERS[name].summary for name in chosen},
        "cells": [],
    }

    def write() -> None:
        results["seconds"] = round(time.perf_counter() - begun, 1)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")

    if "training" in arguments.parts:  # first: nothing of this process is compiled or large yet
        results["training"] = measure_in_a_process(device, console)
        write()
    if "modes" in arguments.parts and device == "cpu":
        results["modes"] = modes.count(console)
    if "first_step" in arguments.parts:
        results["first_step"] = both_starts([n for n, c in tried.items() if c.compiles], device, console)
    write()
    for size in arguments.sizes if "cells" in arguments.parts else ():
        for layout in arguments.layouts:
            results["cells"].append(cell(size, layout, chosen, arguments, copies, console))
            show(results["cells"][-1], console)
            write()
    if "distance" in arguments.parts:
        results["distance"] = distances(tried, device, console)
    write()
    console.print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
