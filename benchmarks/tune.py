"""What `mezzo tune` saves: each demo tuned, and its training step under that policy beside the preset's and FP32's.

    python benchmarks/tune.py                       # writes benchmarks/results/tune.json
    python benchmarks/tune.py --only text-gpt --processes 1 --rounds 10 --out tune-gpt.json

Each demo is tuned once, for time, from the preset that `mezzo tune` chooses on this machine. Then a training step
(forward, backward, the optimizer) of its model is timed under FP32, the preset and the tuned policy, in turns, in an
order drawn anew each round, in several processes one after the other. Ratios are of medians, with a 95 % bootstrap
interval over processes and their rounds. Where tuning finds nothing to change, the policy *is* the preset, and there
is nothing to time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from clocks import seconds
from emulation import FP32, MODELS, Contender
from mezzo.core.policy import policy as policy_of
from mezzo.pytorch.machine import describe
from pairs import ratio_over_processes

RESULTS = Path(__file__).parent / "results" / "tune.json"
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "MEZZO_ASSUME_NATIVE"}


def tuned(demo: str, folder: Path) -> dict[str, Any]:
    """What `mezzo tune` says of a demo; `folder` gets its files."""
    words = [
        sys.executable,
        "-m",
        "mezzo",
        "tune",
        "--no-compare",
        "--json",
        "--demo",
        demo,
        "--out",
        str(folder),
    ]
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    if done.returncode:
        raise SystemExit(f"mezzo tune --demo {demo}: exit status {done.returncode}\n{done.stderr}")
    found: dict[str, Any] = json.loads((folder / "tuning.json").read_text())
    return found


def child(demo: str, policies: list[str], rounds: int, seed: int) -> dict[str, list[float]]:
    """Seconds of each policy's steps, in turns, in this process."""
    contenders = {policy: Contender(policy, MODELS[demo]()) for policy in policies}
    for contender in contenders.values():
        for _ in range(3):
            contender.step()
    times: dict[str, list[float]] = {policy: [] for policy in policies}
    draw, order = random.Random(seed), list(policies)
    for _ in range(rounds):
        draw.shuffle(order)
        for policy in order:
            times[policy].append(seconds(contenders[policy].step, "cpu"))
    return times


def measure(demo: str, rounds: int, processes: int, progress: Progress) -> dict[str, Any]:
    """One demo: tuned, and timed if that changed anything; as plain JSON values."""
    task = progress.add_task(demo, total=1 + processes)
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held) / "tuned"
        found = tuned(demo, folder)
        progress.advance(task)
        policy, preset = folder / "policy.toml", found["preset"]
        row = {
            "preset": preset,
            "fp32_modules": sorted(c["module"] for c in found["modules"] if c["format"] == FP32),
            "modules": len(found["modules"]),
            "is_preset": policy_of(policy) == policy_of(preset),
            "predicted": found["preset_predicted_seconds"] / found["predicted_seconds"],
        }
        names = {FP32: FP32, "preset": preset} | ({} if row["is_preset"] else {"tuned": str(policy)})
        times: dict[str, list[list[float]]] = {name: [] for name in names}
        for number in range(processes):
            words = [
                sys.executable,
                __file__,
                "--child",
                demo,
                json.dumps(list(names.values())),
                str(rounds),
                str(number),
            ]
            done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, check=False)
            if done.returncode:
                raise SystemExit(f"{demo}: exit status {done.returncode}\n{done.stderr}")
            said = json.loads(done.stdout.splitlines()[-1])
            for name, policy_name in names.items():
                times[name].append(said[policy_name])
            progress.advance(task)
    for name, other in (("tuned", "preset"), ("tuned", FP32), ("preset", FP32)):
        if name in times:
            ratio = ratio_over_processes(times[other], times[name])
            row[f"{name} over {other}"] = [ratio.value, ratio.low, ratio.high]
    return row


def table(rows: Mapping[str, Any]) -> Table:
    """The speeds, a row for each demo."""
    shown = Table(
        "demo", "preset", "kept in FP32", "tuned / preset", "predicted", "tuned / FP32", "preset / FP32"
    )
    for demo, row in rows.items():
        ratios = {
            name: "{:.3f} [{:.3f}, {:.3f}]".format(*row[name]) if name in row else "the preset"
            for name in ("tuned over preset", "tuned over fp32", "preset over fp32")
        }
        kept = f"{len(row['fp32_modules'])} of {row['modules']}"
        shown.add_row(demo, row["preset"], kept, ratios["tuned over preset"], f"{row['predicted']:.3f}",
                      ratios["tuned over fp32"], ratios["preset over fp32"])  # fmt: skip
    return shown


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        demo, policies, rounds, seed = sys.argv[2:]
        print(json.dumps(child(demo, json.loads(policies), int(rounds), int(seed))))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=8, help="of each process (default %(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="one after the other (default %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    console = Console()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        rows = {demo: measure(demo, options.rounds, options.processes, progress) for demo in options.only}
    console.print(table(rows))
    content = {"machine": describe(), "rows": rows, "rounds": options.rounds, "processes": options.processes}
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written: {options.out}")


if __name__ == "__main__":
    main()
