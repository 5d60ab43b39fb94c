"""The transfer-learning demo in FP32, bf16 and fp16: accuracy, time of a step and peak memory, on each Keras backend.

    python benchmarks/transfer.py                     # writes benchmarks/results/transfer.json, in some eleven minutes
    python benchmarks/transfer.py --backend tensorflow --rounds 1
    python benchmarks/readme.py                       # puts the table into docs/dev/benchmarks.md

Every run is a process of its own, started as `mezzo compare --demo transfer` starts it. A round runs each precision
once with the same seed, in an order that turns; step k of one precision is paired with step k of the other. A run that
lasts longer than --limit is ended: its steps count, and it has no accuracy. The runs without pretraining say what the
pretraining is worth.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from mezzo.core import records
from mezzo.runner.lifecycle import RunRequest
from pairs import ratio_over_processes

SCRIPT, METRIC = Path(__file__).parent / "keras_transfer.py", r"accuracy: ([0-9.]+) %"
BACKENDS = ("tensorflow", "torch", "jax")
PRECISIONS = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
STAGES = ("pretraining", "head", "fine-tuning")
"""One optimizer each, in this order."""
WARM_UP = 2
"""Steps at the head of a stage that compile, or fill caches."""
SCRATCH = ("--pretrain-epochs", "0")


@dataclass(frozen=True)
class Run:
    """What one process recorded: seconds of the steps of each stage by their number, and the rest if it came so far."""

    times: dict[str, dict[int, float]]
    accuracy: float | None
    peak_bytes: int | None
    skipped: int
    seconds: float | None
    machine: dict[str, Any]


def step_times(updates: Sequence[records.UpdateRecord]) -> dict[str, dict[int, float]]:
    """Stage -> number of the step in its stage -> seconds since the step before; without warm-up and watched steps."""
    found: dict[str, dict[int, float]] = {}
    for number, stage in enumerate(STAGES):
        mine = [update for update in updates if update.optimizer == number]
        found[stage] = {
            k: after.at - before.at
            for k, (before, after) in enumerate(pairwise(mine), start=1)
            if k > WARM_UP and not before.observed and not after.observed
        }
    return found


def read(path: Path, output: str) -> Run:
    """A run from its records, and from what the script printed."""
    found = list(records.read(path))
    updates = [one for one in found if isinstance(one, records.UpdateRecord)]
    metric = re.findall(METRIC, output)
    return Run(
        times=step_times(updates),
        accuracy=float(metric[-1]) if metric else None,
        peak_bytes=next((one.peak_bytes for one in found if isinstance(one, records.MemoryRecord)), None),
        skipped=sum(one.skipped for one in updates),
        seconds=next((one.seconds for one in found if isinstance(one, records.RunEnded)), None)
        if metric
        else None,
        machine=next(one.machine for one in found if isinstance(one, records.RunStarted)),
    )


def start(backend: str, precision: str, seed: int, argv: Sequence[str], limit: float) -> Run:
    """One run of the demo, ended after `limit` seconds.

    Raises:
        SystemExit: it failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, text = Path(folder, "run.jsonl"), Path(folder, "request.json")
        request = RunRequest(
            target=str(SCRIPT),
            argv=tuple(argv),
            policy=precision,
            records=path,
            seed_offset=seed,
            observe=True,
            summary=False,
        )
        text.write_text(request.to_json(), encoding="utf-8")
        log = Path(folder, "log.txt")
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "mezzo.keras.run", str(text)],
                env={
                    **os.environ,
                    "KERAS_BACKEND": backend,
                    "TF_CPP_MIN_LOG_LEVEL": "2",
                    "PYTHONUNBUFFERED": "1",
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                status = child.wait(limit)
            except subprocess.TimeoutExpired:
                status = 0
            finally:
                child.kill()
                child.wait()
        said = log.read_text(encoding="utf-8", errors="replace")
        if status:
            raise SystemExit(f"{backend}, {precision}: the run ended with {status}\n{said[-2000:]}")
        return read(path, said)


def row(runs: Sequence[Run], baseline: Sequence[Run]) -> dict[str, Any]:
    """The result of one precision, compared with the FP32 runs of the same rounds."""
    stages: dict[str, Any] = {}
    for stage in STAGES:
        mine, theirs = [], []
        for run, base in zip(runs, baseline):
            both = sorted(run.times[stage].keys() & base.times[stage].keys())
            if both:
                mine.append([run.times[stage][k] for k in both])
                theirs.append([base.times[stage][k] for k in both])
        if mine:
            ratio = ratio_over_processes(mine, theirs)
            stages[stage] = {
                "median_ms": 1e3 * statistics.median(second for seconds in mine for second in seconds),
                "ratio": ratio.value,
                "interval": [ratio.low, ratio.high],
                "steps": sum(map(len, mine)),
            }
    accuracies = [run.accuracy for run in runs if run.accuracy is not None]
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    lasted = [run.seconds for run in runs if run.seconds is not None]
    return {
        "runs": len(runs),
        "accuracies": accuracies,
        "peak_bytes": statistics.median(peaks) if peaks else None,
        "seconds": statistics.median(lasted) if lasted else None,
        "skipped": sum(run.skipped for run in runs),
        "stages": stages,
    }


def rows(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Precision -> its row. Runs come in the order of their rounds, and so does FP32."""
    return {name: row(found, runs["fp32"]) for name, found in runs.items() if found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="What follows -- goes to the demo: python benchmarks/transfer.py -- --width 32",
    )
    parser.add_argument(
        "--backend", choices=BACKENDS, action="append", help="run only this backend (may be repeated)"
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="rounds of FP32 and bf16 on each backend (default %(default)s)"
    )
    parser.add_argument(
        "--fp16-rounds", type=int, default=1, help="rounds that also run fp16 (default %(default)s)"
    )
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds after which a run is ended (default %(default)g)"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "transfer.json")
    parser.add_argument("argv", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < 1 or not 0 <= arguments.fp16_rounds <= arguments.rounds:
        parser.error("--rounds is 1 or more, and --fp16-rounds from 0 to as many")

    console, chosen = Console(), arguments.backend or list(BACKENDS)
    plan = [
        (backend, number, name)
        for backend in chosen
        for number in range(arguments.rounds)
        for name in turned(
            [name for name in PRECISIONS if name != "fp16" or number < arguments.fp16_rounds], number
        )
    ]
    total = len(plan) + arguments.rounds
    results: dict[str, Any] = {
        "load_at_start": os.getloadavg()[0],
        "argv": arguments.argv,
        "limit": arguments.limit,
        "machine": {},
        "backends": {},
        "scratch": {"backend": chosen[0], "accuracies": []},
    }
    runs = {backend: {name: [] for name in PRECISIONS} for backend in chosen}  # type: dict[str, dict[str, list[Run]]]
    for done, (backend, number, name) in enumerate(plan, start=1):
        run = start(backend, name, number, arguments.argv, arguments.limit)
        console.print(
            f"[{done}/{total}] {backend}, {PRECISIONS[name]}, round {number + 1}: {described(run)}",
            markup=False,
        )
        runs[backend][name].append(run)
        results["machine"] |= {
            **run.machine,
            "backend": None,
            "threads": run.machine["usable_cores"],
        }
        if runs[backend]["fp32"]:
            results["backends"][backend] = rows(runs[backend])
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for number in range(arguments.rounds):
        run = start(chosen[0], "fp32", number, [*arguments.argv, *SCRATCH], arguments.limit)
        console.print(
            f"[{len(plan) + number + 1}/{total}] {chosen[0]}, float32, no pretraining: {described(run)}",
            markup=False,
        )
        results["scratch"]["accuracies"] += [] if run.accuracy is None else [run.accuracy]
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {arguments.out}")


def turned(names: list[str], number: int) -> list[str]:
    """The order of a round: the last round's, backwards."""
    return names[::-1] if number % 2 else names


def described(run: Run) -> str:
    """One run in a line."""
    parts = [
        f"{stage} {1e3 * statistics.median(times.values()):.0f} ms"
        for stage, times in run.times.items()
        if times
    ]
    parts += [] if run.peak_bytes is None else [f"peak {run.peak_bytes / 1e6:.0f} MB"]
    return ", ".join(
        [*parts, "ended before its end" if run.accuracy is None else f"accuracy {run.accuracy:.2f} %"]
    )


if __name__ == "__main__":
    main()
