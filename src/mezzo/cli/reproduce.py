"""Run the experiments that mixed precision rests on (Micikevicius et al. 2017) again, at a size for one small machine.

Each experiment gives a figure, its numbers, and for each statement of the original work what was expected and what
was seen. A statement that is known to hold at this size must go on holding; one that is known not to show here, and
why, is a result as well, and no failure (src/mezzo/reproduce/expected.toml has both lists).

  holds                                  as it should
  does not hold any more                 a finding of this run: exit status 1
  known not to show at this size         a known negative, with its reason
  holds, though it is known not to ...   better than known: a reason to look again

The folder gets, for each NAME: NAME/figure.svg, NAME/figure.png, NAME/numbers.json; and for all that lies in it
index.html, one page that needs no other file, and summary.json.

Exit status: 0 all that should hold does, 1 something does not hold any more or an experiment crashed (the others are
run all the same), 2 wrong usage, or matplotlib or scikit-learn is missing.

Examples:
  mezzo reproduce --quick                   all of them, small, in minutes
  mezzo reproduce                           all of them, in about forty minutes on two cores
  mezzo reproduce accumulation lost-updates
  mezzo reproduce --list
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from mezzo.reproduce import NAMES, chosen, figures, load, outputs
from mezzo.reproduce.expected import WORDS, tally
from mezzo.reproduce.run import Result, Watcher, run_all

STYLES = {"holds": "green", "lost": "bold red", "known": "yellow", "gained": "cyan", "unlisted": "yellow"}
PATIENCE = 30.0
"""In a pipe a line says what goes on, when it has changed, after so many seconds."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.usage = "mezzo reproduce [NAME ...] [--quick] [--out DIR] [--json] | --list"
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default: {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="a smaller size of each: minutes, for CI")
    parser.add_argument(
        "--out", metavar="DIR", default="mezzo-reproduce", help="the folder to write (default %(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="print the experiments, and run none")
    parser.add_argument("--json", action="store_true", help="print JSON in place of sentences")


def run(arguments: argparse.Namespace) -> int:
    """Run what is asked for, print, and return the exit status."""
    names = chosen(arguments.names)
    console = Console(highlight=False)
    if arguments.list:
        _list(console, names, as_json=arguments.json)
        return 0
    figures.check_installed()
    folder = Path(arguments.out)
    outputs.make_folder(folder)
    errors = Console(stderr=True, highlight=False)
    told = _Told(console if not arguments.json else None, errors)
    try:
        results = run_all(names, folder, told, quick=arguments.quick)
    except KeyboardInterrupt:
        print(f"what was finished is in {folder}", file=sys.stderr)
        raise
    finally:
        told.close()
    if arguments.json:
        crashed = {one.name: one.reason for one in results if one.record is None}
        records = {one.name: one.record for one in results if one.record is not None}
        print(json.dumps(outputs.summary_of(records, crashed), indent=2))
    else:
        _conclude(console, results, folder)
    return int(not all(result.passed for result in results))


class _Told(Watcher):
    """A bar on a terminal, lines in a pipe; and each experiment's sentences, as soon as there are any.

    Args:
        out: for the sentences; None for none.
        errors: for what goes on. Nothing but the terminal's bar if there is no `out`.
    """

    def __init__(self, out: Console | None, errors: Console) -> None:
        self._out, self._errors = out, errors
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._head = self._words = ""
        self._spoken = 0.0

    def begin(self, name: str, index: int, count: int) -> None:
        """See `Watcher`."""
        self._head, self._words = f"[{index}/{count}] {name}", ""
        if self._errors.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._errors, transient=True)
            self._task = self._bar.add_task(self._head, total=1.0)
            self._bar.start()
        elif self._out is not None:
            self._say(self._head)

    def stage(self, words: str, share: float) -> None:
        """See `Watcher`."""
        if self._bar is not None:
            self._bar.update(self._task, completed=share, description=f"{self._head}: {words}")
        elif self._out is not None and words != self._words and time.monotonic() - self._spoken > PATIENCE:
            self._words = words
            self._say(f"{self._head}: {words} ({share:.0%} done)")

    def end(self, result: Result) -> None:
        """See `Watcher`."""
        self.close()
        if self._out is not None:
            _show(self._out, self._errors, result)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _say(self, text: str) -> None:
        self._spoken = time.monotonic()
        print(text, file=sys.stderr, flush=True)


