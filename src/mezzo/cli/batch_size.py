"""Find the largest batch size with which a training script fits into memory, and the fastest.

The script is not changed. It runs at one batch size after another, each run in a separate process that is ended after a
few optimizer steps, so files that the script writes are those of an unfinished run. Say with --vary how the script
receives its batch size:

  --vary=--batch-size      an option:           train.py --batch-size 32
  --vary=--batch-size=     the same in a word:  train.py --batch-size=32
  --vary=data.batch=       Hydra and the like:  train.py data.batch=32
  --vary={}                in place of {}:      train.py config.yaml 32   (give: -- config.yaml {})

On a GPU a size fails when an allocation does. A CPU would swap, so there the bytes of all tensors at a step's peak are
compared with --limit. A step is one step of the optimizer; samples/s is the size divided by its time, data
loading included. If the script accumulates gradients, the batch size is that of one backward pass.

Exit status: 0 found, 1 nothing fits (not even the smallest size), 2 wrong usage, or a script that fails or never
trains.

Examples:
  mezzo batch-size train.py --vary=--batch-size
  mezzo batch-size train.py --vary=--batch-size --precision bf16 --limit 4GiB -- --epochs 3
  mezzo batch-size train.py --vary=--batch-size --precision bf16,masters=split --multiple-of 8
  mezzo batch-size --demo text-gpt --vary=--batch --limit 1GiB --multiple-of 8
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from mezzo.cli.arguments import add_target, target_of, whole
from mezzo.compare.folder import check_ours, locked, writing
from mezzo.compare.progress import Watcher, watcher
from mezzo.compare.request import ScriptRequest, split_precisions
from mezzo.compare.runs import LAUNCH, FinishedRun, run_to_end, terminated_like_an_interrupt
from mezzo.core.byte_counts import parse_bytes
from mezzo.core.errors import MezzoError, ScriptError, UnsupportedPrecisionError, UsageError
from mezzo.core.policy import policy
from mezzo.core.records import file_name
from mezzo.core.whole_file import write_whole
from mezzo.demos import PYTORCH as DEMOS
from mezzo.pytorch.batch_size import (
    OUT_OF_MEMORY,
    OVER,
    BatchSizeResult,
    Search,
    Trial,
    available_bytes,
    says_out_of_memory,
    spendable_bytes,
    unchanging,
)
from mezzo.pytorch.run.session import check

PASSES_ON = True
"""What follows `--` is the script's."""

SCHEMA = 1
FILE = "batch-size.json"

MEASURED = 3
"""The step whose memory is measured."""

LAST_RESERVE = 256 * 1024**2
"""A run is ended when the machine has less memory left than this: it would swap, or the system would kill it."""

