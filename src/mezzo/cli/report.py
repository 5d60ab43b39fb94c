"""Build the HTML report of a folder of run records again. No framework is imported.

For a folder of `mezzo compare` this is the report of the comparison. For any other folder with run records (written by
`mezzo run --watch`, `mezzo run --records`, MixedPrecision(records=...) or mezzo.keras.PrecisionMonitor) it is a report
of the runs. The report of a .jsonl file is written next to it.

Examples:
  mezzo report mezzo-run
  mezzo report mezzo-compare-digits --open
  mezzo report run.jsonl

Exit status: 0 the report was written; 2 it was not, since there are no run records, or a file can't be read or written.
"""

from __future__ import annotations

import argparse
import json
import os
import webbrowser
from collections.abc import Callable
from pathlib import Path

from mezzo.core.commands import say
from mezzo.core.errors import MezzoError, UsageError
from mezzo.report import build_any
from mezzo.report.run import read_run


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("place", nargs="?", metavar="DIR", help="a folder with run records, or a .jsonl file")
    parser.add_argument("--open", action="store_true", help="also open the report in a browser")
    parser.add_argument("--json", action="store_true", help="print the path of the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Build the page and print its path; UsageError if nothing is named, or no page can be made of it."""
    if not arguments.place:  # an empty word is usually a shell variable that was not set
        fix = "Give one with run records, or a .jsonl file. Example: mezzo report mezzo-run."
        raise UsageError(f"no folder was given. {fix}")
    place = Path(arguments.place)
    try:
        page = build_any(arguments.place)
        for file in sorted([*place.glob("*.jsonl"), *place.glob("runs/*.jsonl")]) or [place]:
            if fault := read_run(file).fault:
                say(f"mezzo report: {file.stem}: {fault}")
    except OSError as error:
        fix = ". Check its permissions" if isinstance(error, PermissionError) else ""
        raise UsageError(f"{error.filename or arguments.place}: {error.strerror or error}{fix}") from error
    print(json.dumps({"schema": 1, "report": str(page)}) if arguments.json else page)
    if arguments.open and not webbrowser.open(page.resolve().as_uri()):
        raise UsageError(f"no browser was found. Open this file in one: {page}")
    return 0


def page(build: Callable[[Path], Path], folder: Path) -> Path | None:
    """A folder's report by `build`; None if that fails, with the reason and the command to make it later on stderr."""
    try:
        return build(folder)
    except OSError as error:
        why = f"{error.filename or folder}: {error.strerror or error}"
    except MezzoError as error:
        why = str(error)
    say(f"mezzo: no report was written: {why.rstrip('.')}. Fix it, then: mezzo report {os.fspath(folder)}")
    return None
