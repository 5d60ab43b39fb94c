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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mezzo.pytorch.hardware import describe

RESULTS = Path(__file__).parent / "results" / "faults.json"


def _fault(graded: Any) -> dict[str, Any]:
    told = ("module", "op", "direction", "cause", "line", "how", "seconds", "kept_bytes", "note")
    found = None if graded.found is None else {name: getattr(graded.found, name) for name in told}
    right = {"named": graded.named, "cause": graded.right["cause"], "line": graded.right["line"]}
    return {"name": graded.row.name, "family": graded.row.family, "right": right, "found": found}


def _share(told: Iterable[bool]) -> list[int]:
    every = list(told)
    return [sum(every), len(every)]


@dataclass(frozen=True)
class Score:
    """All grades: of loops with `MixedPrecision`, and of plain scripts."""

    faults: list[Any]
    clean: list[Any]
    scripts: list[Any]
    clean_scripts: list[Any]
    trials: list[Any]

    @property
    def perfect(self) -> bool:
        """Every fault named, and no alarm without one, in loops with `MixedPrecision`; none without one in scripts."""
        alarms = any(g.alarms for g in (*self.clean, *self.clean_scripts))
        return not alarms and all(g.named for g in self.faults)

    def counts(self) -> dict[str, list[int]]:
        """What was asked -> [how often it was right, of how many]."""
        faults, scripts, skips = self.faults, self.scripts, sum(g.skips for g in self.clean)
        explained = skips - sum(len(g.alarms) + g.silent for g in self.clean)
        asked = ("module", "direction", "op", "cause")
        with_line = [g for g in faults if g.expected.line]
        return {
            "named (module, direction, operation)": _share(g.named for g in faults),
            **{f"right {what}": _share(g.right[what] for g in faults) for what in asked},
            "right line, of those with one in the script": _share(g.right["line"] for g in with_line),
            "clean runs without an alarm": _share(not g.alarms for g in self.clean),
            "skipped steps of clean runs put down to the loss scale": [explained, skips],
            "as plain scripts: module and direction": _share(
                g.right["module"] and g.right["direction"] for g in scripts
            ),
            "as plain scripts: named": _share(g.named for g in scripts),
            "as plain scripts: clean runs without an alarm": _share(not g.alarms for g in self.clean_scripts),
            "policies that remedies name: the step is taken under them": _share(t.mends for t in self.trials),
        }

    def by_family(self) -> dict[str, list[int]]:
        families = dict.fromkeys(g.row.family for g in self.faults)
        return {one: _share(g.named for g in self.faults if g.row.family == one) for one in families}

    def to_json(self) -> dict[str, Any]:
        def clean(some: list[Any]) -> list[dict[str, Any]]:
            return [{"name": g.name, "skips": g.skips, "alarms": len(g.alarms)} for g in some]

        return {
            "counts": self.counts(),
            "by_family": self.by_family(),
            "faults": [_fault(g) for g in self.faults],
            "clean": clean(self.clean),
            "scripts": [_fault(g) for g in self.scripts],
            "clean_scripts": clean(self.clean_scripts),
            "trials": [t._asdict() for t in self.trials],
        }


def score(folder: Path) -> Score:
    """Run and grade all rows; scripts and records go to a folder."""
    scoring = importlib.import_module("faults.score")
    faults, clean = (importlib.import_module(f"faults.{name}") for name in ("rows", "clean"))
    graded = [g for row in faults.FAULTS for g in scoring.grades_of(row)]
    return Score(
        graded,
        [scoring.grade_of_clean(row) for row in clean.CLEAN],
        [g for row in faults.FAULTS if row.can_be_a_script for g in scoring.grades_of_script(row, folder)],
        [scoring.grade_of_clean_script(row, folder) for row in clean.CLEAN if row.can_be_a_script],
        [trial for g in graded for trial in scoring.trials_of(g)],
    )


def main() -> int:
    """Run every row; print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    # In front of this file's own folder, where `faults` is this script.
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    torch.set_num_threads(1)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = score(Path(folder))
    seconds = time.perf_counter() - began

    console = Console(width=120)
    table = Table(title=f"{len(found.faults)} findings of planted faults, {len(found.clean)} clean runs")
    table.add_column("what")
    table.add_column("right", justify="right")
    table.add_column("of", justify="right")
    for what, (right, total) in found.counts().items():
        table.add_row(what, str(right), str(total))
    for family, (right, total) in found.by_family().items():
        table.add_row(f"  named, {family}", str(right), str(total))
    console.print(table)
    for grade in found.faults:
        if not all(grade.right.values()):
            console.print(f"{'in part:  ' if grade.named else 'not named:'} {grade}", markup=False)
    for grade in found.scripts:
        if not grade.named:
            console.print(f"script, not named: {grade}", markup=False)
    for clean in (*found.clean, *found.clean_scripts):
        for alarm in clean.alarms:
            console.print(f"false alarm: {clean.name}: {alarm}", markup=False)
    for trial in found.trials:
        if not trial.mends:
            console.print(f"remedy that does not help: {trial.name}: {trial.policy}", markup=False)
    console.print(f"{seconds:.0f} s")
    record = {"machine": describe(), "seconds": round(seconds, 1), **found.to_json()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if found.perfect else 1


if __name__ == "__main__":
    raise SystemExit(main())
