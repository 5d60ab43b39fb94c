"""The life cycle of a run, whichever framework the script trains with: what comes before, around and after it.

In the script's surroundings each part of the run is installed. The script runs. The parts are removed, the latest
first. The run's own end follows, and the journal's. At last the user's mistake is raised, or the summary printed;
where the script ends by an exception, before its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mezzo.core.errors import MezzoError
from mezzo.core.records import RunStarted
from mezzo.scripts import script
from mezzo.scripts.journal import Journal, now_text
from mezzo.scripts.request import RunRequest


class Part(Protocol):
    """What a run changes in this process."""

    def install(self) -> None:
        """Change it from now on."""

    def remove(self) -> None:
        """Put it back; called also where `install` came half way, or was never reached."""


class Session(Protocol):
    """What any run knows of itself."""

    @property
    def request(self) -> RunRequest:
        """What was asked for."""

    @property
    def journal(self) -> Journal:
        """What has happened so far."""

    @property
    def fatal(self) -> MezzoError | None:
        """The user's mistake that only a line of the script could show; None where there is none."""


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
