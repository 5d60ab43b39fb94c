"""Measure training steps in every mode, and the loss alone; compare them with the goals, and plot them (`make bench`).

    python benchmarks/bench.py                            # writes benchmarks/results/bench.json and its plot
    python benchmarks/bench.py --only gpt --mode eager    # a part: printed, and written with --out
    python benchmarks/bench.py --device cuda --large --out gpu.json

Each workload and mode runs in a separate process (`training_step.py`; the loss is `bench_loss.py`), so that no
process counts what another left in memory or compiled. A process that crashes or hangs is recorded with its error.
The file is written after each process. TorchInductor's cache is empty at the start of the run, so the time of a first
step includes compilation; kernels that contenders share are compiled once, for the first of them. Times are
unreliable on a machine that does other work: the file contains `load_at_start`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import bars
from mezzo.pytorch.hardware import describe
from models import WORKLOADS
from plot import FIGURE, draw
from step_contenders import FP16
from training_step import modes_of, parser

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "bench.json"
FP16_ROWS = ("gpt", "cnn", "lstm")
MINUTES = 15  # of a process, after which it is ended


@dataclass(frozen=True)
class Part:
    """One process: a workload in a mode, or the loss alone (row ``""``)."""

    row: str
    mode: str
    command: tuple[str, ...]

    @property
    def title(self) -> str:
        """In a line of progress."""
        return f"{self.row}, {self.mode}" if self.row else "the loss alone"


def parts(arguments: argparse.Namespace) -> Iterator[Part]:
    """The processes of a run, in their order."""
    shared = ["--device", arguments.device]
    shared += ["--keep-memory"] * arguments.keep_memory
    steps = [*shared, *["--large"] * arguments.large]
    if arguments.rounds:
        steps += ["--rounds", str(arguments.rounds)]
    modes = modes_of(arguments.mode)
    for row in arguments.only or WORKLOADS:
        for mode in modes:
            yield Part(row, mode, _row(row, mode, arguments.budget, steps))
    if not _whole(arguments):
        return
    yield Part("", "", (str(HERE / "bench_loss.py"), *shared))
    for row in FP16_ROWS:
        yield Part(row, FP16, _row(row, FP16, arguments.budget / 3, steps))


def _row(row: str, mode: str, budget: float, rest: list[str]) -> tuple[str, ...]:
    script = str(HERE / "training_step.py")
    return (script, "--only", row, "--mode", mode, "--budget", f"{budget:g}", *rest)


def _whole(arguments: argparse.Namespace) -> bool:
    return not arguments.only and arguments.mode == "both"


def run(part: Part, environment: dict[str, str], minutes: float = MINUTES) -> dict[str, Any]:
    """The results that the part wrote, or only ``error`` if it failed. Its output is shown."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "stderr").open("w+") as stderr:
        out = Path(folder) / "out.json"
        command = [sys.executable, *part.command, "--out", str(out)]
        try:
            done = subprocess.run(command, stderr=stderr, env=environment, timeout=60 * minutes)
        except subprocess.TimeoutExpired:
            return {"error": f"not finished after {minutes:g} minutes"}
        if done.returncode:
            stderr.seek(0)
            last = [line for line in stderr.read().splitlines() if line.strip()][-1:]
            return {"error": f"exit status {done.returncode}: {''.join(last)}"}
        written: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return written


def versions() -> dict[str, str | None]:
    """The versions of the packages that compile kernels."""
    from optimizers import versions as of_packages

    return {name: number for name, number in of_packages().items() if name in ("numba", "triton")}


def collect(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the parts, and write the results after each of them."""
    results: dict[str, Any] = {
        "schema": 1,
        "machine": describe(),
        "versions": versions(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "settings": {
            name: getattr(arguments, name) for name in ("device", "large", "rounds", "budget", "keep_memory")
        },
        "rows": {},
        "loss": {},
        "bars": [],
    }
    chosen = list(parts(arguments))
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        environment.pop("MEZZO_ASSUME_NATIVE", None)  # what the tests assume, and this machine may not have
        for number, part in enumerate(chosen, 1):
            minutes = (time.monotonic() - begun) / 60
            console.print(f"[{number}/{len(chosen)}] {part.title} ({minutes:.1f} min)", markup=False)
            found = run(part, environment)
            if "error" in found:
                console.print(f"  {found['error']}", markup=False)
            if part.row:
                workloads = found.get("workloads", {part.row: {part.mode: found}})
                results["rows"].setdefault(part.row, {}).update(workloads[part.row])
            else:
                results["loss"] = found
            results["bars"] = bars.judge(results)
            results["minutes"] = round((time.monotonic() - begun) / 60, 1)
            if arguments.out:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(results) + "\n", encoding="utf-8")
    return results


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--out",
        type=Path,
        help="JSON file; the plot is written next to it (default for a whole run: results/bench.json)",
    )
    arguments = options.parse_args()
    if arguments.out is None and _whole(arguments):
        arguments.out = OUT
    console = Console(highlight=False)
    results = collect(arguments, console)
    bars.show(results["bars"], console)
    counts = {verdict: 0 for verdict in ("met", "open", "missed", "not measured")}
    for line in results["bars"]:
        counts[line["verdict"]] += 1
    console.print(f"{results['minutes']} minutes; goals: {', '.join(f'{n} {v}' for v, n in counts.items())}")
    if arguments.out:
        path = FIGURE if arguments.out == OUT else arguments.out.with_suffix(".svg")
        draw(results, path)
        console.print(f"written: {arguments.out}\nwritten: {path}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
