"""Measure training steps in FP32, with torch.amp and with Mezzo: time, peak tensor bytes and losses, interleaved.

    python benchmarks/training_step.py                    # every workload, eager, then compiled
    python benchmarks/training_step.py --only gpt --rounds 10 --mode eager --out gpt.json
    python benchmarks/training_step.py --device cuda --large --out gpu.json

Every round runs one step of each contender in a new random order (with the same seed), so a change of the machine's
speed affects all of them. Ratios are of medians, with a 95 % bootstrap interval over rounds. Peak bytes are those of a
separate step, on separate objects, before any other contender exists. They are counted differently in `compiled` and
`eager` (`peak_how`), so compare them within a mode. Losses are those of the first timed steps. Contenders:
`step_contenders.py`. `bench.py` runs this once for each workload and mode.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from clocks import seconds
from mezzo.pytorch.hardware import describe
from mezzo.pytorch.memory import PeakTensorBytes
from models import LARGE, WORKLOADS, Loss, Workload
from pairs import ratio_of_medians
from step_contenders import BASELINE, COMPILED, CONTENDERS, FP16, MODES, Step, compiled

__all__ = ["CONTENDERS", "measure", "modes_of", "parser", "show"]

LOSSES = 10  # steps after which losses are compared, and the fewest of a contender, its warm-up included
TOO_SLOW = 10  # times FP32's first step: an fp16 contender that takes longer is not timed
PRODUCT = 0.2  # seconds of a product of 1024^3 in fp16, above which a step of products alone takes minutes
ALL_PRODUCTS = ("gpt", "text-gpt", "fine-tune", "lm-32k")

Make = Callable[[], Workload]


def _refuse_slow_products(row: str, contender: str, device: str) -> None:
    """Raise if a step of the contender would take minutes."""
    if contender != "amp-fp16" or row not in ALL_PRODUCTS:
        return
    a = torch.ones(1024, 1024, dtype=torch.float16, device=device)
    a @ a
    begun = time.perf_counter()
    (a @ a)[0, 0].item()
    if (taken := time.perf_counter() - begun) > PRODUCT:
        raise RuntimeError(f"not measured: a product of 1024^3 takes {taken:.1f} s in fp16 here")


def _graphs() -> tuple[int, int]:
    """How many graphs Dynamo has made, and how often it broke one."""
    counters = torch._dynamo.utils.counters
    return int(counters["stats"]["unique_graphs"]), sum(counters["graph_break"].values())


def _peak(step: Step, device: str) -> tuple[int, str]:
    """Peak tensor bytes of a step, and how they were counted."""
    gc.collect()
    watch = PeakTensorBytes(device)
    watch.start()
    step()
    found = watch.stop()
    return found.peak_bytes, found.how


class _Row:
    """One workload in one mode: its contenders, and what was found of them."""

    def __init__(self, name: str, mode: str, device: str, make: Make) -> None:
        self.name, self.mode, self.device, self.make = name, mode, device, make
        self.steps: dict[str, Step] = {}
        self.losses: dict[str, list[float]] = {}
        self.loss_of: dict[str, Loss] = {}
        self.found: dict[str, Any] = {
            "summary": make().summary,
            "device": device,
            "baseline": BASELINE[mode],
            "first_step_seconds": {},
            "peak_bytes": {},
            "peak_how": "",
            "raised": {},
        }
        if mode == COMPILED:
            self.found |= {"graphs": {}, "graph_breaks": {}}

    def _step(self, contender: str) -> Step:
        """A step on fresh objects; under compile with what the contender has compiled before."""
        way = CONTENDERS[contender]
        work = way.prepare(self.make().to(self.device))
        if self.mode == COMPILED:
            if contender not in self.loss_of:
                self.loss_of[contender] = compiled(work, contender).loss_of
            work = replace(work, loss_of=self.loss_of[contender])
        return way.build(work)

    def peak(self, contender: str) -> None:
        """A first step, and the peak of the second one, which finds the optimizer's state made."""
        before = _graphs() if self.mode == COMPILED else (0, 0)
        step = self._step(contender)
        begun = time.perf_counter()
        step()
        first = self.found["first_step_seconds"]
        first[contender] = round(time.perf_counter() - begun, 3)
        if self.mode == FP16 and first[contender] > TOO_SLOW * first.get(BASELINE[FP16], first[contender]):
            again = seconds(step, self.device)  # the first one may have compiled something
            if again > TOO_SLOW * first[BASELINE[FP16]]:
                raise RuntimeError(f"not timed: one step takes {again:.1f} s")
        if self.mode == COMPILED:
            step()  # gradients' layouts may be known only now, and be guarded on
            graphs, breaks = (now - then for now, then in zip(_graphs(), before))
            self.found["graphs"][contender], self.found["graph_breaks"][contender] = graphs, breaks
        self.found["peak_bytes"][contender], self.found["peak_how"] = _peak(step, self.device)

    def build(self, contender: str) -> None:
        """The objects that are timed, after a warm-up of two steps."""
        step = self._step(contender)
        losses: list[float] = []

        def recorded() -> float:
            loss = step()
            losses.append(loss)
            return loss

        for _ in range(2):
            recorded()
        self.steps[contender], self.losses[contender] = recorded, losses

    def attempt(self, act: Callable[[str], None], contender: str) -> None:
        """Do it, or record why it can't be done."""
        try:
            act(contender)
        except Exception as error:  # whatever a contender raises is a result about it
            lines = [line for line in str(error).splitlines() if line.strip()]
            self.found["raised"][contender] = f"{type(error).__name__}: {lines[0] if lines else ''}"
            self.steps.pop(contender, None)


