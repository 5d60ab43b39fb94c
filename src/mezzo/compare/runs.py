"""One training run in a child process: started, watched, ended with this one; and what it left, read back.

A child writes into a separate folder. Its files get their final names after it has ended, so a process that outlives
its parent cannot write into the files of a later run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from types import FrameType
from typing import Any

import numpy as np

from mezzo.compare.measure import Floats, Metric, Phases, Reading, step_times
from mezzo.compare.progress import Watcher
from mezzo.core import records
from mezzo.core.verdict import RunResult
from mezzo.runner.lifecycle import PARENT, RunRequest

LAUNCH = (sys.executable, "-m", "mezzo.pytorch.run")
"""What runs a request; the request's file is its one argument."""

POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0

ATTEMPT = ".attempt-"
"""Prefix of the folder in `runs/` that one attempt writes into; `folder.locked` deletes abandoned ones."""

# Standard input ends when the parent does, also by SIGKILL. One byte before that says that the child has ended.
_GUARD = "import os, sys\nif not sys.stdin.buffer.read(1): os.killpg(int(sys.argv[1]), 9)"


def run_child(
    command: Sequence[str], request: RunRequest, on_steps: Callable[[int], None] = lambda _: None
) -> int:
    """Run ``command REQUEST.json`` to its end; return its exit status (negative: killed by that signal).

    The child has its own session, which ends with an interrupt, and by a guard process if this process is killed.
    """
    assert request.records is not None
    asked = request.records.with_suffix(".request.json")
    asked.write_text(request.to_json(), encoding="utf-8")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", PARENT: str(os.getpid())}
    steps = _steps_so_far(request.records)
    with request.records.with_suffix(".log").open("wb") as output:
        words = [*command, str(asked)]
        child = subprocess.Popen(
            words, stdin=DEVNULL, stdout=output, stderr=STDOUT, env=environment, start_new_session=True
        )
        guard = None
        try:
            words = [sys.executable, "-I", "-S", "-c", _GUARD, str(child.pid)]
            guard = subprocess.Popen(words, stdin=PIPE, stderr=DEVNULL, start_new_session=True)
            status = None
            while status is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = child.wait(POLL_SECONDS)
                on_steps(next(steps))
            return status
        finally:
            _end(child)
            if guard is not None:
                guard.communicate(b"x")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and its whole session, if it still runs."""
    if child.poll() is not None:
        return
    for number, patience in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)
            return


_UPDATE = re.compile(rb'{"kind": "update".*?"optimizer": (\d+),')


def _steps_so_far(path: Path) -> Iterator[int]:
    """The steps in a file of records that grows, counted at each `next`, which reads each byte once."""
    at = losses = 0
    phases = Phases()
    while True:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(at)
            for line in file:
                if line.endswith(b"\n"):  # only the last can lack it
                    at += len(line)
                    losses += line.startswith(b'{"kind": "loss"')
                    if update := _UPDATE.match(line):
                        phases.add(int(update[1]))
        yield phases.steps or losses


@contextlib.contextmanager
def terminated_like_an_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that no child is left behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# What torchrun logs where a rank has failed, after that rank's own output; its summary has the exit status.
LAUNCHER = re.compile(r"E\d{4} \d\d:\d\d:\d+\.\d+ +\d+ torch/distributed/")
ROOT_CAUSE = re.compile(r"Root Cause.*?exitcode +: (-?\d+)", re.DOTALL)
TRACEBACK = "Traceback (most recent call last):"
MOST_LINES = 60
# What TensorFlow's libraries log while they start: `I0000 00:00:1795329464.717600   21560 port.cc:153] oneDNN ...`.
CHATTER = re.compile(
    r"WARNING: All log messages before absl::InitializeLog|[IW]\d{4} \d\d:\d\d:\d+\.\d+ +\d+ \S+:\d+\] "
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IW] (?:tensorflow|external)/"
    r"|To enable the following instructions: .* rebuild TensorFlow"
)
RERUNS = re.compile(r"closure run again (\d+) times")  # a reason of mezzo.pytorch.run.optimizers
SOME_LAYERS = re.compile(r" in \d+ linear layers?: ")  # a note of mezzo.pytorch.autocast.modules


@dataclass(frozen=True)
class FinishedRun:
    """`runs/NAME.jsonl` and `runs/NAME.log`. `ended` is None for a run that was killed or never began."""

    name: str
    started: records.RunStarted | None
    losses: tuple[records.LossRecord, ...]
    updates: tuple[records.UpdateRecord, ...]
    memory: records.MemoryRecord | None
    ended: records.RunEnded | None
    log: Path
    overflows: tuple[records.OverflowRecord, ...] = ()

    @property
    def succeeded(self) -> bool:
        return self.ended is not None and self.ended.status == 0

    @cached_property
    def output(self) -> str:
        try:
            return self.log.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    @property
    def said(self) -> list[str]:
        """The lines that the script printed, without those that launchers and TensorFlow's libraries log."""
        lines = self.output.rstrip().splitlines()
        end = next((at for at, line in enumerate(lines) if LAUNCHER.match(line)), None)
        return [line for line in lines[:end] if not CHATTER.match(line)]

    def metric(self, metric: Metric | None) -> Reading | None:
        """The final metric; None without a pattern or a match."""
        return metric.read(self.output) if metric else None

    def result(self, metric: Metric | None = None) -> RunResult:
        found = self.metric(metric)
        ends = [self.updates[last].at for last in self.phases.leaders.values()]
        times = [record.at for record in self.losses]
        return RunResult(
            losses=np.array([record.loss for record in self.losses], dtype=np.float64),
            ends=tuple(bisect_right(times, end) for end in ends[:-1]),
            metric=found.value if found else None,
            moved=sum(update.moved for update in self.updates) if self.updates else None,
            skipped=sum(update.skipped for update in self.updates),
            reruns=sum(int(again[1]) for update in self.updates if (again := RERUNS.match(update.reason))),
        )

    def times(self) -> Floats:
        return step_times(self.updates, self.losses)

    @property
    def machine(self) -> dict[str, Any]:
        return self.started.machine if self.started else {}

    @property
    def steps(self) -> int:
        """Updates, as `Phases` counts them; losses, if no optimizer's step was seen."""
        return self.phases.steps or len(self.losses)

    @cached_property
    def phases(self) -> Phases:
        """Which optimizers take over from one another."""
        return Phases(update.optimizer for update in self.updates)

    @property
    def notes(self) -> list[str]:
        return self.ended.notes if self.ended else []

    @property
    def own(self) -> tuple[str, str] | None:
        """The script's own mixed precision that ended the run, or made Mezzo stand back, and what to do about it."""
        for note, fix in zip(self.notes, [*self.notes[1:], ""]):
            if note.startswith(records.LEFT_ALONE):
                return note.removeprefix(records.LEFT_ALONE), fix
        return None

    @property
    def switched_off(self) -> list[str]:
        """The settings of the script that `--own off` switched off."""
        prefix = records.SWITCHED_OFF
        return [note.removeprefix(prefix) for note in self.notes if note.startswith(prefix)]

    @property
    def ran_nothing(self) -> str:
        """Why no operation ran in a format of the run's policy; empty if some did."""
        return next((note for note in self.notes if records.NOTHING_RAN in note), "")

    @property
    def in_no_layer(self) -> bool:
        """Whether no layer ran in the run's quantized format, while others may have run in 16 bits."""
        lacks = any(records.IN_NO_LAYER in note for note in self.notes)
        return lacks and not any(SOME_LAYERS.search(note) for note in self.notes)

    def refused(self, status: int) -> str:
        """Mezzo's own message if it refused the run, else "". An exit status that the records lack is Mezzo's."""
        own = self.ended is None or self.ended.status != status or not self.losses
        said = self.said[-1] if status == 2 and own and self.said else ""
        return said.removeprefix("mezzo: ") if said.startswith("mezzo: ") else ""

    def failure(self) -> str:
        """The end of the log: from its last traceback on (of ranks, the first), or its last lines."""
        lines = self.said
        starts = [i for i, line in enumerate(lines) if line.startswith(TRACEBACK)]
        start = starts[0 if ROOT_CAUSE.search(self.output) else -1] if starts else None
        kept = lines[start:] if start is not None else lines[-20:]
        if len(kept) > MOST_LINES:
            kept = [*kept[: MOST_LINES // 2], "  ...", *kept[-MOST_LINES // 2 :]]
        return "\n".join(kept) or "(it printed nothing)"


def read_run(runs: Path, name: str) -> FinishedRun:
    """Read a run's records; a run that left none has neither a start nor an end."""
    path = runs / f"{name}.jsonl"
    kept: defaultdict[str, list[Any]] = defaultdict(list)
    for record in records.read(path) if path.exists() else ():
        kept[record.kind].append(record)
    started, memory, end = ((kept[kind] or [None])[-1] for kind in ("run", "memory", "end"))
    losses, updates, overflows = (tuple(kept[kind]) for kind in ("loss", "update", "overflow"))
    return FinishedRun(name, started, losses, updates, memory, end, path.with_suffix(".log"), overflows)


def _ended_by_a_rank(path: Path, status: int) -> int:
    """The exit status of the rank that ended a run on several; rank 0's records at `path` then get its end."""
    log = path.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
    cause = ROOT_CAUSE.search(log)
    if cause is None:  # one process
        return status
    files = [path, *sorted(path.parent.glob(f"{path.stem}-rank*{path.suffix}"))]
    ends = [one for file in files if file.exists() for one in records.read(file) if one.kind == "end"]
    bad = (end for end in ends if isinstance(end, records.RunEnded) and end.status)
    end = next(bad, None) or records.RunEnded(status=int(cause[1]), seconds=0.0)
    text = path.read_bytes() if path.exists() else b""
    whole = text[: text.rfind(b"\n") + 1]  # of several ends the last one counts
    path.write_bytes(whole + records.to_line(end).encode() + b"\n")
    return int(cause[1])


def run_to_end(command: Sequence[str], request: RunRequest, told: Watcher) -> tuple[FinishedRun, int]:
    """Run a request in a child process and show its progress; return what it left, and its exit status."""
    assert request.records is not None
    final = request.records
    place = Path(tempfile.mkdtemp(prefix=ATTEMPT, dir=final.parent))
    here = replace(request, records=place / final.name)
    try:
        status = run_child(command, here, told.steps)
        if status:
            status = _ended_by_a_rank(place / final.name, status)
    except BaseException:
        told.end("stopped")
        raise
    finally:
        for suffix in (".log", ".jsonl"):  # records with an end make a finished run, so they come last
            with contextlib.suppress(FileNotFoundError):
                os.replace((place / final.name).with_suffix(suffix), final.with_suffix(suffix))
        shutil.rmtree(place, ignore_errors=True)
    run = read_run(final.parent, final.stem)
    outcome = f"killed by signal {-status}" if status < 0 else f"failed with exit status {status}"
    if run.own is not None and not run.succeeded:
        outcome = "stopped, since the script has its own mixed precision"
    elif run.refused(status):
        outcome = "stopped by Mezzo, for the reason below"
    elif run.succeeded:
        outcome = f"{run.steps} step{'s' * (run.steps != 1)}"
    told.end(outcome, goes_on=run.succeeded and not status)
    return run, status
