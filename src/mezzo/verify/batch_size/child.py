"""One size of one script: run as a process of its own until enough steps are seen, and what its records then say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mezzo.core.batch_search import OUT_OF_MEMORY, OVER, Trial
from mezzo.core.errors import MezzoError, ScriptError, UnsupportedPrecisionError, UsageError
from mezzo.core.records import file_name
from mezzo.pytorch.free_memory import available_bytes
from mezzo.pytorch.out_of_memory import says_out_of_memory
from mezzo.scripts.request import RunRequest
from mezzo.verify.batch_size.request import BatchSizeRequest
from mezzo.verify.children import attempt, run_child
from mezzo.verify.finished import FinishedRun, read_run

WATCHED = 3
"""The step whose memory is measured."""

LAST_RESERVE = 256 * 1024**2
"""A run is ended when the machine has less than this left: what comes next is swapping, or the system's own choice."""

NO_SUCH_OPTION = (
    "unrecognized arguments",
    "no such option",
    "unknown option",
    "invalid choice",
    "Could not override",
)


class FailedError(Exception):
    """The script can't run at this size, for a reason that is not memory."""


class _EnoughError(Exception):
    """The run has shown what it was run for."""


class _TightError(Exception):
    """The machine has hardly any memory left."""


def run_size(
    request: BatchSizeRequest,
    precision: str,
    size: int,
    runs: Path,
    limit: int | None,
    on_steps: Callable[[int], None],
    command: Sequence[str],
) -> tuple[Trial, str]:
    """Run the script at one size, and end it after so many steps.

    Args:
        limit: bytes that a step may take on a CPU, and anywhere if the request gives it.

    Returns:
        The trial, and the type of the device it ran on (empty where the records don't say).

    Raises:
        FailedError: the script fails, or takes fewer than three steps; the message says how.
        MezzoError: nothing of this can run under this precision.
    """
    name = f"{file_name(precision)}-{size}"
    child = RunRequest(
        target=request.target,
        argv=request.vary.argv(request.argv, size),
        is_module=request.is_module,
        policy=precision,
        records=(runs / f"{name}.jsonl").resolve(),
        observe=True,
        summary=False,
    )

    def watch(steps: int, here: Path) -> None:
        on_steps(min(steps, request.steps))
        if steps >= request.steps or (steps >= WATCHED and _is_over(read_run(here, name), request, limit)):
            raise _EnoughError
        left = available_bytes()
        if left is not None and left < LAST_RESERVE:
            raise _TightError

    status: int | None = None
    tight = False
    try:
        with attempt(child) as tried:
            assert tried.records is not None
            here = tried.records.parent
            status = run_child(command, tried, lambda steps: watch(steps, here))
    except _EnoughError:
        pass
    except _TightError:
        tight = True
    run = read_run(runs, name)
    device = str(run.machine.get("device_type", ""))
    if tight:
        trial = Trial(size, fits=False, why="hardly any memory was left on the machine, so it was ended")
    else:
        trial = _trial(request, precision, size, run, status, limit)
    return trial, device


def _is_over(run: FinishedRun, request: BatchSizeRequest, limit: int | None) -> bool:
    """Whether the step that was watched took more than it may; what a machine has left binds no GPU."""
    allowed = limit if run.machine.get("device_type", "cpu") == "cpu" else request.limit
    return allowed is not None and run.memory is not None and run.memory.peak_bytes > allowed


def _trial(
    request: BatchSizeRequest,
    precision: str,
    size: int,
    run: FinishedRun,
    status: int | None,
    limit: int | None,
) -> Trial:
    if status:
        if status == -9:
            return Trial(size, fits=False, why="killed by the system, most likely for its memory")
        if says_out_of_memory(run.failure()):
            return Trial(size, fits=False, why=OUT_OF_MEMORY)
        lines = run.failure().splitlines()
        if status == 2 and lines[-1].startswith("mezzo: ") and not run.losses:
            raise UnsupportedPrecisionError(f"{precision} can't run: {lines[-1].removeprefix('mezzo: ')}")
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        raise FailedError(f"{how}. Its output ended:\n{run.failure()}")
    if run.memory is None:
        notes = [
            note for note in (run.ended.notes if run.ended else ()) if "no step was observed" not in note
        ]
        told = f" It says: {'; '.join(notes)}." if notes else ""
        raise FailedError(f"ended after {run.steps} steps, and memory is measured in the third.{told}")
    peak = run.memory.peak_bytes
    if _is_over(run, request, limit):
        return Trial(size, fits=False, peak_bytes=peak, why=OVER)
    times = run.times()
    seconds = float(np.median(times)) if len(times) else None
    return Trial(size, fits=True, peak_bytes=peak, seconds=seconds)


def explained(request: BatchSizeRequest, size: int, failure: FailedError) -> MezzoError:
    """The error for a script that fails at its first size: what to mend."""
    argv = " ".join(request.vary.argv(request.argv, size))
    text = str(failure)
    if any(saying in text for saying in NO_SUCH_OPTION) and request.vary.spelling.strip("-=") in text:
        return UsageError(
            f"{request.target} does not take {request.vary.written(size)!r}. Give --vary= the option of its batch "
            f"size as the script spells it. Its output ended:\n{text.partition(chr(10))[2]}"
        )
    if "ended after" in text:
        return ScriptError(
            f"{request.target} {argv} {text} Let it train for longer: more epochs, or a smaller --start."
        )
    return ScriptError(f"{request.target} {argv} {text}")
