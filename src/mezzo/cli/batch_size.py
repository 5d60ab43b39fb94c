"""Find the largest batch size with which a training script fits into memory, and the fastest.

The script is not changed, but its own mixed precision is switched off. It runs at one batch size after another, each in
a separate process that ends after a few optimizer steps. Files that it writes are those of an unfinished run. --vary
names the option with which the script receives its batch size:

  --vary=--batch-size      an option:           train.py --batch-size 32
  --vary=--batch-size=     the same in a word:  train.py --batch-size=32
  --vary=data.batch=       Hydra and the like:  train.py data.batch=32
  --vary={}                instead of {}:       train.py config.yaml 32   (write: -- config.yaml {})

On a GPU a size does not fit if an allocation fails. A CPU would swap instead, so there the peak bytes of all tensors in
a step are compared with --limit. samples/s is the size divided by the median time of an optimizer step, data loading
included. If the script accumulates gradients, the batch size is that of one backward pass.

The sizes double until one does not fit, then the gap is bisected. The search ends when samples/s have not risen for two
doublings, unless --max says how far to go, and after --minutes. Ctrl-C ends it too. The sizes measured are printed.

Exit status: 0 found, 1 no size fits, 2 wrong usage, or a script that fails or never trains, 130 interrupted.

Examples:
  mezzo batch-size train.py --vary=--batch-size
  mezzo batch-size train.py --vary=--batch-size --precision bf16 --limit 4GiB -- --epochs 3
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from mezzo.cli.arguments import KERAS, add_target, target_of, whole
from mezzo.compare.measure import WARM_UP
from mezzo.compare.progress import Watcher
from mezzo.compare.request import ScriptRequest, split_precisions
from mezzo.compare.runs import LAUNCH, FinishedRun, run_to_end, terminated_like_an_interrupt
from mezzo.core.byte_counts import parse_bytes
from mezzo.core.commands import say
from mezzo.core.errors import ScriptError, UsageError
from mezzo.core.policy import policy
from mezzo.core.records import file_name
from mezzo.demos import DEMOS
from mezzo.pytorch.batch_size import MEMORY_ERROR, BatchSizeResult, Trial, search, spendable_bytes
from mezzo.pytorch.run.session import check

_SPELL = (
    "Write the batch size option as the script spells it: --vary=--batch-size for an option, --vary=batch_size= for "
    "key=value, or --vary={} to replace {} in the arguments."
)
FEWEST_STEPS = WARM_UP + 4  # three times between two steps


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_target(parser, DEMOS, "--vary=OPTION ")
    add, size = parser.add_argument, whole("", 8, least=1)
    add("--vary", metavar="OPTION", help="the script's batch size option, as the script spells it")
    precision = "presets, policy strings or .toml files, with commas or given again (default fp32,bf16)"
    add("--precision", action="append", metavar="P", help=precision)
    limit = "the bytes that a step may take, such as 4GiB (default on a CPU: most of what is available; on a GPU: none)"
    add("--limit", metavar="BYTES", help=limit)
    add("--start", type=size, metavar="N", help="the first size (default 8, or less where --max is)")
    add("--max", type=size, metavar="N", help="try sizes up to this one, even if samples/s no longer rise")
    minutes = "end the search after so many minutes, shared by the precisions (default 10)"
    add("--minutes", type=whole("minutes", 10, least=1), default=10, metavar="N", help=minutes)
    steps = "end each run after this many optimizer steps (default 24)"
    add("--steps", type=whole("steps", 24, least=FEWEST_STEPS), default=24, metavar="N", help=steps)
    add("--json", action="store_true", help="print JSON instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Search, print, and return the exit status."""
    target = target_of(arguments, DEMOS, "mezzo batch-size train.py --vary=--batch-size")
    if arguments.vary is None:
        raise UsageError(f"--vary is missing. {_SPELL}")
    argv_with(arguments.argv, arguments.vary, 1)  # raises before anything runs
    limit = None if arguments.limit is None else parse_bytes(arguments.limit, "--limit ")
    script = ScriptRequest(target, tuple(arguments.argv), bool(arguments.module))
    precisions = list(dict.fromkeys(split_precisions(arguments.precision or []))) or ["fp32", "bf16"]
    for name in precisions:
        check(policy(name))
        if policy(name).compute == "auto":
            raise UsageError(f"--precision {name}: auto alternates two precisions. Name one, such as bf16.")
    found = dict[str, BatchSizeResult]()
    shown = _Deadline(Console(stderr=True), quiet=arguments.json)
    try:
        with shown, terminated_like_an_interrupt():
            for precision in precisions:
                shown.until = time.monotonic() + 60 * arguments.minutes / len(precisions)
                found[precision] = BatchSizeResult(limit=limit)
                _search(found[precision], script, precision, arguments, shown)
                limit = found[precision].limit  # one for all
    finally:  # after an error or an interrupt, too
        ended = {name: result for name, result in found.items() if result.trials or result.notes}
        if ended and arguments.json:
            results = {name: result.to_dict() for name, result in ended.items()}
            given = {key: getattr(arguments, key) for key in ("argv", "vary", "steps")}
            print(json.dumps({"schema": 1, "script": target, **given, "precisions": results}, indent=2))
        elif ended:
            say(_report(ended), out=True)
    return int(not all(result.largest for result in found.values()))


