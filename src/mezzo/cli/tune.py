"""Find the cheapest precision policy that does no harm, by measuring a script.

The script runs once in FP32, for a few steps. In those every module is run again in 16 bits: by how much that would
change the loss, whether its numbers fit, and what time it would save. A minimum cut then chooses each module's format:
the least time, the casts between modules included, whose expected change of the loss is within the margin.

The folder gets policy.toml, with a reason on each line, for --policy and --precision everywhere; and a comparison of
the preset and of that policy with FP32 (see mezzo compare), which has the last word.

Exit status: 0 the policy holds, 1 the comparison finds it divergent or slower than the preset, 2 wrong usage, or a
script that fails in FP32 or never trains.

Examples:
  mezzo tune train.py -- --epochs 3
  mezzo tune --precision fp16 --margin 0.1% train.py
  mezzo tune --no-compare --goal memory --demo text-gpt
  mezzo run --policy mezzo-tune-train/policy.toml train.py --epochs 3
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path

from rich.console import Console

from mezzo.cli.compare import command_line
from mezzo.cli.numbers import share, whole
from mezzo.cli.page import page
from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.tuning import GOALS
from mezzo.demos import PYTORCH as DEMOS
from mezzo.report import build
from mezzo.verify.progress import Silent, Watcher, watcher
from mezzo.verify.table import show as show_verdict
from mezzo.verify.tune.request import TuneRequest
from mezzo.verify.tune.table import show
from mezzo.verify.tune.tune import COMPARISON, tune_script

PASSES_ON = True
"""What follows `--` is the script's."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.usage = "mezzo tune (SCRIPT | --demo NAME | -m MODULE) [options] [-- SCRIPT'S OWN ARGUMENTS]"
    # "-1%" is a number too, a wrong one: to argparse it would be an option, and --margin without a value.
    parser._negative_number_matcher = re.compile(r"^-(\d+|\d*\.\d+)%?$")
    parser.add_argument("script", nargs="?", help="a training script, or a directory with a __main__.py")
    parser.add_argument("--demo", metavar="NAME", help=f"an embedded demo: {', '.join(sorted(DEMOS))}")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="a module, as in python -m")
    parser.add_argument(
        "--precision",
        metavar="P",
        default="auto",
        help="the preset to begin from: bf16, fp16, or auto (the default): what this machine is good at",
    )
    parser.add_argument(
        "--budget",
        type=whole("steps", 6),
        default=6,
        metavar="N",
        help="training steps spent on measuring (default 6)",
    )
    parser.add_argument(
        "--first",
        type=whole("steps", 10),
        default=10,
        metavar="N",
        help="steps that go by before them (default 10)",
    )
    parser.add_argument(
        "--margin",
        type=share,
        default=0.005,
        metavar="X",
        help="the largest change of the loss you accept, as a share of it: 0.005 or 0.5%% (the default)",
    )
    parser.add_argument(
        "--goal",
        default="time",
        metavar="G",
        help="; ".join(f"{name}: {what}" for name, what in GOALS.items()) + " (default time)",
    )
    parser.add_argument("--no-compare", action="store_true", help="write the policy, and do not judge it")
    parser.add_argument(
        "--seeds",
        type=whole("pairs", 3),
        default=3,
        metavar="N",
        help="pairs of runs of the comparison (default 3)",
    )
    parser.add_argument("--metric", metavar="REGEX", help="for the comparison: where the metric is printed")
    parser.add_argument("--out", metavar="DIR", help="the folder to write (default mezzo-tune-SCRIPT)")
    parser.add_argument("--json", action="store_true", help="print tuning.json in place of the table")


def run(arguments: argparse.Namespace) -> int:
    """Tune, print, and return the exit status."""
    errors, console = Console(stderr=True), Console()
    request, remarks = request_of(arguments)
    for remark in remarks:
        errors.print(f"note: {remark}", markup=False, highlight=False)
    folder = Path(arguments.out or f"mezzo-tune-{request.stem}")

    def told() -> Watcher:
        return Silent() if arguments.json and not errors.is_terminal else watcher(errors)

    outcome = tune_script(request, folder, judged=not arguments.no_compare, watcher=told)
    report = None if outcome.verdict is None else page(build, folder / COMPARISON)
    if arguments.json:
        print(json.dumps(outcome.to_json(), indent=2))
    else:
        show(console, outcome)
        if outcome.verdict is not None:
            console.print()
            precisions = tuple(outcome.verdict["candidates"])
            again = command_line(request.comparison(precisions), folder / COMPARISON)
            show_verdict(console, outcome.verdict, report, again)
        if not outcome.finding and not outcome.tuned.policy.is_fp32:
            words = ["mezzo", "run", "--policy", str(outcome.policy)]
            words += ["-m"] * request.is_module + [request.target, *request.argv]
            console.print(f"Use it: {shlex.join(words)}", markup=False, highlight=False, soft_wrap=True)
    return int(bool(outcome.finding))


def request_of(arguments: argparse.Namespace) -> tuple[TuneRequest, list[str]]:
    """What the command line asks for, and remarks on what was chosen for the user.

    Raises:
        UsageError: none or several of script, demo and module; a value out of range.
    """
    given = [word for word in (arguments.script, arguments.demo, arguments.module) if word]
    if len(given) != 1:
        received = f"received {', '.join(given)}" if given else "received none"
        raise UsageError(
            f"give one of SCRIPT, --demo NAME and -m MODULE; {received}. For instance: mezzo tune --demo digits"
        )
    script, metric = arguments.script, arguments.metric
    if arguments.demo:
        if arguments.demo not in DEMOS:
            raise unknown_name("demo", arguments.demo, DEMOS)
        script, metric = str(DEMOS[arguments.demo].path), metric or DEMOS[arguments.demo].metric
    preset, remarks = arguments.precision, []
    if preset == "auto":
        preset, why = _native()
        remarks.append(why)
    request = TuneRequest(
        target=arguments.module or script,
        argv=tuple(arguments.argv),
        is_module=bool(arguments.module),
        preset=preset,
        budget=arguments.budget,
        first=arguments.first,
        margin=arguments.margin,
        goal=arguments.goal,
        seeds=arguments.seeds,
        metric=metric,
        demo=arguments.demo,
    )
    return request, remarks


def _native() -> tuple[str, str]:
    """The 16-bit format that this machine is good at, and why."""
    import torch

    from mezzo.core.policy import policy
    from mezzo.pytorch.auto import resolve

    found, why = resolve(policy("auto"), "cuda" if torch.cuda.is_available() else "cpu")
    if found.compute != "fp32":
        return found.compute, why
    return "bf16", (
        "this machine has no fast 16-bit format, so 16 bits will seldom save time here. Tuned for bf16; with "
        "--goal memory, times count for nothing"
    )
