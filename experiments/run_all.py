"""Run every experiment, two at a time, and write `summary.json`; exit status 1 if a finding no longer shows.

    python experiments/run_all.py                                            # quick, what `make reproduce` runs
    python experiments/run_all.py --only accumulation,lost-updates           # some of them
    python experiments/run_all.py --full --out benchmarks/results/reproduce  # the figures of docs/dev/reproduce.md

`python benchmarks/readme.py` then writes the summary and the figures into docs/dev/reproduce.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import WORDS

# The longest first, so that neither of the two processes is idle at the end.
NAMES = ("lstm-loss-scale", "side-by-side", "gan", "gradient-histogram", "lost-updates", "accumulation")
ATONCE = 2


def run(name: str, options: list[str]) -> tuple[int, str]:
    """Run one experiment in a separate process; returns its exit status and output."""
    script = Path(__file__).with_name(f"{name.replace('-', '_')}.py")
    child = subprocess.run(
        [sys.executable, str(script), *options], stdout=subprocess.PIPE, text=True, check=False
    )
    print(child.stdout, flush=True)
    return child.returncode, child.stdout


def main() -> int:
    """Run all, and write the summary."""
    parser = argparse.ArgumentParser(description="Run every experiment, two at a time.")
    parser.add_argument(
        "--full",
        action="store_true",
        help="train at the size of the published figures instead of the quick size",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("mezzo-reproduce"), help="output folder (default %(default)s)"
    )
    parser.add_argument(
        "--only",
        type=lambda text: tuple(text.split(",")),
        default=NAMES,
        metavar="NAMES",
        help=f"run these experiments: {', '.join(NAMES)} (default all)",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - set(NAMES):
        parser.error(f"--only: unknown experiment {sorted(unknown)[0]!r}. Use {', '.join(NAMES)}.")
    options = ["--out", str(arguments.out), *["--full"] * arguments.full]
    with ThreadPoolExecutor(ATONCE) as pool:
        statuses = dict(zip(arguments.only, pool.map(lambda name: run(name, options)[0], arguments.only)))
    records = {}
    for name in arguments.only:
        path = arguments.out / name / "numbers.json"
        if path.exists():  # a script that failed leaves none
            record = json.loads(path.read_text(encoding="utf-8"))
            records[name] = {key: value for key, value in record.items() if key != "numbers"}
    summary = {"schema": 1, "words": WORDS, "experiments": records}
    (arguments.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    for name, status in statuses.items():
        found = records.get(name, {}).get("findings", [])
        print(f"{name}: exit status {status}; {sum(each['fate'] == 'holds' for each in found)} findings hold")
        for each in found:
            if each["fate"] == "lost":
                print(f"  {each['name']} {WORDS['lost']}: {each['seen']}")
    return int(any(statuses.values()))


if __name__ == "__main__":
    sys.exit(main())
