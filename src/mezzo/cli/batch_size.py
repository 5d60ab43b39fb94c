"""Find the largest batch size with which a training script fits into memory, and the fastest.

The script is not changed, but its own mixed precision is switched off. It runs at one batch size after another, each in
a separate process that ends after a few optimizer steps. Files that it writes are those of an unfinished run. --vary
names the option with which the script receives its batch size:

  --vary=--batch-size      an option:           train.py --batch-size 32
  --vary=--batch-size=     the same in a word:  train.py --batch-size=32
  --vary=data.batch=       Hydra and the like:  train.py data.batch=32
  --vary={}                instead of {}:       train.py config.yaml 32   (write: -- config.yaml {})

On a GPU a size does not fit if an allocation fails. A CPU would swap instead, so there the peak bytes of all tensors in
a step are compared with --limit. A step is one step of the optimizer. samples/s is the size divided by the time of a
step (the median), data loading included. If the script accumulates gradients, the batch size is that of one backward
pass.

The sizes double. The search ends when samples/s have not risen for two doublings, unless --max says how far to go, and
after --minutes. Ctrl-C ends it too. Each time, the table has the sizes that were measured.

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
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mezzo.cli.arguments import KERAS, add_target, target_of, whole
from mezzo.compare.folder import check_ours, locked, writing
from mezzo.compare.measure import WARM_UP
from mezzo.compare.progress import Watcher
from mezzo.compare.request import ScriptRequest, split_precisions
from mezzo.compare.runs import LAUNCH, FinishedRun, run_to_end, terminated_like_an_interrupt
from mezzo.core.byte_counts import parse_bytes
from mezzo.core.commands import say
from mezzo.core.errors import ScriptError, UsageError
from mezzo.core.policy import policy
from mezzo.core.records import file_name
from mezzo.core.whole_file import write_whole
from mezzo.demos import DEMOS
from mezzo.pytorch import batch_size
from mezzo.pytorch.batch_size import BatchSizeResult, Search, Trial, flat_since, spendable_bytes
from mezzo.pytorch.run.session import check

FILE = "batch-size.json"

_SPELL = (
    "Write the batch size option as the script spells it: --vary=--batch-size for an option, --vary=batch_size= for "
    "key=value, or --vary={} to replace {} in the arguments."
)
MEASURED = 3
"""The step whose memory is measured."""
FEWEST_STEPS = WARM_UP + 4  # three times between two steps


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_target(parser, DEMOS, "--vary=OPTION ")
    add, size = parser.add_argument, whole("", 8, least=1)
    add("--vary", metavar="OPTION", help="the script's batch size option, as the script spells it")
    precision = "presets, policy strings or .toml files, with commas or given again (default fp32,bf16)"
    add("--precision", action="append", metavar="P", help=precision)
    limit = (
        "the bytes that a step may take, such as 4GiB (default on a CPU: the available memory, less 10 %% of it or "
        "512 MiB, the larger; on a GPU: none, sizes grow until an allocation fails)"
    )
    add("--limit", metavar="BYTES", help=limit)
    add("--start", type=size, metavar="N", help="the first size (default 8, or less where --max is)")
    add("--max", type=size, metavar="N", help="try sizes up to this one, even if samples/s no longer rise")
    minutes = "end the search after so many minutes, shared by the precisions (default 10)"
    add("--minutes", type=whole("minutes", 10, least=1), default=10, metavar="N", help=minutes)
    add("--multiple-of", type=size, default=1, metavar="N", help="try only multiples of it (default 1)")
    steps = "end each run after this many optimizer steps (default 24)"
    add("--steps", type=whole("steps", 24, least=FEWEST_STEPS), default=24, metavar="N", help=steps)
    add("--out", metavar="DIR", help=f"keep every run's records and output there, and {FILE}")
    add("--json", action="store_true", help="print JSON instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Search, print, and return the exit status."""
    target = target_of(arguments, DEMOS, "mezzo batch-size train.py --vary=--batch-size")
    if arguments.vary is None:
        raise UsageError(f"--vary is missing. {_SPELL}")
    names = ("--start ", "--multiple-of ", "--max ")
    sizes = Search(arguments.start, arguments.multiple_of, arguments.max, arguments.max is None, names)
    argv_with(arguments.argv, arguments.vary, 1)  # raises before anything runs
    limit = None if arguments.limit is None else parse_bytes(arguments.limit, "--limit ")
    script = ScriptRequest(target, tuple(arguments.argv), bool(arguments.module))
    precisions = _precisions(arguments.precision or ["fp32,bf16"])
    console, found = Console(stderr=True), dict[str, BatchSizeResult]()
    shown = _Deadline(console, quiet=arguments.json)
    ends = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="mezzo-batch-size-") as temporary:
        folder = Path(arguments.out or temporary)
        with writing(folder):
            check_ours(folder, (FILE, "runs"), FILE)
            with locked(folder), shown, terminated_like_an_interrupt():
                shutil.rmtree(folder / "runs", ignore_errors=True)
                (folder / "runs").mkdir()
                for left, precision in zip(range(len(precisions), 0, -1), precisions):
                    now = time.monotonic()
                    shown.until = now + (ends - now) / left
                    found[precision] = _search(script, precision, arguments, sizes, limit, folder, shown)
                    limit = found[precision].limit  # one for all
                    if shown.interrupted:
                        break
                given = {key: getattr(arguments, key) for key in ("argv", "vary", "steps")}
                results = {precision: result.to_dict() for precision, result in found.items()}
                data = {"schema": 1, "script": target, **given, "precisions": results}
                text = json.dumps(data, indent=2, allow_nan=False)
                write_whole(folder / FILE, text + "\n")
    if arguments.json:
        print(text)
    else:
        say(_report(found, _prefix(arguments.vary) or "batch size "), out=True)
    if shown.interrupted:
        raise KeyboardInterrupt
    return int(not all(result.fits for result in found.values()))


