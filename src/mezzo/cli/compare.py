"""Train a script in FP32 and in each candidate precision, and say whether 16 bits are faster, smaller and as
good.

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
import sys
from pathlib import Path

from rich.console import Console

from mezzo.cli.numbers import number, share, whole
from mezzo.cli.page import page
from mezzo.cli.target import add_target, target_of
from mezzo.core.errors import UsageError
from mezzo.demos import DEMOS
from mezzo.report import build
from mezzo.verify.compare import compare
from mezzo.verify.frameworks import FRAMEWORKS
from mezzo.verify.progress import Silent, Watcher, watcher
from mezzo.verify.request import Request, candidates
from mezzo.verify.table import show

PASSES_ON = True
"""What follows `--` is the script's."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.usage = "mezzo compare (SCRIPT | --demo NAME | -m MODULE) [options] [-- SCRIPT'S OWN ARGUMENTS]"
    add_target(parser, DEMOS)
    parser.add_argument(
        "--framework",
        choices=tuple(FRAMEWORKS),
        help="what the script trains with (default pytorch, or what the demo trains with)",
    )
    parser.add_argument(
        "--precision",
        action="append",
        metavar="P",
        help="presets, policy strings or .toml files, with commas or given again (default bf16,fp16)",
    )
    parser.add_argument(
        "--seeds", type=whole("pairs", 3), default=3, metavar="N", help="pairs of runs (default 3)"
    )
    parser.add_argument(
        "--margin",
        type=share,
        default=0.005,
        metavar="X",
        help="the largest harm you accept, as a share of FP32's final loss: 0.005 or 0.5%% (the default)",
    )
    parser.add_argument(
        "--metric", metavar="REGEX", help="where the final metric is printed; its first group is the number"
    )
    parser.add_argument(
        "--metric-better",
        choices=("auto", "higher", "lower"),
        default="auto",
        help="which way is better (auto: lower if the pattern names a loss or an error)",
    )
    parser.add_argument(
        "--metric-margin",
        type=number(0.2),
        metavar="X",
        help="the same for the metric, in its units (default 0.2 points; as --margin if lower is better)",
    )
    parser.add_argument("--out", metavar="DIR", help="the folder to write (default mezzo-compare-SCRIPT)")
    parser.add_argument(
        "--fresh", action="store_true", help="delete the comparison in that folder and start over"
    )
    parser.add_argument("--json", action="store_true", help="print verdict.json in place of the table")


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and return the exit status."""
    errors = Console(stderr=True)
    request, remarks = request_of(arguments)
    for remark in remarks:
        errors.print(f"note: {remark}", markup=False, highlight=False)
    stem = request.demo or (request.target if request.is_module else Path(request.target).resolve().stem)
    folder = Path(arguments.out or f"mezzo-compare-{stem}")
    told: Watcher = Silent() if arguments.json and not errors.is_terminal else watcher(errors)
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
    """What the command line asks for, and remarks on what was left out of it.

    Raises:
        UsageError: none or several of script, demo and module; an unknown demo or precision; another framework than
            the demo's; a value out of range.
    """
    target = target_of(arguments, DEMOS, "mezzo compare --demo digits")
    metric, trains_with = arguments.metric, arguments.framework or "pytorch"
    if arguments.demo:
        demo = DEMOS[arguments.demo]
        if arguments.framework not in (None, demo.framework):
            raise UsageError(
                f"--demo {demo.name} trains with {demo.framework}: leave --framework {arguments.framework} out"
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
    words = ["mezzo", "compare"]
    if request.demo:
        words += ["--demo", request.demo]
    elif request.is_module:
        words += ["-m", request.target]
    else:
        words.append(request.target)
    if request.framework != "pytorch" and not request.demo:
        words += ["--framework", request.framework]
    for name in request.precisions:
        words += ["--precision", name]
    words += ["--seeds", str(request.seeds), "--margin", f"{request.margin:g}"]
    if request.metric and not (request.demo and DEMOS[request.demo].metric == request.metric):
        words += ["--metric", request.metric]
    if request.metric_better != "auto":
        words += ["--metric-better", request.metric_better]
    if request.metric_margin is not None:
        words += ["--metric-margin", f"{request.metric_margin:g}"]
    words += ["--out", str(folder), "--fresh"]
    return [*words, "--", *request.argv] if request.argv else words
