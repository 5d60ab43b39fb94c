"""One run of a user's own script, whichever framework it trains with: its request, its life cycle, and the child
process that runs one request and ends as its script ended (`python -m mezzo.FRAMEWORK.run FILE`).

In the script's surroundings each part of the run is installed. The script runs. The parts are removed, the latest
first. The run's own end follows, and the journal's. At last the user's mistake is raised, or the summary printed;
where the script ends by an exception, before its traceback.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from mezzo.core.errors import MezzoError, UsageError, unknown_name
from mezzo.core.records import RunStarted
from mezzo.runner import script
from mezzo.runner.journal import Journal, now_text

_PATHS = ("records", "tensorboard", "report")


@dataclass(frozen=True)
class RunRequest:
    """One run of one unmodified script.

    Args:
        target: path of the script (or of a directory that holds a `__main__.py`), or a module's dotted name.
        argv: what the script finds in `sys.argv[1:]`.
        is_module: whether `target` is a module's name, as after `python -m`.
        policy: a preset, a short string, or the path of a `.toml` file.
        records: file for the run's records (JSON lines); None writes none.
        seed_offset: None leaves every seed alone. k >= 0 adds k to every seed that the script gives, and
            seeds what it does not seed; see `mezzo.runner.seeds`.
        nudge: move the FP32 weights by one unit in the last place before the first step.
        observe: watch one early step for its peak memory and the formats of its ops.
        summary: print a short account to stderr at the end.
        watch: look at the exponents of weights, activations, gradients and updates at every so many updates of each
            optimizer; 0 never, -1 at the default interval (`mezzo.pytorch.monitor.ranges`).
        trace: where the policy has a loss scale, look into each skipped step for where its NaN or infinity came from.
        stop_after: end the script after so many updates of its first optimizer, as by `SystemExit(0)` from within its
            step; None lets it end by itself.
        tensorboard: folder for the records as TensorBoard events, beside those of `records`; None writes none.
        sensitivity: measure the sensitivity of each module in a few steps (`mezzo.pytorch.sensitivity`).
        watch_all: look at what every module returns, those too that have children and no parameters of their own.
        report: page that the caller makes of the records afterwards; where the script fails, its path is
            printed before the traceback.

    Raises:
        UsageError: a number out of range.
    """

    target: str
    argv: tuple[str, ...] = ()
    is_module: bool = False
    policy: str = "auto"
    records: Path | None = None
    seed_offset: int | None = None
    nudge: bool = False
    observe: bool = False
    summary: bool = True
    watch: int = 0
    trace: bool = True
    stop_after: int | None = None
    tensorboard: Path | None = None
    sensitivity: bool = False
    watch_all: bool = False
    report: Path | None = None

    def __post_init__(self) -> None:
        if self.seed_offset is not None and self.seed_offset < 0:
            raise UsageError(f"seed_offset is {self.seed_offset}: give None, or a number of 0 or more")
        if self.watch < -1:
            raise UsageError(f"watch is {self.watch}: give 0 (never), a number of updates, or -1 (default)")
        if self.stop_after is not None and self.stop_after < 1:
            raise UsageError(f"stop_after is {self.stop_after}: give None, or a number of 1 or more")

    def to_json(self) -> str:
        """The request as one line of JSON."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> RunRequest:
        """The request that `to_json` wrote.

        Raises:
            UsageError: the text is no request, or holds a key that no request has.
        """
        try:
            data = json.loads(text)
            names = {f.name for f in fields(cls)}
            for key in data:
                if key not in names:
                    raise unknown_name("key", key, names, where="run request: ")
            data["argv"] = tuple(data.get("argv", ()))
            data.update({name: Path(data[name]) if data.get(name) else None for name in _PATHS})
            return cls(**data)
        except (json.JSONDecodeError, TypeError, AttributeError) as error:
            raise UsageError(f"not a run request: {text[:80]!r} ({error})") from error


