"""One training step in FP32, under torch.amp and under Mezzo: time and peak tensor bytes, interleaved.

    python benchmarks/training_step.py                    # writes benchmarks/results/training_step.json
    python benchmarks/training_step.py --only gpt --rounds 10
    python benchmarks/training_step.py --device cuda --out gpu.json

Every round runs each contender's step once, in an order that rotates from round to round, so that a machine
whose speed drifts drifts for all of them. Ratios are of medians, with a 95 % bootstrap interval over rounds.
Memory is measured in a step of its own. Contenders: `fp32`; `amp-*`: torch.autocast (and torch.amp.GradScaler
for fp16); `mezzo-*`: mezzo.autocast (and mezzo.GradScaler) in the very same loop; `short-*`:
mezzo.MixedPrecision; `split-*`: the same with weights="split"; `lean-*`: with weights="split8", state="int8".
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import mezzo
from clocks import seconds
from mezzo.pytorch.machine import describe
from mezzo.pytorch.memory import PeakTensorBytes
from models import WORKLOADS, Workload
from pairs import ratio_of_medians

Step = Callable[[], float]


def _optimizer(work: Workload) -> torch.optim.Optimizer:
    return torch.optim.AdamW(work.model.parameters(), lr=1e-4, fused=True)


def fp32(work: Workload) -> Step:
    optimizer = _optimizer(work)

    def step() -> float:
        loss = work.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _loop(region: Callable[[str], Any], scaler: Callable[[str], Any]) -> Callable[[Workload], Step]:
    """The loop of torch.amp's own documentation, with whichever region and scaler it is given."""

    def build(work: Workload) -> Step:
        optimizer = _optimizer(work)
        device = work.inputs.device.type
        scaling = scaler(device)

        def step() -> float:
            with region(device):
                loss = work.loss()
            if scaling is None:
                loss.backward()
                optimizer.step()
            else:
                scaling.scale(loss).backward()
                scaling.step(optimizer)
                scaling.update()
            optimizer.zero_grad()
            return loss.item()

        return step

    return build


def short(precision: str, weights: str | None = None, state: str | None = None) -> Callable[[Workload], Step]:
    def build(work: Workload) -> Step:
        mp = mezzo.MixedPrecision(
            work.model, _optimizer(work), precision=precision, weights=weights, state=state
        )

        def step() -> float:
            with mp.autocast():
                loss = work.loss()
            result = mp.step(loss)
            return float(result.loss)

        return step

    return build


CONTENDERS: dict[str, Callable[[Workload], Step]] = {
    "fp32": fp32,
    "amp-bf16": _loop(lambda device: torch.autocast(device, torch.bfloat16), lambda device: None),
    "mezzo-bf16": _loop(lambda device: mezzo.autocast("bf16", device), lambda device: None),
    "short-bf16": short("bf16"),
    "split-bf16": short("bf16", "split"),
    "lean-bf16": short("bf16", "split8", "int8"),
    "mezzo-fp16": _loop(
        lambda device: mezzo.autocast("fp16", device), lambda device: mezzo.GradScaler(device)
    ),
    "short-fp16": short("fp16"),
    "amp-fp16": _loop(
        lambda device: torch.autocast(device, torch.float16), lambda device: torch.amp.GradScaler(device)
    ),
}
# A ratio a row of the figures: (time of) the first over (time of) the second.
RATIOS = (
    ("fp32", "mezzo-bf16"),
    ("mezzo-bf16", "amp-bf16"),
    ("short-bf16", "amp-bf16"),
    ("split-bf16", "amp-bf16"),
    ("lean-bf16", "amp-bf16"),
    ("mezzo-fp16", "fp32"),
    ("short-fp16", "fp32"),
    ("amp-fp16", "mezzo-fp16"),
)
# Rounds of a contender on a CPU, where that is fewer than --rounds: one step of it takes many seconds.
SLOW = {("cnn", "amp-fp16"): 3}


# Contenders that are all matrix products in fp16, and the time of one of 1024^3 above which they are left out: where
# a CPU lacks the instructions, a step would take minutes.
PRODUCTS = {("gpt", "amp-fp16")}
TOO_SLOW = 0.2


def _refuse_slow_products(name: str, contender: str, device: str) -> None:
    """Raise where the contender would take minutes a step."""
    if (name, contender) not in PRODUCTS:
        return
    a = torch.ones(1024, 1024, dtype=torch.float16, device=device)
    a @ a
    begun = time.perf_counter()
    (a @ a)[0, 0].item()
    if (taken := time.perf_counter() - begun) > TOO_SLOW:
        raise RuntimeError(f"not measured: a product of 1024^3 takes {taken:.1f} s in fp16 here")


def _second_step(step: Step, device: str) -> tuple[float, int]:
    """The loss and the peak tensor bytes of a step that finds the optimizer's state made."""
    step()
    gc.collect()
    watch = PeakTensorBytes(device)
    watch.start()
    loss = step()
    return loss, watch.stop().peak_bytes


def measure(name: str, rounds: int, device: str, console: Console) -> dict[str, Any]:
    steps: dict[str, Step] = {}
    failed: dict[str, str] = {}
    losses: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for contender, build in CONTENDERS.items():
        try:
            _refuse_slow_products(name, contender, device)
            losses[contender], peaks[contender] = _second_step(build(WORKLOADS[name]().to(device)), device)
        except RuntimeError as error:
            failed[contender] = str(error).splitlines()[0]
    for contender in losses:  # only now: a contender kept alive would count in the others' bytes
        steps[contender] = CONTENDERS[contender](WORKLOADS[name]().to(device))
        steps[contender]()
    times: dict[str, list[float]] = {contender: [] for contender in steps}
    order = list(steps)
    for number in track(range(rounds), description=f"{name}: rounds", console=console):
        turn = number % len(order)
        for contender in order[turn:] + order[:turn]:
            if device == "cpu" and number >= SLOW.get((name, contender), rounds):
                continue
            times[contender].append(seconds(steps[contender], device))
    ratios = {}
    for above, below in RATIOS:
        if above in times and below in times:
            n = min(len(times[above]), len(times[below]))
            found = ratio_of_medians(times[above][:n], times[below][:n])
            ratios[f"{above} / {below}"] = {
                "ratio": found.value,
                "interval": [found.low, found.high],
                "rounds": n,
            }
    return {
        "summary": WORKLOADS[name]().summary,
        "median_seconds": {key: statistics.median(values) for key, values in times.items()},
        "seconds": times,
        "ratios": ratios,
        "loss_after_2_steps": losses,
        "peak_bytes": peaks,
        "raised": failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=sorted(WORKLOADS), action="append", help="this workload (may be repeated)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--rounds", type=int, default=60, help="timed steps of each contender (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "training_step.json")
    arguments = parser.parse_args()
    console = Console()
    results = {"machine": describe(), "workloads": {}}
    for name in arguments.only or WORKLOADS:
        results["workloads"][name] = found = measure(name, arguments.rounds, arguments.device, console)
        table = Table(title=found["summary"])
        for column in ("contender", "median step"):
            table.add_column(column)
        for contender, median in found["median_seconds"].items():
            table.add_row(contender, f"{median:.4f} s")
        for contender, why in found["raised"].items():
            table.add_row(contender, f"raised: {why}")
        console.print(table)
        for row, value in found["ratios"].items():
            console.print(
                f"  {row}: {value['ratio']:.3f}  [{value['interval'][0]:.3f}, {value['interval'][1]:.3f}]"
                f"  ({value['rounds']} rounds)"
            )
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
