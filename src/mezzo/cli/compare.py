"""Train a script in FP32 and in each candidate precision, and say whether 16 bits are faster, smaller and as good.

The script is not changed and need not know of Mezzo. Every run is a process of its own; runs of the same
number get the same seeds in every precision, so that they can be paired. Nothing of this touches the
script's own files, but the script runs several times: one that resumes from a checkpoint of its own would
resume from another run's.

The folder gets verdict.json, report.html, and the records and output of every run. An interrupted comparison
goes on where it stopped when the same command is given again.

The words, for each candidate (docs/verdict.md tells how they are earned):
  equivalent    proven: the loss (and the metric) differ by less than the margin; takes three seeds or more
  consistent    no harm found beyond the margin or beyond FP32's own noise
  inconclusive  the runs are too few or too noisy to tell
  divergent     harm is established, or the training broke

Exit status: 0 no candidate is divergent, 1 one is, 2 wrong usage, or a script that fails in FP32 or never trains.

Examples:
  mezzo compare --demo digits
  mezzo compare train.py -- --epochs 3
  mezzo compare train.py --precision bf16 --seeds 5 --metric 'accuracy: ([0-9.]+)'
  mezzo compare train.py --precision bf16,op.softmax=fp32 --precision policy.toml
  mezzo compare train.py --precision bf16,masters=split8,state=int8
  mezzo compare --framework keras train.py --precision mixed_bfloat16
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mezzo.cli.arguments import add_target, folder_of, number, share, target_of, whole
from mezzo.cli.report import page
from mezzo.compare.comparison import compare
from mezzo.compare.progress import watcher
from mezzo.compare.request import FRAMEWORKS, Request, candidates
from mezzo.core.errors import UsageError
from mezzo.demos import DEMOS
from mezzo.report import build
from mezzo.report.run import command_words

PASSES_ON = True
"""What follows `--` is the script's."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_target(parser, DEMOS)
    add = parser.add_argument
    framework = "what the script trains with (default pytorch, or what the demo trains with)"
    add("--framework", choices=tuple(FRAMEWORKS), help=framework)
    precision = "presets, policy strings or .toml files, with commas or given again (default bf16,fp16)"
    add("--precision", action="append", metavar="P", help=precision)
    add("--seeds", type=whole("pairs", 3), default=3, metavar="N", help="pairs of runs (default 3)")
    margin = "the largest harm you accept, as a share of FP32's final loss: 0.005 or 0.5%% (the default)"
    add("--margin", type=share(), default=0.005, metavar="X", help=margin)
    metric = "where the final metric is printed; its first group is the number"
    add("--metric", metavar="REGEX", help=metric)
    better = "which way is better (auto: lower if the pattern names a loss or an error)"
    add("--metric-better", choices=("auto", "higher", "lower"), default="auto", help=better)
    margin = "the same for the metric, in its units (default 0.2 points; as --margin if lower is better)"
    add("--metric-margin", type=number(0.2), metavar="X", help=margin)
    add("--out", metavar="DIR", help="the folder to write (default mezzo-compare-SCRIPT)")
    add("--fresh", action="store_true", help="delete the comparison in that folder and start over")
    add("--json", action="store_true", help="print verdict.json in place of the table")


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and return the exit status."""
    errors = Console(stderr=True)
    request, remarks = request_of(arguments)
    for remark in remarks:
        errors.print(f"note: {remark}", markup=False, highlight=False)
    folder = folder_of(arguments, "compare")
    told = watcher(errors, quiet=arguments.json)
    try:
        verdict = compare(request, folder, fresh=arguments.fresh, watcher=told)
    except KeyboardInterrupt:
        print(f"finished runs are kept in {folder}: the same command goes on from here", file=sys.stderr)
        raise
    report = page(build, folder)
    if arguments.json:
        print(json.dumps(verdict, indent=2))
    else:
        show(Console(), verdict, report, command_line(request, folder))
    return int(any(one["parity"] == "divergent" for one in verdict["candidates"].values()))


def request_of(arguments: argparse.Namespace) -> tuple[Request, list[str]]:
    """What the command line asks for, and remarks on what was left out of it; UsageError for what makes no sense."""
    target = target_of(arguments, DEMOS, "mezzo compare --demo digits")
    metric, trains_with = arguments.metric, arguments.framework or "pytorch"
    if arguments.demo:
        demo = DEMOS[arguments.demo]
        if arguments.framework not in (None, demo.framework):
            raise UsageError(
                f"--demo {arguments.demo} trains with {demo.framework}: leave --framework {arguments.framework} out"
            )
        metric, trains_with = metric or demo.metric, demo.framework
    names, remarks = candidates(arguments.precision or ["bf16,fp16"], trains_with)
    request = Request(
        target=target,
        argv=tuple(arguments.argv),
        is_module=bool(arguments.module),
        precisions=names,
        seeds=arguments.seeds,
        margin=arguments.margin,
        metric=metric,
        metric_better=arguments.metric_better,
        metric_margin=arguments.metric_margin,
        demo=arguments.demo,
        framework=trains_with,
    )
    return request, remarks


def command_line(request: Request, folder: Path) -> list[str]:
    """The words that give the same comparison again."""
    known = request.demo and DEMOS[request.demo].metric == request.metric
    return command_words({**asdict(request), "metric": None if known else request.metric}, str(folder))


STYLES = {"equivalent": "green", "consistent": "green", "inconclusive": "yellow", "divergent": "bold red"}
MISSING = "-"
MB = 1_000_000  # as the report writes it


def show(console: Console, verdict: Mapping[str, Any], report: Path | None, rerun: list[str]) -> None:
    """Print a verdict: a table on a terminal where it fits, else lines for each candidate."""
    candidates: Mapping[str, Mapping[str, Any]] = verdict["candidates"]
    table = _table(str(verdict["baseline"]), candidates)
    wide = console.options.update(max_width=10_000)
    if console.is_terminal and console.measure(table, options=wide).maximum <= console.width:
        console.print(table)
    else:
        for name, one in candidates.items():
            console.print(Text.assemble((name, "bold"), ": ", _word(one)))
            for label, _, value in _rows(one)[1:]:
                if value != MISSING:
                    console.print(f"  {label:<15}{value}", markup=False, highlight=False, soft_wrap=True)
    for name, one in candidates.items():
        line = Text.assemble((name, "bold"), " is ", _word(one), ". ", one["reason"])
        console.print(line, soft_wrap=not console.is_terminal)
        for note in one["notes"]:
            console.print(Text(f"  note: {note}", style="dim"), soft_wrap=not console.is_terminal)
    console.print()
    if report is not None:
        console.print(f"Report: {report}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Again:  {shlex.join(rerun)}", markup=False, highlight=False, soft_wrap=True)


def _word(one: Mapping[str, Any]) -> tuple[str, str]:
    return one["parity"], STYLES.get(one["parity"], "")


def _table(baseline: str, candidates: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row per quantity, a column per precision: eighty columns hold FP32 and two candidates."""
    table = Table("")
    for name in (baseline, *candidates):
        table.add_column(Text(name), justify="right")
    for rows in zip(*map(_rows, candidates.values())):  # one quantity, each candidate
        ours = [value for _, _, value in rows]
        fp32 = next((value for _, value, _ in rows if value), "")
        if any(value != MISSING for value in ours):
            table.add_row(rows[0][0], fp32, *(Text(value, style=STYLES.get(value, "")) for value in ours))
    return table