def _estimate(row: _Row) -> dict[str, float]:
    """Seconds of one more step of each contender."""
    return {name: seconds(step, row.device) for name, step in row.steps.items()}


def _rounds(row: _Row, rounds: int | None, budget: float, tick: Callable[[str], None]) -> dict[str, Any]:
    """Timed steps by contender, as many of each."""
    once = _estimate(row)
    round_takes = max(1e-9, sum(once[name] for name in row.steps))
    count = max(2, rounds or max(LOSSES - 3, int(budget / round_takes)))
    times: dict[str, list[float]] = {name: [] for name in row.steps}
    draw = random.Random(0)
    order = list(row.steps)
    gc.collect()
    gc.freeze()
    for number in range(count):
        tick(f"round {number + 1} of {count}")
        draw.shuffle(order)
        for name in order:
            times[name].append(seconds(row.steps[name], row.device))
    gc.unfreeze()
    return {name: [float(f"{value:.5g}") for value in values] for name, values in times.items()}


def measure(
    name: str,
    mode: str,
    make: Make,
    device: str = "cpu",
    rounds: int | None = None,
    budget: float = 30,
    tick: Callable[[str], None] = lambda doing: None,
    only: tuple[str, ...] = (),
) -> dict[str, Any]:
    """What was found of one workload in one mode, as plain JSON values.

    Args:
        make: gives the workload.
        rounds: timed steps of each contender; None for as many as `budget` seconds hold, but at least 7.
        tick: called with what is being done.
        only: contenders; empty for all that run in this row and mode.
    """
    row = _Row(name, mode, device, make)
    chosen = [key for key, way in CONTENDERS.items() if (key in only if only else way.runs(name, mode))]
    for contender in chosen:
        tick(f"{contender}: bytes")
        row.attempt(lambda key: _refuse_slow_products(name, key, device), contender)
        if contender not in row.found["raised"]:
            row.attempt(row.peak, contender)
    for contender in chosen:  # only now: a contender kept alive would count in the others' bytes
        if contender not in row.found["raised"]:
            tick(f"{contender}: warm-up")
            row.attempt(row.build, contender)
    times = _rounds(row, rounds, budget, tick)
    found = row.found
    baseline = times.get(found["baseline"])
    found["ratios"] = {}
    for contender, series in times.items():
        if baseline and contender != found["baseline"]:
            ratio = ratio_of_medians(series, baseline)
            found["ratios"][contender] = {
                "ratio": ratio.value,
                "interval": [ratio.low, ratio.high],
                "rounds": len(series),
            }
    steps = min([LOSSES, *(len(losses) for losses in row.losses.values())])
    return {
        **found,
        "median_seconds": {key: statistics.median(values) for key, values in times.items()},
        "losses": {key: [float(f"{loss:.6g}") for loss in row.losses[key][:steps]] for key in times},
        "seconds": times,
    }