class StepWatch:
    """Observes one early step of a run: from the end of the second update that moved to the end of the next one of the
    same optimizer. The first steps allocate the optimizer's state and compile; that step is like all later ones.

    The updates in between are marked as observed: watching costs time, and no timing may use them.

    Args:
        wanted: whether a step is to be observed at all.
        begin: begins to observe; what it returns ends that, told whether to keep what was seen.
    """

    def __init__(self, wanted: bool, begin: Callable[[], Callable[[bool], None]]) -> None:
        self._wanted = wanted
        self._begin = begin
        self._moved: dict[int, int] = {}
        self._optimizer = 0
        self._stop: Callable[[bool], None] | None = None

    @property
    def running(self) -> bool:
        """Whether a step is being observed now."""
        return self._stop is not None

    def after_update(self, optimizer: int, *, moved: bool) -> None:
        """An update of the optimizer with this number is over."""
        if not self._wanted:
            return
        if self._stop is not None:
            if optimizer == self._optimizer:
                self._end(keep=moved)
                self._wanted = not moved
                if not moved:  # the next update may be looked into, and the one after it is observed
                    self._moved[optimizer] = 1
        elif moved:
            self._moved[optimizer] = self._moved.get(optimizer, 0) + 1
            if self._moved[optimizer] == 2:
                self._optimizer, self._stop = optimizer, self._begin()

    def finish(self, journal: Journal, *, told: bool) -> None:
        """The script is over; where no step was observed and it is to be told, a note says so."""
        self._end(keep=False)
        if self._wanted and told:
            journal.note("no step was observed (memory, formats): the script ended before its third update")

    def _end(self, *, keep: bool) -> None:
        if self._stop is not None:
            stop, self._stop = self._stop, None
            stop(keep)


class Part(Protocol):
    """What a run changes in this process."""

    def install(self) -> None:
        """Change it from now on."""

    def remove(self) -> None:
        """Put it back; called also where `install` came half way, or was never reached."""


class Session(Protocol):
    """What any run knows of itself.

    Attributes:
        request: what was asked for.
        journal: what has happened so far.
        fatal: the user's mistake that only a line of the script could show; None where there is none.
    """

    request: RunRequest
    journal: Journal
    fatal: MezzoError | None


def run(
    session: Session,
    target: script.Target,
    parts: Sequence[Part],
    *,
    finish: Callable[[int], None],
    summary: Callable[[bool], str],
) -> int:
    """Run a script as `python SCRIPT ARGS...` would, with the parts of the run around it; its exit status.

    A script that raises has its traceback printed, and gives status 1; after an interrupt the status is 130.

    Args:
        session: of this run.
        target: the script.
        parts: installed in this order.
        finish: told the exit status once all parts are removed: the last that the journal hears before it ends.
        summary: given whether the script failed, the lines that end a run, if the request wants them; may be empty.

    Raises:
        MezzoError: `session.fatal`, of which nothing else was printed.
    """
    status = 1
    request, printed = session.request, False

    def account(error: BaseException | None = None) -> bool:
        nonlocal printed
        if session.fatal is None and request.summary and not printed:
            printed = True
            failed = error is not None or status != 0
            if text := summary(failed):
                named = failed and request.report is not None
                sys.stdout.flush()
                print(text + (f"\nmezzo: report: {request.report}" if named else ""), file=sys.stderr)
        return error is not session.fatal

    with script.surroundings(target, request.argv) as namespace:
        try:
            for part in parts:
                part.install()
            status = script.execute(target, namespace, account)
        finally:
            for part in reversed(parts):
                part.remove()
            finish(status)
            session.journal.end(status)
    if session.fatal is not None:
        raise session.fatal
    account()
    return status


def started(request: RunRequest, policy: str, machine: dict[str, Any]) -> RunStarted:
    """The record that begins a run.

    Args:
        request: what was asked for.
        policy: as it turned out to be: `auto` has chosen.
        machine: what it runs on, as the framework describes it; empty where the script never imported one.
    """
    return RunStarted(
        script=request.target,
        argv=list(request.argv),
        policy=policy,
        seed_offset=request.seed_offset or 0,
        nudged=request.nudge,
        machine=machine,
        started=now_text(),
    )


PARENT = "MEZZO_PARENT"
"""Environment variable: the id of the process that waits for this one."""


def main(words: list[str], run: Callable[[RunRequest], int], module: str) -> int:
    """Read the request, run it, return its status; 2 for a request that can't be run.

    Args:
        words: of the command line.
        run: what runs a request of that framework.
        module: its name, for the usage line.
    """
    if len(words) != 1:
        print(f"usage: python -m {module} REQUEST.json", file=sys.stderr)
        return 2
    if int(os.environ.pop(PARENT, 0)) not in (0, os.getppid()):
        return 2  # the parent was killed while this process started
    try:
        return run(RunRequest.from_json(Path(words[0]).read_text(encoding="utf-8")))
    except (MezzoError, OSError) as error:
        print(f"mezzo: {error}", file=sys.stderr)
        return 2
