"""Measure a training step with and without `mezzo.keep_memory()`, in FP32, with torch.amp and with Mezzo.

    python benchmarks/keep_memory.py                    # writes benchmarks/results/keep_memory.json
    python benchmarks/keep_memory.py --only gpt --pairs 3

The setting lasts until the process ends, so each measurement is a separate process. Each pair runs two processes one
after the other, in an alternating order; the result of a process is the median of its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from clocks import seconds
from pairs import ratio_of_medians

WORKLOADS = ("gpt", "cnn", "lstm")
CONTENDERS = ("fp32", "amp-bf16", "split-bf16")


def child(workload: str, contender: str, keep: bool, steps: int) -> dict[str, float]:
    """Seconds and page faults of a step, and peak resident bytes, in this process."""
    import mezzo
    from models import WORKLOADS as MODELS
    from training_step import CONTENDERS as BUILD

    if keep and not mezzo.keep_memory():
        raise SystemExit("keep_memory() does nothing with this C library")
    step = BUILD[contender](MODELS[workload]())
    for _ in range(2):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF)
    times = [seconds(step, "cpu") for _ in range(steps)]
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": statistics.median(times),
        "faults": (after.ru_minflt - before.ru_minflt) / steps,
        "resident_bytes": after.ru_maxrss * 1024,
    }


def _run(workload: str, contender: str, keep: bool, steps: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", workload, contender, str(int(keep)), str(steps)]
    environment = {key: value for key, value in os.environ.items() if key != "MEZZO_ASSUME_NATIVE"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        workload, contender, flag, steps = sys.argv[2:]
        print(json.dumps(child(workload, contender, flag == "1", int(steps))))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=WORKLOADS, action="append", help="measure only this workload (may be repeated)"
    )
    parser.add_argument("--pairs", type=int, default=5, help="pairs of processes (default %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps per process (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "keep_memory.json")
    arguments = parser.parse_args()
    console = Console()
    from mezzo.pytorch.hardware import describe

    results: dict[str, Any] = {"machine": describe(), "workloads": {}}
    for workload in arguments.only or WORKLOADS:
        results["workloads"][workload] = rows = {}
        for contender in CONTENDERS:
            both: dict[bool, list[dict[str, float]]] = {False: [], True: []}
            for number in track(range(arguments.pairs), f"{workload}, {contender}", console=console):
                for keep in (False, True) if number % 2 == 0 else (True, False):
                    both[keep].append(_run(workload, contender, keep, arguments.steps))
            found = ratio_of_medians(*([row["seconds"] for row in both[keep]] for keep in (True, False)))
            rows[contender] = {
                "ratio": found.value,
                "interval": [found.low, found.high],
                "pairs": arguments.pairs,
                **{
                    f"{key}_{'kept' if keep else 'system'}": statistics.median(row[key] for row in both[keep])
                    for key in ("seconds", "faults", "resident_bytes")
                    for keep in (False, True)
                },
            }
            row = rows[contender]
            console.print(f"  time with / without {found.value:.3f} [{found.low:.3f}, {found.high:.3f}]")
            console.print(f"  page faults per step {row['faults_kept']:,.0f} / {row['faults_system']:,.0f}")
            megabytes = [row[f"resident_bytes_{how}"] / 1e6 for how in ("kept", "system")]
            console.print(f"  resident MB {megabytes[0]:.0f} / {megabytes[1]:.0f}")
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
