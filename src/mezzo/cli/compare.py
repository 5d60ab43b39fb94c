"""Train a script in FP32 and in each candidate precision: is 16 bits as good, how much faster, how much smaller?

The script is not changed and need not import Mezzo. It runs several times, each time in a new process: with the
default --seeds 3 and one candidate, 7 runs. Runs with the same seed form a pair, one in each precision. A script that
resumes from its own checkpoint would resume from another run: switch that off. The runs have an empty standard input.

Examples:
  mezzo compare --demo digits --seeds 1              a quick look, on a small data set
  mezzo compare --precision bf16 train.py --epochs 3
  mezzo compare train.py --precision bf16 --seeds 5 --metric 'accuracy: ([0-9.]+)' -- --epochs 3
  mezzo compare --precision bf16,op.softmax=fp32 --precision policy.toml train.py
  mezzo compare --precision own,bf16 train.py       the script's own mixed precision, and Mezzo's bf16
  mezzo compare --nproc 2 --precision bf16 ddp.py    two ranks of DDP or FSDP2, started by torchrun
  mezzo compare --framework keras --precision mixed_bfloat16 train.py

A script with mixed precision of its own (torch.amp, Accelerate, Transformers, Lightning, a model in 16 bits) is the
candidate own, as it is. In the FP32 runs and those of other candidates its mixed precision is switched off.

The answer for each candidate is a plain line and one of four words:
  equivalent    proven equal: loss (and metric) differ by less than the margin; needs 3 seeds or more
  consistent    no harm found, with too few runs for proof
  inconclusive  too few runs to tell, or too much noise
  divergent     worse than FP32, or the training broke

The output ends with the next commands. The folder mezzo-compare-SCRIPT gets report.html, verdict.json, and the records
and output of every run. After an interrupt, and with more seeds after --seeds 1 or 2, the same command continues.

Exit status: 0 no candidate is divergent; 1 one is; 2 wrong usage, or a script that fails in FP32 or never trains.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mezzo.cli.arguments import add_target, folder_of, number, share, target_of, whole
from mezzo.cli.report import page
from mezzo.compare.answer import metric_name, next_steps, unclear_speed, written
from mezzo.compare.comparison import compare
from mezzo.compare.progress import Watcher, tell
from mezzo.compare.request import FRAMEWORKS, Request, candidates
from mezzo.core.byte_counts import written_bytes
from mezzo.core.commands import DEFAULT_MARGIN, say
from mezzo.core.errors import UsageError
from mezzo.core.records import OWN
from mezzo.demos import DEMOS
from mezzo.report import build


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_target(parser)
    add = parser.add_argument
    framework = "the framework of the script (default: pytorch)"
    add("--framework", choices=tuple(FRAMEWORKS), help=framework)
    precision = "the candidates, separated by commas: bf16, fp16, policies, .toml files (default bf16,fp16)"
    add("--precision", action="append", metavar="P", help=precision)
    seeds = "pairs of runs, FP32 and candidate (default 3; 1 for a quick look; more can prove smaller differences)"
    add("--seeds", type=whole("pairs", 3), default=3, metavar="N", help=seeds)
    nproc = "run a distributed script on N ranks, started by torchrun; rank 0 is compared"
    add("--nproc", type=whole("ranks", 2, 2), metavar="N", help=nproc)
    margin = "the largest harm that you accept, as a share of FP32's final loss: 0.005 or 0.5%% (the default)"
    add("--margin", type=share, default=DEFAULT_MARGIN, metavar="X", help=margin)
    metric = "pattern that finds the final metric in the script's output; its first group is the number"
    add("--metric", metavar="REGEX", help=metric)
    better = "whether higher or lower is better (auto: lower if the pattern names a loss or an error)"
    add("--metric-better", choices=("auto", "higher", "lower"), default="auto", help=better)
    margin = "the margin of the metric, in its units (default 0.2 points; as --margin if lower is better)"
    add("--metric-margin", type=number, metavar="X", help=margin)
    add("--out", metavar="DIR", help="the folder to write (default mezzo-compare-SCRIPT)")
    add("--fresh", action="store_true", help="delete the comparison in that folder and start over")
    add("--verbose", action="store_true", help="also print the statistics behind each answer")
    add("--json", action="store_true", help="print verdict.json instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and return the exit status."""
    request, remarks = request_of(arguments)
    for remark in remarks:
        say(f"note: {remark}")
    folder = folder_of(arguments, "compare")
    told = Watcher(Console(stderr=True), quiet=arguments.json)
    try:
        verdict = compare(request, folder, fresh=arguments.fresh, watcher=told)
    except KeyboardInterrupt:
        say(f"Finished runs are kept in {folder}. To continue, give the same command.")
        raise
    report = page(build, folder)
    if arguments.json:
        print(json.dumps(verdict, indent=2))
    else:
        show(Console(), verdict, report, arguments.verbose)
    return int(any(one["parity"] == "divergent" for one in verdict["candidates"].values()))