class _TimeIsUpError(Exception):
    """The time of a search is over."""


class _Deadline(Watcher):
    """Shows the runs of a search, and ends it after its time. `interrupted`: whether the user ended it."""

    until, interrupted = math.inf, False

    def steps(self, done: int) -> None:
        super().steps(done)
        if time.monotonic() > self.until:
            raise _TimeIsUpError


def _precisions(words: Sequence[str]) -> list[str]:
    """Each precision once, under the first of its names."""
    found: dict[str, str] = {}
    for name in split_precisions(words):
        check(policy(name))
        if policy(name).compute == "auto":
            raise UsageError(f"--precision {name}: auto alternates two precisions. Name one, such as bf16.")
        found.setdefault(policy(name).fingerprint(), name)
    if not found:
        raise UsageError("--precision is empty. Examples: bf16, or fp32,bf16 for both")
    return list(found.values())


def _report(found: Mapping[str, BatchSizeResult], option: str) -> str:
    """Each precision's table, and then the recommendations."""
    lines: list[str] = []
    for precision, result in found.items():
        lines += [precision, *result.table(), *(f"note: {note}" for note in result.notes), ""]
    first, reference = next(iter(found.items()))
    for precision, result in found.items():
        lines.append(f"{precision}: {result.sentence(option)}")
        if precision == first or not (result.fits and reference.fits):
            continue
        if result.bounded and reference.bounded:
            lines[-1] += f" That is {result.largest / reference.largest:.2f} times the size in {first}."
        if (ours := result.best.samples_per_second) and (theirs := reference.best.samples_per_second):
            lines[-1] += f" At its fastest size it is {ours / theirs:.2f} times as fast as {first}."
    return "\n".join(lines)