def _rows(one: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Each quantity: its name, FP32's value, the candidate's."""

    def shown(key: str, form: str, missing: str = MISSING) -> str:
        return missing if one[key] is None else form.format(one[key])

    def size(value: float | None) -> str:
        return "" if value is None else f"{value / MB:.3g} MB"

    speed, memory = shown("speedup", "{:.2f}x"), shown("peak_memory_ratio", "{:.2f}x")
    if one["speedup"] is not None and one["speedup_interval"]:
        speed += shown("speedup_interval", " ({0[0]:.2f} to {0[1]:.2f})")
    if memory != MISSING:
        memory += f" ({size(one['peak_memory_bytes'])})"
    return [
        ("parity", "", one["parity"]),
        ("speed", "1.00x" if one["speedup"] else "", speed),
        ("peak memory", size(one["fp32_peak_memory_bytes"]), memory),
        ("final loss", shown("fp32_loss", "{:.5g}", ""), shown("final_loss", "{:.5g}")),
        ("loss gap", "", shown("loss_gap", "{:+.2g}")),
        ("90 % interval", "", shown("loss_gap_interval", "{0[0]:+.2g} to {0[1]:+.2g}")),
        ("margin", "", shown("margin", "±{:.3g}")),
        ("metric", shown("fp32_metric", "{:.5g}", ""), shown("final_metric", "{:.5g}")),
        ("pairs", "", f"{one['seeds']} x {one['steps']} steps" if one["steps"] else MISSING),
        ("skipped", "", str(one["skipped_steps"]) if one["steps"] else MISSING),
        ("power (loss)", "", shown("power", "{:.0%}")),
    ]