class _Deadline(Watcher):
    """Shows the runs of a search, and ends it after its time with a TimeoutError."""

    until = math.inf

    def steps(self, done: int) -> None:
        super().steps(done)
        if time.monotonic() > self.until:
            raise TimeoutError


def _report(found: Mapping[str, BatchSizeResult]) -> str:
    """Each precision's result, and its highest speed compared to that of the first."""
    lines = [f"{precision}\n{result}\n" for precision, result in found.items()]
    (first, reference), *others = ((name, result.best.samples_per_second) for name, result in found.items())
    for name, speed in others:
        if speed and reference:
            lines.append(
                f"{name} is {speed / reference:.2f} times as fast as {first}, each at the fastest size tried."
            )
    return "\n".join(lines).rstrip()


def argv_with(given: Sequence[str], vary: str, size: int) -> tuple[str, ...]:
    """The script's arguments with this batch size, which comes last, where it replaces one given before.

    >>> argv_with(("--lr", "1"), "--batch", 32)
    ('--lr', '1', '--batch', '32')
    >>> argv_with(("model=big",), "data.batch=", 32)
    ('model=big', 'data.batch=32')
    """
    if vary == "{}":
        if not any("{}" in word for word in given):
            raise UsageError(
                "--vary={}: no argument of the script contains {}. Write {} instead of the batch size, after --: "
                "mezzo batch-size train.py --vary={} -- config.yaml {}"
            )
        return tuple(word.replace("{}", str(size)) for word in given)
    if not re.fullmatch(r"--?[^\s=-][^\s=]*=?|[^\s=-][^\s=]*=", vary):
        raise UsageError(f"--vary={vary}: is not an option. {_SPELL}")
    return (*given, *f"{_prefix(vary)}{size}".split(" "))


def _prefix(vary: str) -> str:
    """What is written before a size."""
    return "" if vary == "{}" else vary if vary.endswith("=") else f"{vary} "


def _search(
    found: BatchSizeResult,
    script: ScriptRequest,
    precision: str,
    arguments: argparse.Namespace,
    shown: _Deadline,
) -> None:
    """Search under one precision; raise the first size's error, if the script fails there."""
    minutes = arguments.minutes
    try:
        with tempfile.TemporaryDirectory(prefix="mezzo-batch-size-") as folder:
            (Path(folder) / "runs").mkdir()

            def measure(size: int) -> Trial:
                one = replace(script, argv=argv_with(script.argv, arguments.vary, size))
                how = {"observe": True, "own": "off", "stop_after": arguments.steps}
                child = one.child(Path(folder), f"{file_name(precision)}-{size}", precision, **how)
                name = f"{precision}  {_prefix(arguments.vary)}{size}"
                shown.begin(name, len(found.trials) + 1, 0, arguments.steps)
                finished, status = run_to_end(LAUNCH, child, shown)
                found.device = str(finished.machine.get("device_type", found.device))
                found.notes = [f"switched off: the script's {setting}" for setting in finished.switched_off]
                if found.limit is None and finished.machine.get("device_type") == "cpu":
                    found.limit = spendable_bytes()
                return _trial(f"{one.target} {' '.join(one.argv)}", size, finished, status)

            search(found, measure, arguments.start, arguments.max, until_flat=arguments.max is None)
    except TimeoutError:
        found.notes.append(
            f"stopped: the time is over (--minutes {minutes}). Allow more time (--minutes {3 * minutes}), or try fewer "
            "sizes (--start, --max)"
        )
    except ScriptError as failure:
        if not found.trials:
            raise
        what, *output = str(failure).splitlines()
        found.notes.append(f"no further size was tried: {' '.join([what, *output[-1:]])}")


def _trial(script: str, size: int, finished: FinishedRun, status: int) -> Trial:
    """The trial that a run's records and exit status make; ScriptError if the script fails or takes too few steps."""
    output = finished.failure()
    if status == -9 or (status and MEMORY_ERROR.search(output)):
        why = "out of memory" if status > 0 else "killed by the system, probably out of memory"
        return Trial(size, fits=False, why=why)
    if status:
        how = f"exit status {status}. Is --vary its batch size option? Its output ended:\n{output}"
        raise ScriptError(f"{script} ended with {how}")
    if "keras" in finished.machine and finished.memory is None:
        raise ScriptError(f"{script} {KERAS.format('batch-size')} {script}")
    times = finished.times()
    if finished.memory is None or not times.size:
        notes = "; ".join(finished.notes)
        raise ScriptError(
            f"{script} ended after {finished.steps} steps, too few to measure{notes and f' ({notes})'}. Let it train "
            "longer: more epochs, or a smaller --start."
        )
    speed = size / float(np.median(times))
    return Trial(size, fits=True, peak_bytes=finished.memory.peak_bytes, samples_per_second=speed)
