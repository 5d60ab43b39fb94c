"""One run of a user's own script, in any framework: its request, its life cycle, its child process."""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from mezzo.core.commands import run_command, say
from mezzo.core.errors import MezzoError, UsageError
from mezzo.core.records import RecordWriter, RunStarted
from mezzo.runner import children, script
from mezzo.runner.journal import Journal, of_rank

_PATHS = ("records", "tensorboard", "report")


@dataclass(frozen=True)
class RunRequest:
    """One run of one unmodified script."""

    target: str  # path of the script (or of a directory with a `__main__.py`), or a module's dotted name
    argv: tuple[str, ...] = ()  # the script's `sys.argv[1:]`
    is_module: bool = False  # whether `target` is a module's name, as after `python -m`
    policy: str = "auto"  # a preset, a short string, or the path of a `.toml` file
    records: Path | None = None  # file for the run's records (JSON lines)
    seed_offset: int | None = None  # k >= 0 adds k to every seed of the script; None leaves them alone
    nudge: bool = False  # move the FP32 weights by one unit in the last place before the first step
    observe: bool = False  # measure the peak memory and the formats of one early step
    summary: bool = True  # print a short account to stderr at the end
    watch: int = 0  # updates of each optimizer between two histograms; 0 never, -1 the default interval
    trace: bool = True  # with a loss scale: find the origin of each skipped step's NaN or infinity
    stop_after: int | None = None  # end the script after so many updates of its first optimizer
    tensorboard: Path | None = None  # folder for the records as TensorBoard events
    sensitivity: bool = False  # measure the sensitivity of each module in a few steps
    ranked: tuple[str, ...] = ()  # the formats of that; () for the default ones
    watch_all: bool = False  # histograms of every module's outputs, also of those that only contain others
    apex: bool = False  # `import apex` gives Mezzo's modules
    report: Path | None = None  # page that the caller makes afterwards, named before a traceback
    # The script's own mixed precision: keep (Mezzo stands back), off, record (keep it, and record the run), or refuse
    # (end the script at the first use).
    own: str = "keep"
    masters: str = ""  # the masters that 16-bit weights of the script's get, under its own optimizers
    # Module patterns of other runs' policies; the first model call checks them.
    patterns: tuple[str, ...] = ()
    nproc: int = 0  # the ranks of the torchrun that started this run; 0 without one
    source: str | None = None  # the code, where `target` is -c, or - for standard input

    def to_json(self) -> str:
        """The request as one line of JSON."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> RunRequest:
        """The request that `to_json` wrote; UsageError if the text is not a request."""
        try:
            data = json.loads(text)
            data.update({name: tuple(data.get(name, ())) for name in ("argv", "patterns")})
            data.update({name: Path(data[name]) if data.get(name) else None for name in _PATHS})
            return cls(**data)
        except (json.JSONDecodeError, TypeError, AttributeError) as error:
            raise UsageError(f"not a run request: {text[:80]!r} ({type(error).__name__}: {error})") from error


class StepWatch:
    """Observes one early step: after the second update that moved, to the next of that optimizer."""

    def __init__(self, wanted: bool, begin: Callable[[], Callable[[bool], None]]) -> None:
        # `begin` returns a function that ends it, and is given whether to keep the measurement.
        self.wanted = wanted  # whether a step is still to be observed
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
        if not self.wanted:
            return
        if self._stop is not None:
            if optimizer == self._optimizer:
                self._end(keep=moved)
                self.wanted = not moved
                if not moved:  # the next update may be looked into, and the one after it is observed
                    self._moved[optimizer] = 1
        elif moved:
            self._moved[optimizer] = self._moved.get(optimizer, 0) + 1
            if self._moved[optimizer] == 2:
                self._optimizer, self._stop = optimizer, self._begin()

    def finish(self, journal: Journal, *, told: bool) -> None:
        """The script is over; if no step was observed, a note says so where `told`."""
        self._end(keep=False)
        if self.wanted and told:
            journal.note("memory and formats were not measured: fewer than three updates moved the weights")

    def _end(self, *, keep: bool) -> None:
        if self._stop is not None:
            stop, self._stop = self._stop, None
            stop(keep)


class Part(Protocol):
    """What a run changes in this process; `remove` is also called where `install` failed or was not reached."""

    def install(self) -> None: ...  # noqa: D102

    def remove(self) -> None: ...  # noqa: D102


class Session(Protocol):
    """The state of any run; `fatal` is the user's mistake that only a line of the script could show."""

    request: RunRequest
    journal: Journal
    left_alone: str | None  # why Mezzo changes nothing, if so
    fatal: MezzoError | None