def _show(console: Console, errors: Console, result: Result) -> None:
    """One experiment: its title, and each finding with what was expected and seen."""
    record = result.record
    if record is None:
        errors.print(result.trace, markup=False, soft_wrap=True)
        _line(
            console,
            Text.assemble((result.name, "bold"), ": ", ("crashed", "bold red"), f": {result.reason}\n"),
        )
        return
    _line(console, Text.assemble((result.name, "bold"), f": {record['title']}"))
    _line(
        console, Text(f"{record['source']}; {record['effort']} size, {record['seconds']:.1f} s", style="dim")
    )
    for one in record["findings"]:
        fate = one["fate"]
        _line(console, Text.assemble((one["name"], "bold"), ": ", (WORDS[fate], STYLES[fate])), 2)
        _line(console, Text.assemble(("expected  ", "dim"), one["expected"]), 4)
        _line(console, Text.assemble(("seen      ", "dim"), one["seen"]), 4)
        if one["why"]:
            _line(console, Text.assemble(("why       ", "dim"), one["why"]), 4)
    if result.reason:
        errors.print(result.trace, markup=False, soft_wrap=True)
        _line(console, Text(result.reason, style="bold red"), 2)
    for name in record["missing"]:
        _line(
            console,
            Text.assemble((name, "bold"), ": ", (f"{WORDS['lost']}: nothing was said of it", STYLES["lost"])),
            2,
        )
    console.print()


def _line(console: Console, text: Text, indent: int = 0) -> None:
    """Wrapped and indented on a terminal; a whole line in a pipe, where a Padding would be cut at the width."""
    if console.is_terminal:
        console.print(Padding(text, (0, 0, 0, indent)))
    else:
        console.print(Text.assemble(" " * indent, text), soft_wrap=True)


def _conclude(console: Console, results: list[Result], folder: Path) -> None:
    """How many of each fate, what must be looked at, and where the rest is."""
    records = [result.record for result in results if result.record is not None]
    findings = [one for record in records for one in record["findings"]]
    missing = sum(len(record["missing"]) for record in records)
    _line(console, Text(f"{tally(findings, missing, len(results) - len(records))}."))
    for result in results:
        if result.record is None:
            _line(console, Text.assemble((result.name, "bold red"), f" crashed: {result.reason}"))
            continue
        if result.reason:
            _line(console, Text.assemble((result.name, "bold red"), f": {result.reason}"))
        seen = {one["name"]: one["seen"] for one in result.record["findings"]}
        for name in result.lost:
            said = seen.get(name, "nothing was said of it")
            _line(console, Text.assemble((f"{result.name}: {name}", "bold red"), f" {WORDS['lost']}: {said}"))
    console.print(f"Page: {folder / outputs.PAGE}", markup=False, soft_wrap=True)


def _list(console: Console, names: tuple[str, ...], *, as_json: bool) -> None:
    """The experiments' names, titles and sources."""
    rows = []
    for name in names:
        try:
            experiment = load(name)
            rows.append({"name": name, "title": experiment.title, "source": experiment.source})
        except ImportError as error:  # one that lacks a package is still one
            rows.append({"name": name, "title": f"can't be loaded: {error}", "source": ""})
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        _line(console, Text.assemble((row["name"], "bold"), f": {row['title']}"))
        if row["source"]:
            _line(console, Text(row["source"], style="dim"), 2)
