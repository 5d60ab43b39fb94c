"""Run the experiments of the original work on mixed precision (Micikevicius et al. 2017) at a small size."""

from __future__ import annotations

import argparse
from pathlib import Path

from mezzo.reproduce import chosen, figures, outputs
from mezzo.reproduce.run import Result, run_all


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", metavar="DIR", default="mezzo-reproduce")


class _Lines:
    def begin(self, name: str, index: int, count: int) -> None:
        print(f"[{index}/{count}] {name}", flush=True)

    def stage(self, words: str, share: float) -> None:
        print(f"  {share:4.0%} {words}", flush=True)

    def end(self, result: Result) -> None:
        if result.record is None:
            print(result.trace)
            return
        for one in result.record["findings"]:
            print(f"{one['name']}: {one['fate']}\n  expected: {one['expected']}\n  seen: {one['seen']}")
        print(f"{result.record['seconds']} s")


def run(arguments: argparse.Namespace) -> int:
    """Run, print, and return the exit status."""
    names = chosen(arguments.names)
    figures.check_installed()
    folder = Path(arguments.out)
    outputs.make_folder(folder)
    results = run_all(names, folder, _Lines(), quick=arguments.quick)
    return int(not all(result.passed for result in results))
