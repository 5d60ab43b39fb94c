"""Measure layer_norm and rms_norm, forward and backward: Mezzo on 16-bit input, and the same op under torch.amp.

    python benchmarks/norms.py                 # writes benchmarks/results/norms.json

Parameters are FP32. On a CPU, torch.amp lists neither op, so PyTorch's kernel uses the input as it is: `amp` is
PyTorch on the same 16-bit input, and `fp32` PyTorch on FP32 input. The three alternate within each round, in an order
that rotates; a ratio is of medians, with a bootstrap interval over paired rounds. Above 1 Mezzo is faster. `dweight`
is the error of the weight's gradient against FP64, relative to its norm.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import mezzo
from mezzo.pytorch.hardware import describe
from mezzo.pytorch.kernels.norms import layer_norm, rms_norm
from pairs import ratio_of_medians

RESULTS = Path(__file__).parent / "results" / "norms.json"
SHAPES = ((2048, 384), (2048, 1024), (64, 1024), (32768, 64))
Run = Callable[[], tuple[Tensor, ...]]


def contenders(op: str, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Run]:
    torch.manual_seed(0)
    columns = shape[1]
    x, dy = torch.randn(shape).to(dtype), (torch.randn(shape) * 0.5 + 0.3).to(dtype)
    weight = (torch.randn(columns) * 0.1 + 1).requires_grad_()
    bias = torch.zeros(columns, requires_grad=True)
    parameters = (weight, bias) if op == "layer_norm" else (weight,)
    mine: Any = layer_norm if op == "layer_norm" else rms_norm
    its: Any = torch.layer_norm if op == "layer_norm" else torch.rms_norm

    def run(function: Any, wanted: torch.dtype) -> Run:
        own, seed = x.to(wanted).requires_grad_(), dy.to(wanted)
        given = tuple(p.detach().to(wanted if wanted is torch.float64 else p.dtype) for p in parameters)
        for p in given:
            p.requires_grad_()
        # What autocast leaves alone is what it does: no region is entered, which would only add to its time.
        return lambda: torch.autograd.grad(function(own, (columns,), *given), (own, *given), seed)

    return {
        "mezzo": run(mine, dtype),
        "amp": run(its, dtype),
        "fp32": run(its, torch.float32),
        "truth": run(its, torch.float64),
    }


def measured(op: str, shape: tuple[int, int], dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    runs = contenders(op, shape, dtype)
    truth = runs.pop("truth")()[1]
    errors = {name: float((run()[1].double() - truth).norm() / truth.norm()) for name, run in runs.items()}
    repeats = max(1, (1 << 21) // (shape[0] * shape[1]))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds + 3):
        for name in names[number % 3 :] + names[: number % 3]:
            run = runs[name]
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            took = (time.perf_counter() - start) / repeats
            if number >= 3:
                seconds[name].append(took)
    row: dict[str, Any] = {"op": op, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
    for name in names:
        row[name] = {
            "microseconds": float(torch.tensor(seconds[name]).median()) * 1e6,
            "dweight": errors[name],
        }
        row[name]["least_microseconds"] = min(seconds[name]) * 1e6
        if name != "mezzo":
            found = ratio_of_medians(seconds[name], seconds["mezzo"])
            row[name]["over_mezzo"] = [found.value, found.low, found.high]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--keep-memory", action="store_true", help="call mezzo.keep_memory() first, for all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.keep_memory:
        keep_memory: Any = getattr(mezzo, "keep_memory")  # noqa: B009
        keep_memory()
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    table = Table(
        "op", "shape", "dtype", "mezzo us", "amp us", "fp32 us", "amp / mezzo", "fp32 / mezzo", "dweight"
    )
    rows = []
    for op in ("layer_norm", "rms_norm"):
        for shape in SHAPES:
            for dtype in (torch.bfloat16, torch.float16):
                row = measured(op, shape, dtype, options.rounds)
                rows.append(row)
                ratios = ["{:.2f} ({:.2f} to {:.2f})".format(*row[n]["over_mezzo"]) for n in ("amp", "fp32")]
                times = [f"{row[n]['microseconds']:.0f}" for n in ("mezzo", "amp", "fp32")]
                errors = f"{row['mezzo']['dweight']:.1e} against {row['amp']['dweight']:.1e}"
                table.add_row(op, str(list(shape)), row["dtype"], *times, *ratios, errors)
    Console(width=150).print(table)
    result = {
        "schema": 1,
        "machine": describe(),
        "threads": options.threads,
        "keep_memory": options.keep_memory,
        "rounds": options.rounds,
        "rows": rows,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