NO_SUCH_OPTION = ("unrecognized arguments", "no such option", "unknown option", "Could not override")


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.usage = (
        "mezzo batch-size (SCRIPT | --demo NAME | -m MODULE) --vary=OPTION [options] [-- SCRIPT'S ARGUMENTS]"
    )
    add_target(parser, DEMOS)
    add, size = parser.add_argument, whole("", 8, least=1)
    add("--vary", metavar="OPTION", help="the script's batch size option, as the script spells it")
    add(
        "--precision",
        action="append",
        metavar="P",
        help="presets, policy strings or .toml files, with commas or given again (default fp32,bf16)",
    )
    add(
        "--limit",
        metavar="BYTES",
        help="what a step may take, such as 4GiB (default on a CPU: what is available, less 10 %% or 512 MiB; on a "
        "GPU: until an allocation fails)",
    )
    add("--start", type=size, default=8, metavar="N", help="the first size (default 8)")
    add("--max", type=size, metavar="N", help="try no size above it")
    add("--multiple-of", type=size, default=1, metavar="N", help="try only multiples of it (default 1)")
    add(
        "--steps",
        type=whole("steps", 12, least=MEASURED + 1),
        default=12,
        metavar="N",
        help="end each run after this many optimizer steps (default 12)",
    )
    add("--out", metavar="DIR", help=f"keep every run's records and output there, and {FILE}")
    add("--json", action="store_true", help="print JSON instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Search, print, and return the exit status."""
    request = request_of(arguments)
    folder = Path(arguments.out) if arguments.out else None
    found = search_script(request, folder, watcher(Console(stderr=True), quiet=arguments.json))
    data = {
        "schema": SCHEMA,
        "script": request.target,
        "argv": list(request.argv),
        "vary": request.vary,
        "steps": request.steps,
        "precisions": {precision: result.to_dict() for precision, result in found.items()},
    }
    text = json.dumps(data, indent=2, allow_nan=False)
    if folder is not None:
        write_whole(folder / FILE, text + "\n")
    if arguments.json:
        print(text)
    else:
        show(Console(), request, found)
    return int(not all(result.fits for result in found.values()))


def show(console: Console, request: BatchSizeRequest, found: Mapping[str, BatchSizeResult]) -> None:
    """Print each precision's table, and then the recommendations."""
    for precision, result in found.items():
        console.print(Text(precision, style="bold"), soft_wrap=True)
        for line in (*result.table(), *(f"note: {note}" for note in result.notes), ""):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    first = next(iter(found))
    for precision, result in found.items():
        text = result.sentence(_prefix(request.vary) or "batch size ")
        if precision != first and result.fits and found[first].fits:
            text += f" The largest is {result.largest / found[first].largest:.2f} times that of {first}."
        console.print(Text.assemble((precision, "bold"), f": {text}"), soft_wrap=not console.is_terminal)


@dataclass(frozen=True)
class BatchSizeRequest(ScriptRequest):
    """What to search, checked before anything runs.

    `vary` is ``--batch-size``, ``--batch-size=``, ``data.batch=`` or ``{}``, `limit` the bytes that a step may take.

    Raises:
        UsageError: a script that doesn't exist, an unknown spelling or precision, arguments without ``{}``.
    """

    vary: str = "--batch-size"
    precisions: tuple[str, ...] = ("fp32", "bf16")
    steps: int = 12
    sizes: Search = field(default_factory=Search)
    limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.precisions:
            check(policy(name))
            if policy(name).compute == "auto":
                raise UsageError(
                    f"--precision {name}: auto alternates two precisions in its first steps, so they show the "
                    "memory of neither. Name one, such as bf16 (`mezzo doctor` says which suits this machine)."
                )
        argv_with(self.argv, self.vary, self.sizes.start)


def argv_with(given: Sequence[str], vary: str, size: int) -> tuple[str, ...]:
    """The script's arguments with this batch size, which replaces the one that they hold.

    >>> argv_with(("--batch", "8", "--lr", "1"), "--batch", 32)
    ('--batch', '32', '--lr', '1')
    >>> argv_with(("model=big",), "data.batch=", 32)
    ('model=big', 'data.batch=32')

    Raises:
        UsageError: the spelling is none of `BatchSizeRequest`'s, or no argument holds ``{}``.
    """
    if vary == "{}":
        if not any("{}" in word for word in given):
            raise UsageError(
                "--vary={}: no argument of the script holds {}. Write it where the batch size belongs, after --, "
                "such as: mezzo batch-size train.py --vary={} -- config.yaml {}"
            )
        return tuple(word.replace("{}", str(size)) for word in given)
    name = vary.removesuffix("=")
    is_option = vary.startswith("-") and not any(c.isspace() or c == "=" for c in vary)
    if not name.strip("-=") or not (vary.endswith("=") or is_option):
        near = f" Did you mean --vary={vary}= or --vary=--{vary}?" if vary.strip("-= ") else ""
        raise UsageError(
            f"--vary={vary}: write the batch size option as the script spells it: --vary=--batch-size for an "
            f"option, --vary=batch_size= for key=value, or --vary={{}} to replace {{}} in the arguments.{near}"
        )
    new = f"{_prefix(vary)}{size}".split(" ")
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


def request_of(arguments: argparse.Namespace) -> BatchSizeRequest:
    """The request that the command line makes."""
    target = target_of(arguments, DEMOS, "mezzo batch-size train.py --vary=--batch-size")
    if arguments.vary is None:
        raise UsageError(
            "--vary is missing: the script's batch size option, as the script spells it. --vary=--batch-size for an "
            "option, --vary=batch_size= for key=value"
        )
    precisions: dict[str, str] = {}
    for name in split_precisions(arguments.precision or ["fp32,bf16"]):
        precisions.setdefault(policy(name).fingerprint(), name)
    if not precisions:
        raise UsageError("--precision names nothing: give one such as bf16, or several such as fp32,bf16")
    return BatchSizeRequest(
        target,
        tuple(arguments.argv),
        bool(arguments.module),
        arguments.vary,
        tuple(precisions.values()),
        arguments.steps,
        Search(arguments.start, arguments.multiple_of, max_size=arguments.max),
        None if arguments.limit is None else parse_bytes(arguments.limit),
    )


def search_script(
    request: BatchSizeRequest,
    folder: Path | None = None,
    progress: Watcher | None = None,
    *,
    command: Sequence[str] = LAUNCH,
) -> dict[str, BatchSizeResult]:
    """The result for each precision. The folder, if given, keeps each run's records and output.

    Raises:
        ScriptError: the script fails at the first size.
        UsageError: it has no such option, or its bytes don't depend on it; the folder can't be written; no limit is
            known on this system.
        UnsupportedPrecisionError: a precision that this machine can't run.
    """
    with _opened(folder) as place, progress or Watcher() as shown, terminated_like_an_interrupt():
        return {one: _search(request, one, place, shown, command) for one in request.precisions}


@contextmanager
def _opened(folder: Path | None) -> Iterator[Path]:
    """The folder whose `runs/` receives the runs' files; a temporary one without --out."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="mezzo-batch-size-") as name:
            (Path(name) / "runs").mkdir()
            yield Path(name)
        return
    with writing(folder):
        check_ours(folder, (FILE, "runs"), FILE)
        with locked(folder):
            shutil.rmtree(folder / "runs", ignore_errors=True)
            (folder / "runs").mkdir()
            yield folder


class _FailedError(Exception):
    """The script fails at this size for a reason other than memory: how, and the end of its output."""


class _NoMemoryError(Exception):
    """The machine has hardly any memory left, so the run is ended."""


class _Guard(Watcher):
    """Passes a run's steps on, and ends it before the machine runs out of memory."""

    def __init__(self, progress: Watcher) -> None:
        self._progress = progress

    def steps(self, done: int) -> None:
        """See `Watcher`."""
        self._progress.steps(done)
        left = available_bytes()
        if left is not None and left < LAST_RESERVE:
            raise _NoMemoryError


def _search(
    request: BatchSizeRequest, precision: str, folder: Path, progress: Watcher, command: Sequence[str]
) -> BatchSizeResult:
    """The result under one precision."""
    trials, notes, device = list[Trial](), list[str](), ""
    limit = of_cpu = request.limit if request.limit is not None else spendable_bytes()
    while (size := request.sizes.next_size(trials, limit)) is not None:
        argv = argv_with(request.argv, request.vary, size)
        child = ScriptRequest(request.target, argv, request.is_module).child(
            folder, f"{file_name(precision)}-{size}", precision, observe=True, stop_after=request.steps
        )
        runs, outcome = len(trials) + 1, "failed"
        progress.begin(f"{precision}  {_prefix(request.vary)}{size}", runs, runs, request.steps)
        try:
            finished, status = run_to_end(command, child, _Guard(progress))
            device = str(finished.machine.get("device_type", device))
            limit = of_cpu if device in ("", "cpu") else request.limit
            trial = _trial(precision, size, finished, status, limit)
            outcome = "fits" if trial.fits else f"does not fit: {trial.why}"
        except _NoMemoryError:
            trial = Trial(size, False, why="hardly any memory was left on the machine, so it was ended")
            outcome = f"does not fit: {trial.why}"
        except _FailedError as failure:
            if not trials:
                raise _first_failure(request, size, *failure.args) from None
            how, output = failure.args
            last = f": {output.splitlines()[-1].strip()}" if output else ""
            direction = "larger" if any(one.fits for one in trials) else "smaller"
            notes.append(f"no {direction} size was tried, since the script {how} at {size}{last}")
            break
        except KeyboardInterrupt:
            outcome = "stopped"
            raise
        finally:
            progress.end(outcome)
        if limit is None and device in ("", "cpu"):
            raise UsageError(
                "this system does not say how much memory is available: give --limit, such as --limit 8GiB"
            )
        trials.append(trial)
    if unchanging(trials):
        sizes = [one.size for one in trials]
        raise UsageError(
            f"{request.target} takes the same bytes at every size from {min(sizes)} to {max(sizes)}, so "
            f"{request.vary} does not seem to be its batch size. If it is, give a larger --start, such as {max(sizes)}."
        )
    return request.sizes.result(trials, limit, device or "cpu", notes)


def _trial(precision: str, size: int, finished: FinishedRun, status: int, limit: int | None) -> Trial:
    """The trial that a run's records and exit status make; _FailedError if the script fails or takes too few steps."""
    if status:
        output = finished.failure()
        last = output.splitlines()[-1]
        if status == -9:
            return Trial(size, fits=False, why="killed by the system, most likely for its memory")
        if says_out_of_memory(output):
            return Trial(size, fits=False, why=OUT_OF_MEMORY)
        if status == 2 and last.startswith("mezzo: ") and not finished.losses:
            raise UnsupportedPrecisionError(f"{precision} can't run: {last.removeprefix('mezzo: ')}")
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        raise _FailedError(how, output)
    if finished.memory is None:
        notes = finished.ended.notes if finished.ended else ()
        reasons = "; ".join(note for note in notes if "no step was observed" not in note)
        how = f"ended after {finished.steps} steps, and memory is measured in step {MEASURED}"
        raise _FailedError(how + (f" ({reasons})" if reasons else ""), "")
    peak, times = finished.memory.peak_bytes, finished.times()
    if limit is not None and peak > limit:
        return Trial(size, fits=False, peak_bytes=peak, why=OVER)
    return Trial(size, True, peak, float(np.median(times)) if len(times) else None)


def _first_failure(request: BatchSizeRequest, size: int, how: str, output: str) -> MezzoError:
    """The error for a script that fails at its first size."""
    if request.vary.strip("-=") in output and any(text in output for text in NO_SUCH_OPTION):
        return UsageError(
            f"{request.target} does not take '{_prefix(request.vary)}{size}'. Give --vary= the option of its batch "
            f"size as the script spells it. Its output ended:\n{output}"
        )
    script = f"{request.target} {' '.join(argv_with(request.argv, request.vary, size))}"
    if output:
        return ScriptError(f"{script} {how}. Its output ended:\n{output}")
    return ScriptError(f"{script} {how}. Let it train for longer: more epochs, or a smaller --start.")
