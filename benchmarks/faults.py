"""Score the search for the cause of an overflow: planted faults that were named, and clean runs without false alarms.

    python benchmarks/faults.py                 # writes benchmarks/results/faults.json

The rows are in tests/faults: `rows.py` has the faults in CNNs, transformers, recurrent networks, GANs and perceptrons;
`clean.py` has runs whose loss scale overflows only while it adjusts. tests/test_faults.py tests that a fault fails its
step and no other. Exit status 1 if a fault was not named or an alarm was false.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from mezzo.pytorch.hardware import describe

RESULTS = Path(__file__).parent / "results" / "faults.json"


def main() -> int:
    """Run every row; print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    # In front of this file's own folder, where `faults` is this script.
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    scoring = importlib.import_module("faults.score")
    torch.set_num_threads(1)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        score = scoring.score(Path(folder))
    seconds = time.perf_counter() - began

    console = Console(width=120)
    table = Table(title=f"{len(score.faults)} findings of planted faults, {len(score.clean)} clean runs")
    table.add_column("what")
    table.add_column("right", justify="right")
    table.add_column("of", justify="right")
    for what, (right, total) in score.counts().items():
        table.add_row(what, str(right), str(total))
    for family, (right, total) in score.by_family().items():
        table.add_row(f"  named, {family}", str(right), str(total))
    console.print(table)
    for grade in score.faults:
        if not all(grade.right.values()):
            console.print(f"{'in part:  ' if grade.named else 'not named:'} {grade}", markup=False)
    for grade in score.scripts:
        if not grade.named:
            console.print(f"script, not named: {grade}", markup=False)
    for clean in (*score.clean, *score.clean_scripts):
        for alarm in clean.alarms:
            console.print(f"false alarm: {clean.name}: {alarm}", markup=False)
    for trial in score.trials:
        if not trial.mends:
            console.print(f"remedy that does not help: {trial.name}: {trial.policy}", markup=False)
    console.print(f"{seconds:.0f} s")
    record = {"machine": describe(), "seconds": round(seconds, 1), **score.to_json()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if score.perfect else 1


if __name__ == "__main__":
    raise SystemExit(main())