def argv_with(given: Sequence[str], vary: str, size: int) -> tuple[str, ...]:
    """The script's arguments with this batch size, which replaces the one that they hold.

    >>> argv_with(("--batch", "8", "--lr", "1"), "--batch", 32)
    ('--batch', '32', '--lr', '1')
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
    name, new = vary.removesuffix("="), f"{_prefix(vary)}{size}".split(" ")
    kept: list[str] = []
    words = iter(given)
    for word in words:
        if word == name and name.startswith("-"):
            next(words, None)
        elif not word.startswith(f"{name}="):
            kept.append(word)
            continue
        kept += new
        new = []
    return (*kept, *new)


def _prefix(vary: str) -> str:
    """What is written before a size."""
    return "" if vary == "{}" else vary if vary.endswith("=") else f"{vary} "


def _search(
    script: ScriptRequest,
    precision: str,
    arguments: argparse.Namespace,
    sizes: Search,
    limit: int | None,
    folder: Path,
    shown: _Deadline,
) -> BatchSizeResult:
    """The result under one precision; the first size's error, if the script fails there."""
    trials, notes, device, complete = list[Trial](), list[str](), "cpu", False
    option, minutes = _prefix(arguments.vary), arguments.minutes
    try:
        while (size := sizes.next_size(trials, limit)) is not None:
            one = replace(script, argv=argv_with(script.argv, arguments.vary, size))
            name = f"{file_name(precision)}-{size}"
            how = {"observe": True, "own": "off", "stop_after": arguments.steps}
            shown.begin(f"{precision}  {option}{size}", len(trials) + 1, 0, arguments.steps)
            finished, status = run_to_end(LAUNCH, one.child(folder, name, precision, **how), shown)
            device = str(finished.machine.get("device_type", device))
            if limit is None and finished.machine.get("device_type") == "cpu":
                limit = spendable_bytes()
            trials.append(_trial(f"{one.target} {' '.join(one.argv)}", size, finished, status, limit))
        complete = True
        notes += [f"switched off: the script's {setting}" for setting in finished.switched_off]
        if sizes.until_flat and all(trial.fits for trial in trials):
            notes.append(
                f"samples/s have not risen since {flat_since(trials)}. For larger sizes: --max {16 * trials[-1].size}"
            )
    except KeyboardInterrupt:
        shown.interrupted = True
        notes.append(f"interrupted before {option}{size} was measured")
    except _TimeIsUpError:
        notes.append(
            f"stopped: the time is over (--minutes {minutes}) before {option}{size} was measured. Allow more time "
            f"(--minutes {3 * minutes}), or try fewer sizes (--start, --max)"
        )
    except ScriptError as failure:
        if not trials:
            raise
        complete, (what, *output) = True, str(failure).splitlines()
        notes.append(f"no further size was tried: {' '.join([what, *output[-1:]])}")
    if any(trial.fits for trial in trials) and not any(trial.seconds for trial in trials):
        notes.append("no speed: the script took too few steps to time. Let it train longer: more epochs")
    return BatchSizeResult(tuple(trials), limit, device, tuple(notes), complete)


def _trial(script: str, size: int, finished: FinishedRun, status: int, limit: int | None) -> Trial:
    """The trial that a run's records and exit status make; ScriptError if the script fails or takes too few steps."""
    output = finished.failure()
    if status == -9:
        return Trial(size, fits=False, why="killed by the system, probably out of memory")
    if status and batch_size.MEMORY_ERROR.search(output):
        return Trial(size, fits=False, why=batch_size.OUT_OF_MEMORY)
    if status:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        raise ScriptError(f"{script} {how}. Is --vary its batch size option? Its output ended:\n{output}")
    if finished.memory is None and "keras" in finished.machine:
        raise ScriptError(f"{script} {KERAS.format('batch-size')} {script}")
    if finished.memory is None:
        notes = "; ".join(finished.notes)
        raise ScriptError(
            f"{script} ended after {finished.steps} steps, but memory is measured in step {MEASURED}"
            f"{notes and f' ({notes})'}. Let it train longer: more epochs, or a smaller --start."
        )
    peak, times = finished.memory.peak_bytes, finished.times().tolist()
    if limit is not None and peak > limit:
        return Trial(size, fits=False, peak_bytes=peak, why=batch_size.OVER)
    return Trial(size, fits=True, peak_bytes=peak, seconds=statistics.median(times) if times else None)