def request_of(arguments: argparse.Namespace) -> tuple[Request, list[str]]:
    """What the command line asks for, and remarks on what was left out of it; UsageError for what makes no sense."""
    target = target_of(arguments, "mezzo compare --demo digits")
    metric, library = arguments.metric, arguments.framework or "pytorch"
    if arguments.demo:
        if library != "pytorch":
            raise UsageError(f"--demo {arguments.demo} trains with pytorch. Leave --framework {library} out.")
        metric = metric or DEMOS[arguments.demo].metric
    names, remarks = candidates(arguments.precision or ["bf16,fp16"], library)
    as_given = ("seeds", "margin", "metric_better", "metric_margin", "demo", "nproc")
    given = {key: getattr(arguments, key) for key in as_given} | {"metric": metric, "framework": library}
    return Request(target, tuple(arguments.argv), bool(arguments.module), names, **given), remarks


STYLES = {"equivalent": "green", "consistent": "green", "inconclusive": "yellow", "divergent": "bold red"}
MISSING = "-"


def show(console: Console, verdict: Mapping[str, Any], report: Path | None, verbose: bool = False) -> None:
    """Print a plain line for each candidate, the numbers (a table on a terminal where it fits), and what to do next."""
    candidates: Mapping[str, Mapping[str, Any]] = verdict["candidates"]
    metric = metric_name(verdict["request"]["metric"])
    console.print()
    for name, one in candidates.items():
        named = f"{name} ({verdict['own']})" if name == OWN and verdict["own"] else name
        tell(console, f"{named}: {one['plain']}", STYLES.get(one["parity"], ""))
    console.print()
    table = _table(str(verdict["baseline"]), candidates, metric)
    wide = console.options.update(max_width=10_000)
    if console.is_terminal and console.measure(table, options=wide).maximum <= console.width:
        console.print(table)
    else:
        for name, one in candidates.items():
            console.print(Text(name, style="bold"))
            rows = [row for row in _rows(one, metric) if row[2] != MISSING]
            for label, fp32, value in rows:
                tell(console, f"  {label:<{max(15, len(metric) + 2)}}{value}{fp32 and f'   (FP32 {fp32})'}")
    told: dict[str, list[str]] = {}
    for name, one in candidates.items():
        for note in [one["reason"]] * verbose + one["notes"]:
            told.setdefault(note, []).append(name)
    for note, names in told.items():
        tell(console, f"{', '.join(names)}: {note}", "dim")
    console.print()
    for line in verdict["notes"] + [f"Report: {report}"] * (report is not None) + next_steps(candidates):
        tell(console, line)


def _table(baseline: str, candidates: Mapping[str, Mapping[str, Any]], metric: str) -> Table:
    """A row per quantity, a column per precision: eighty columns hold FP32 and two candidates."""
    table = Table("")
    for name in (baseline, *candidates):
        table.add_column(Text(name), justify="right")
    for rows in zip(*(_rows(one, metric) for one in candidates.values())):  # one quantity, each candidate
        ours = [value for _, _, value in rows]
        fp32 = next((value for _, value, _ in rows if value), "")
        if any(value != MISSING for value in ours):
            table.add_row(rows[0][0], fp32, *(Text(value, style=STYLES.get(value, "")) for value in ours))
    return table


def _rows(one: Mapping[str, Any], metric: str) -> list[tuple[str, str, str]]:
    """Each quantity: its name, FP32's value, the candidate's; `metric` is the metric's name."""

    def shown(key: str, form: str, missing: str = MISSING) -> str:
        return missing if one[key] is None else form.format(one[key])

    def size(value: int | None) -> str:
        return "" if value is None else written_bytes(value)

    speed, memory = shown("speedup", "{:.2f}x"), shown("peak_memory_ratio", "{:.2f}x")
    if one["speedup"] is not None and one["speedup_interval"]:
        speed = unclear_speed(one) or speed + shown("speedup_interval", " ({0[0]:.2f} to {0[1]:.2f})")
    if memory != MISSING:
        memory += f" ({size(one['peak_memory_bytes'])})"
    rows = [("verdict", "", str(one["parity"]))]
    for name, what, margin in ((metric, "metric", "metric_margin"), ("training loss", "loss", "margin")):
        ours, fp32 = written(one, what) or (shown(f"final_{what}", "{:.5g}"), "")
        rows += [
            (name, fp32, ours),
            (f"{what} gap", "", shown(f"{what}_gap", "{:+.2g}")),
            ("90 % interval", "", shown(f"{what}_gap_interval", "{0[0]:+.2g} to {0[1]:+.2g}")),
            (f"{what} margin", "", shown(margin, "±{:.3g}")),
        ]
    runs = f"{one['seeds']} x {one['steps']} step{'s' * (one['steps'] != 1)}"
    return [
        *rows,
        ("speed", "1.00x" if one["speedup"] else "", speed),
        ("peak memory", size(one["fp32_peak_memory_bytes"]), memory),
        ("runs", "", runs if one["steps"] else MISSING),
        ("skipped steps", "", str(one["skipped_steps"]) if one["steps"] else MISSING),
    ]