def table(found: Mapping[str, Any]) -> Table:
    """What `measure` found, to be printed in 80 columns."""
    shown = Table(pad_edge=False)
    shown.add_column("contender", no_wrap=True)
    for column in ("step", f"time / {found['baseline']}", "peak", "loss"):
        shown.add_column(column, justify="right", no_wrap=True)
    for contender, median in found["median_seconds"].items():
        ratio = found["ratios"].get(contender)
        over = "" if ratio is None else "{:.3f} ({:.3f} to {:.3f})".format(ratio["ratio"], *ratio["interval"])
        peak, loss = found["peak_bytes"][contender] / 1e6, found["losses"][contender][-1]
        shown.add_row(contender, f"{1e3 * median:.1f} ms", over, f"{peak:.0f} MB", f"{loss:.4f}")
    return shown


def show(name: str, mode: str, found: Mapping[str, Any], console: Console) -> None:
    """Print the table, and what raised."""
    console.print(f"{name}, {mode}: {found['summary']}")
    console.print(table(found))
    for contender, why in found["raised"].items():
        console.print(f"  {contender}: {why}", highlight=False)


def keep_memory() -> bool:
    """Tell the C library to keep freed memory, for every contender; False where this Mezzo can't."""
    import mezzo

    keep = getattr(mezzo, "keep_memory", None)
    if keep is not None:
        keep()
    return keep is not None


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that this and `bench.py` share."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--only", choices=tuple(WORKLOADS), action="append", help="run only this workload (may be repeated)"
    )
    made.add_argument(
        "--mode", choices=(*MODES, "both"), default="both", help="both: eager and compiled (default)"
    )
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--large", action="store_true", help="the same workloads at sizes that fill a GPU")
    made.add_argument(
        "--rounds", type=int, help="timed steps of each contender (default: as many as fit in --budget)"
    )
    made.add_argument(
        "--budget",
        type=float,
        default=20,
        help="seconds of timed steps per workload and mode (default %(default)s)",
    )
    made.add_argument(
        "--keep-memory", action="store_true", help="call mezzo.keep_memory() before any contender runs"
    )
    return made


def modes_of(mode: str) -> tuple[str, ...]:
    """The modes that an option names; eager first, because counting bytes takes another way once something compiled."""
    return tuple(each for each in MODES if each != FP16) if mode == "both" else (mode,)


def _ticker(progress: Progress, title: str) -> Callable[[str], None]:
    task = progress.add_task(title)

    def tick(doing: str) -> None:
        progress.update(task, description=f"{title}: {doing}")

    return tick


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--contender", choices=tuple(CONTENDERS), action="append", help="default: all")
    options.add_argument("--out", type=Path, help="a JSON file")
    arguments = options.parse_args()
    if arguments.keep_memory and not keep_memory():
        raise SystemExit("this Mezzo has no keep_memory()")
    workloads = LARGE if arguments.large else WORKLOADS
    console = Console(highlight=False)
    results: dict[str, Any] = {
        "machine": describe(),
        "assume_native": os.environ.get("MEZZO_ASSUME_NATIVE"),
        "workloads": {},
    }
    for mode in modes_of(arguments.mode):
        for name in arguments.only or workloads:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            with Progress(*columns, console=console, transient=True) as progress:
                found = measure(
                    name,
                    mode,
                    workloads[name],
                    arguments.device,
                    arguments.rounds,
                    arguments.budget,
                    _ticker(progress, f"{name}, {mode}"),
                    tuple(arguments.contender or ()),
                )
            results["workloads"].setdefault(name, {})[mode] = found
            show(name, mode, found, console)
            if arguments.out:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
