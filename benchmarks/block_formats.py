"""Measure what emulated block formats cost on this machine: a training step of the text-gpt demo's model.

    python benchmarks/block_formats.py       # writes benchmarks/results/block_formats.json; two minutes

The step and its timing are those of `emulation.py`: forward, backward and AdamW of each precision, alternating in a
random order, in several processes. `time / bf16` is a ratio of medians with a 95 % bootstrap interval over processes
and their rounds. Goals: BARS below.

`kept` is what forward leaves for backward, as bytes of this process. `on a GPU` counts the codes and scales of
quantized layers as a GPU stores them: elements of 4 bits in half a byte, scales of e8m0 and e4m3fn in one. Here they
take one and four. Both counts are exact, without noise. `nvfp4` leaves the last of the model's four blocks in bf16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import emulation
from mezzo.pytorch.hardware import describe
from pairs import ratio_over_processes

RESULTS = Path(__file__).parent / "results" / "block_formats.json"
DEMO, BASELINE = "text-gpt", "bf16"
POLICIES = (BASELINE, "fp8", "mxfp8", "fp8-block", "nvfp4")
BARS: Mapping[str, float] = {"mxfp8": 2.0, "nvfp4": 3.0}
"""The most that a step may take, relative to bf16."""


def _quantized_layers(loss: torch.Tensor) -> Iterator[Any]:
    """The graph's nodes that keep a quantized input."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "QuantizedLinear" in node.name() and node.saved_tensors[1] is not None:
            yield node
        waiting += [each for each, _ in node.next_functions]


def bytes_kept(policy: str) -> dict[str, int]:
    """Of a step's forward: in this process, and with codes and scales as a GPU stores them."""
    work = emulation.MODELS[DEMO]()
    mp = emulation.Contender(policy, work)._mp
    with mp.autocast():
        loss = work.loss()
    here = there = 0
    for node in _quantized_layers(loss):
        _, codes, scales, tensor_scale = node.saved_tensors
        here += sum(each.nbytes for each in (codes, scales, tensor_scale) if each is not None)
        there += node.recipe.weight_gradient[1].stored_bytes(codes.numel(), scales.numel())
    kept = sum(count for count, _ in emulation.kept_bytes(DEMO, policy))
    return {"kept_bytes": kept, "on_a_gpu": kept - here + there, "inputs": here, "inputs_on_a_gpu": there}


def measure(rounds: int, processes: int, threads: int) -> dict[str, Any]:
    """A row for each precision: milliseconds, its time relative to bf16's, and bytes."""
    found = [emulation.in_a_process(DEMO, POLICIES, "own", rounds, threads) for _ in range(processes)]
    if raised := {policy: why for one in found for policy, why in one["raised"].items()}:
        raise SystemExit(f"not measured: {raised}")
    rows: dict[str, Any] = {}
    for policy in POLICIES:
        times, below = ([one["seconds"][name] for one in found] for name in (policy, BASELINE))
        ratio = ratio_over_processes(times, below)
        whole = sorted(second for one in times for second in one)
        rows[policy] = {
            "milliseconds": round(1e3 * whole[len(whole) // 2], 2),
            "time": [round(value, 4) for value in (ratio.value, ratio.low, ratio.high)],
            **bytes_kept(policy),
        }
    return {"summary": found[0]["summary"], "rows": rows}


def verdict(policy: str, time: tuple[float, float, float]) -> str:
    """met, open (the interval includes the goal) or missed; empty without a goal."""
    if policy not in BARS:
        return ""
    value, low, _ = time
    return "met" if value <= BARS[policy] else "open" if low <= BARS[policy] else "missed"


def table(rows: Mapping[str, Any]) -> Table:
    """What `measure` found."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("precision", "ms", "time / bf16", "goal", "kept MB", "on a GPU"):
        shown.add_column(column, justify="left" if column == "precision" else "right", no_wrap=True)
    for policy, row in rows.items():
        shown.add_row(
            policy,
            f"{row['milliseconds']:.0f}",
            "{:.2f} ({:.2f} to {:.2f})".format(*row["time"]),
            f"{BARS[policy]:g} {verdict(policy, row['time'])}" if policy in BARS else "",
            f"{row['kept_bytes'] / 1e6:.1f}",
            f"{row['on_a_gpu'] / 1e6:.1f}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each precision in a process")
    parser.add_argument("--processes", type=int, default=4, help="one after the other (default %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default %(default)s")
    options = parser.parse_args()
    if options.rounds < 2 or options.processes < 1:
        raise SystemExit("use --rounds from 2 on and --processes from 1 on")
    torch.set_num_threads(options.threads)
    found = measure(options.rounds, options.processes, options.threads)
    machine = describe() | {"threads": options.threads}
    settings = {"rounds": options.rounds, "processes": options.processes}
    results = {"schema": 1, "machine": machine, **settings, "bars": dict(BARS), **found}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console = Console(highlight=False)
    console.print(found["summary"])
    console.print(table(found["rows"]))
    console.print(f"written: {options.out}")


if __name__ == "__main__":
    main()