def run(
    session: Session,
    target: script.Target,
    parts: Sequence[Part],
    *,
    finish: Callable[[int], None],  # gets the status once the parts are removed
    summary: Callable[[bool], str],  # gets whether the script failed; its lines come before a traceback
    # The user's mistake that a process started by the script found.
    in_child: Callable[[], MezzoError | None] = lambda: None,
) -> int:
    """Run a script as `python SCRIPT ARGS...` would, with these parts installed; its exit status. Raises `fatal`."""
    status = 1
    request, printed = session.request, False
    children.leave()

    def account(error: BaseException | None = None) -> bool:
        nonlocal printed
        if session.fatal is None and (fatal := in_child()):
            session.fatal = fatal
            return False
        if session.fatal is None and request.summary and not printed:
            printed = True
            failed = error is not None or status != 0
            if text := "\n".join(filter(None, (summary(failed), _hint(request, error)))):
                named = failed and request.report is not None
                sys.stdout.flush()
                say(text + (f"\nmezzo: report: {request.report}" if named else ""))
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
    if session.fatal is None:
        account()
    if session.fatal is not None:
        raise session.fatal
    return status


def attend(
    session: Session,
    parts: Sequence[Part],
    parent: children.Parent,
    *,
    finish: Callable[[int], None],
    summary: Callable[[bool], str],
) -> Callable[[], None]:
    """Install the parts in a process that the script of a run has started, until this process ends.

    Returns what to call where it begins to train. A process that never does prints and writes nothing.
    """
    me, began, over = os.getpid(), False, False
    show = sys.excepthook

    def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
        if error is session.fatal:
            say(f"mezzo run: {error}")
        else:
            show(kind, error, trace)

    def begin() -> None:
        nonlocal began
        atexit.unregister(end)
        atexit.register(end)  # the latest is called first: before the file of the records is closed
        if not began:
            began = True
            parent.mark()
            parent.end_with()
            processes = sys.modules.get("multiprocessing.process")
            if processes is not None and processes.parent_process() is not None:
                from multiprocessing.util import Finalize

                Finalize(None, end, exitpriority=0)  # atexit is too late for the status, or is never called

    def end() -> None:
        nonlocal over
        if over or os.getpid() != me:
            return
        over, status = True, _ending()
        for part in reversed(parts):
            part.remove()
        if session.journal.losses or session.journal.updates or session.left_alone:
            finish(status)
            session.journal.end(status)
            text = summary(status != 0) if session.request.summary else ""
            if text and session.fatal is None:
                sys.stdout.flush()
                say(text)
        if session.fatal is not None:
            parent.mark(error=str(session.fatal))
        parent.leave()

    for part in parts:
        part.install()
    sys.excepthook = excepthook
    atexit.register(end)
    return begin


def _ending() -> int:
    """The status with which this process is about to end, as far as it can be known."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return int(error is not None)


def _hint(request: RunRequest, error: BaseException | None) -> str:
    """What to try where the script lacks Apex, or has one without `amp`."""
    lacks = isinstance(error, ImportError) and re.search(r"\bapex\b", f"{error.name} {error.msg}")
    if not lacks or request.apex:
        return ""
    return f"mezzo: to run it with Mezzo's apex.amp: {run_command(vars(request), '--apex')}"


def started(request: RunRequest, policy: str, machine: dict[str, Any]) -> RunStarted:
    """The first record of a run: `policy` is the one that `auto` chose."""
    now, offset = datetime.now(timezone.utc).isoformat(timespec="seconds"), request.seed_offset or 0
    return RunStarted(request.target, list(request.argv), policy, offset, request.nudge, machine, now)


def rank_here() -> int | None:
    """The rank that torchrun, or a launcher like it, gave this process; None if it gave none."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else None


def of_torchrun() -> int:
    """How many ranks torchrun started on this computer; 0 if it did not start this process."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0)) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def ranks_here() -> int:
    """How many ranks that launcher started; 1 without one, more than any where only the RANK is known."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() else 1 if rank_here() is None else sys.maxsize


PARENT = "MEZZO_PARENT"  # environment variable: the id of the process that waits for this one


def main(words: list[str], run: Callable[[RunRequest], int], module: str) -> int:
    """`python -m MODULE REQUEST.json`: run the request, return its status; 2 for a request that can't be run."""
    if len(words) != 1:
        print(f"usage: python -m {module} REQUEST.json", file=sys.stderr)
        return 2
    RecordWriter.needed = True
    parent, rank = int(os.environ.pop(PARENT, 0)), rank_here()
    if parent and rank is not None:  # torchrun's agent is in between
        children.end_with(parent)
    elif parent not in (0, os.getppid()):
        return 2  # the parent was killed while this process started
    try:
        request = RunRequest.from_json(Path(words[0]).read_text(encoding="utf-8"))
        if rank and request.records is not None:
            request = replace(request, records=of_rank(request.records, rank))
        return run(request)
    except (MezzoError, OSError) as error:
        print(f"mezzo: {error}", file=sys.stderr)
        return 2
