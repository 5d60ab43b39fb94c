"""Run a few steps of a training script in FP32, look at the ranges of its numbers, and recommend: a format, a loss
scale for fp16, and the modules that fp16 can't hold, each with the histogram that says so. Rank the modules by how much
rounding each to bf16, fp16 and fp8 would change the loss, with the lowest format that it can bear. Then run a few steps
under the recommendation, to see that it holds; where a loss scale was too large or a module overflowed, that is mended
and tried again, three times in all.

The script is not changed; it is started twice or more and ended after --steps updates, as by sys.exit. What it writes
itself (checkpoints, logs) it writes each time.

Written to the folder: policy.toml (for mezzo run --policy and mezzo.MixedPrecision), calibration.json with every
histogram and the whole ranking, report.html with the watched steps, and the records and output of both runs.

Gradients change over a run. What the first steps show is where to start, and no proof: mezzo compare proves.

Exit status: 0 the recommendation holds (or was not tried), 1 under it a step was skipped or a loss was not finite,
2 wrong usage, or a script that fails or never trains (no update could be looked at).

Examples:
  mezzo calibrate train.py
  mezzo calibrate train.py --steps 50 -- --epochs 3
  mezzo calibrate train.py --precision fp16          for another machine than this one
  mezzo calibrate --demo digits --json
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mezzo.cli.arguments import add_target, folder_of, target_of, whole
from mezzo.cli.report import page
from mezzo.core.calibration import FORMATS
from mezzo.core.sensitivity import Sensitivity
from mezzo.demos import PYTORCH as DEMOS
from mezzo.report import build_run
from mezzo.verify.calibrate import (
    POLICY,
    Calibrated,
    CalibrationRequest,
    calibrate_script,
)
from mezzo.verify.progress import watcher

PASSES_ON = True
"""What follows `--` is the script's."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_target(parser, DEMOS)
    parser.add_argument(
        "--steps",
        type=whole("updates", 20),
        default=20,
        metavar="N",
        help="updates that are watched (default 20)",
    )
    parser.add_argument(
        "--precision",
        metavar="P",
        help=f"recommend this format whatever this machine has: {', '.join(FORMATS)}",
    )
    parser.add_argument(
        "--headroom",
        type=whole("doublings", 1),
        default=1,
        metavar="BITS",
        help="doublings that the largest numbers may still make in the rest of the run, 0 to 15 (default 1)",
    )
    parser.add_argument("--no-check", action="store_true", help="do not try the recommendation")
    parser.add_argument("--out", metavar="DIR", help="the folder to write (default mezzo-calibrate-SCRIPT)")
    parser.add_argument("--json", action="store_true", help="print calibration.json in place of the lines")


def run(arguments: argparse.Namespace) -> int:
    """Calibrate, print, and return the exit status."""
    request = request_of(arguments)
    errors = Console(stderr=True)
    folder = folder_of(arguments, "calibrate")
    told = watcher(errors, quiet=arguments.json)
    found = calibrate_script(request, folder, watcher=told)
    report = page(build_run, folder)
    if arguments.json:
        print(found.to_json(request), end="")
    else:
        script = ["-m"] * request.is_module + [request.target, *request.argv]
        show(Console(), found, folder, report, script)
    return int(found.check is not None and not found.check.holds)


def request_of(arguments: argparse.Namespace) -> CalibrationRequest:
    """What the command line asks for.

    Raises:
        UsageError: none or several of script, demo and module; a value out of range.
        UnknownNameError: no such demo or format.
    """
    return CalibrationRequest(
        target=target_of(arguments, DEMOS, "mezzo calibrate --demo digits"),
        argv=tuple(arguments.argv),
        is_module=bool(arguments.module),
        steps=arguments.steps,
        format=arguments.precision,
        headroom_bits=arguments.headroom,
        check=not arguments.no_check,
    )


def show(console: Console, found: Calibrated, folder: Path, report: Path | None, script: list[str]) -> None:
    """Print a recommendation, a line each, with its histograms."""

    def line(label: str, value: str, style: str = "") -> None:
        # Never folded: a histogram that is cut in two is none.
        console.print(
            Text.assemble(f"{label:<13}", (value, style)), soft_wrap=True, highlight=False, markup=False
        )

    recommendation, check = found.recommendation, found.check
    failed = check is not None and not check.holds
    for label, value in recommendation.rows():
        if failed and label == "keep in fp32" and not recommendation.kept:
            value = "no module by what each of them returned in FP32; the trial saw inside them"
        line(label, value, "bold" if label == "policy" else "")
    if recommendation.sensitivity is not None:
        show_ranking(console, recommendation.sensitivity, line)
    if check is not None:
        line("checked", str(check), "bold red" if failed else "green")
        for finding in check.findings:
            line("", finding)
        for index, remedy in enumerate(check.remedies):
            line("" if index else "try", remedy)
    for note in recommendation.notes:
        line("note", note, "dim")
    console.print()
    if report is not None:
        line("Report:", str(report))
    if failed:
        line("Not for use:", f"{folder / POLICY} failed its trial", "bold red")
    else:
        line("Use it:", shlex.join(["mezzo", "run", "--policy", str(folder / POLICY), *script]))


def show_ranking(console: Console, ranking: Sensitivity, line: Callable[[str, str], None]) -> None:
    """Print a ranking: a table on a terminal that is wide enough, elsewhere a line per module."""
    line("sensitivity", ranking.title)
    header, *rows = ranking.cells()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in header:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    if console.is_terminal and console.measure(table).minimum + 13 <= console.width:
        console.print(Padding(table, (0, 0, 0, 13)))
    else:
        for text in ranking.lines():
            line("", text)
    for text in filter(None, [ranking.rest, *ranking.notes]):
        line("", text)
