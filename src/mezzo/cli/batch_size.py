"""Find the largest batch size with which a training script fits into memory, and the fastest.

The script is not changed, but its own mixed precision is switched off. It runs at one batch size after another, each in
a separate process that ends after a few optimizer steps. Files that it writes are those of an unfinished run.

On a GPU a size does not fit if an allocation fails. A CPU would swap instead, so there the peak bytes of all tensors in
a step are compared with --limit. samples/s is the size divided by the median time of an optimizer step, data loading
included. If the script accumulates gradients, the batch size is that of one backward pass.

The sizes double until one does not fit, then the gap is bisected down to an eighth. If the first takes over half of
--limit, its half is measured next. The search ends when samples/s have not risen for two doublings (unless --max is
given), after --minutes, and on Ctrl-C. What was measured is printed.

Exit status: 0 found, 1 no size fits, 2 wrong usage, or a script that fails or never trains, 130 interrupted.

Examples:
  mezzo batch-size train.py --vary=--batch-size --precision bf16 --limit 4GiB -- --epochs 3
  mezzo batch-size train.py --vary=data.batch=       Hydra and the like: train.py data.batch=32
  mezzo batch-size train.py --vary={} -- config.yaml {}
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Sequence
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
from mezzo.pytorch.batch_size import MEMORY_ERROR, BatchSizeResult, Trial, search, spendable_bytes
from mezzo.pytorch.run.session import check

_SPELL = "Write it as the script spells it: --vary=--batch-size, --vary=batch_size= (key=value) or --vary={}."
FEWEST_STEPS = WARM_UP + 4  # three times between two steps


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_target(parser, "--vary=OPTION ")
    add, size = parser.add_argument, whole("", 8, least=1)
    add("--vary", metavar="OPTION", help="the script's batch size option, as the script spells it")
    precision = "presets, policy strings or .toml files, with commas or given again (default fp32,bf16)"
    add("--precision", action="append", metavar="P", help=precision)
    limit = "the bytes that a step may take, such as 4GiB (default on a CPU: most of what is left; on a GPU: none)"
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
    target = target_of(arguments, "mezzo batch-size train.py --vary=--batch-size")
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
            over = time.monotonic() + 60 * arguments.minutes
            for name in precisions:
                now = time.monotonic()
                shown.until = now + (over - now) / (len(precisions) - len(found))
                found[name] = BatchSizeResult(limit=limit, typed=arguments.limit or "")
                _search(found[name], script, name, arguments, shown)
                limit = found[name].limit  # one for all
    except KeyboardInterrupt:
        for result in [*found.values()][-1:]:
            result.notes.append("interrupted before the search ended")
        raise
    finally:  # after an error or an interrupt, too
        ended = {name: result for name, result in found.items() if result.trials or result.notes}
        if ended and arguments.json:
            results = {name: result.to_dict() for name, result in ended.items()}
            given = {key: getattr(arguments, key) for key in ("argv", "vary", "steps")}
            print(json.dumps({"schema": 1, "script": target, **given, "precisions": results}, indent=2))
        elif ended:
            say("\n\n".join(f"{name}\n{result}" for name, result in ended.items()), out=True)
    return int(not all(result.largest for result in found.values()))


class _Deadline(Watcher):
    """Shows the runs of a search, and ends it after its time with a TimeoutError."""

    until = 0.0

    def steps(self, done: int) -> None:
        super().steps(done)
        if time.monotonic() > self.until:
            raise TimeoutError


def argv_with(given: Sequence[str], vary: str | None, size: int) -> tuple[str, ...]:
    """The script's arguments with this batch size, which comes last, where it replaces one given before."""
    if vary is None:
        raise UsageError(f"--vary is missing. {_SPELL}")
    if vary == "{}":
        if not any("{}" in word for word in given):
            raise UsageError("--vary={}: no argument of the script contains {}. Example: -- config.yaml {}")
        return tuple(word.replace("{}", str(size)) for word in given)
    if not re.fullmatch(r"--?[^\s=-][^\s=]*=?|[^\s=-][^\s=]*=", vary):
        raise UsageError(f"--vary={vary}: is not an option. {_SPELL}")
    return (*given, f"{vary}{size}") if vary.endswith("=") else (*given, vary, str(size))


def _search(
    found: BatchSizeResult, script: ScriptRequest, precision: str, given: argparse.Namespace, shown: _Deadline
) -> None:
    """Search under one precision; raise the first size's error, if the script fails there."""

    def measure(size: int) -> Trial:
        one = replace(script, argv=argv_with(script.argv, given.vary, size))
        child = one.child(Path(folder), str(size), precision, observe=True, own="off", stop_after=given.steps)
        shown.begin(f"{precision}  size {size}", len(found.trials) + 1, 0, given.steps)
        finished, status = run_to_end(LAUNCH, child, shown)
        found.device = str(finished.machine.get("device_type", found.device))
        found.notes = [f"switched off: the script's {setting}" for setting in finished.switched_off]
        if found.limit is None and finished.machine.get("device_type") == "cpu":
            found.limit = spendable_bytes()
        return _trial(f"{one.target} {' '.join(one.argv)}", size, finished, status)

    with tempfile.TemporaryDirectory(prefix="mezzo-batch-size-") as folder:
        (Path(folder) / "runs").mkdir()
        try:
            search(found, measure, given.start, given.max, flat=given.max is None)
        except TimeoutError:
            more = f"For more sizes: --minutes {3 * given.minutes}"
            found.notes.append(f"stopped: the time is over (--minutes {given.minutes}). {more}")
        except ScriptError as failure:
            if not found.trials:
                raise
            what, *output = str(failure).splitlines()
            found.notes.append(f"no further size was tried: {' '.join([what, *output[-1:]])}")


def _trial(script: str, size: int, finished: FinishedRun, status: int) -> Trial:
    """The trial that a run's records and exit status make; ScriptError if the script fails or takes too few steps."""
    output, times = finished.failure(), finished.times()
    if status == -9 or (status and MEMORY_ERROR.search(output)):
        why = "out of memory" if status > 0 else "killed by the system, probably out of memory"
        return Trial(size, fits=False, why=why)
    if status:
        how = f"exit status {status}. Is --vary its batch size option? Its output ended:\n{output}"
        raise ScriptError(f"{script} ended with {how}")
    if "keras" in finished.machine and finished.memory is None:
        raise ScriptError(f"{script} {KERAS.format('batch-size')} {script}")
    if finished.memory is None or not times.size:
        notes = f" ({'; '.join(finished.notes)})" if finished.notes else ""
        raise ScriptError(
            f"{script} ended after {finished.steps} step{'s' * (finished.steps != 1)}, too few to measure{notes}. "
            "Let it train longer: more epochs, or a smaller --start."
        )
    return Trial(size, True, finished.memory.peak_bytes, size / float(np.median(times)))
