"""One training run in a process of its own: started, watched, and never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

LAUNCH = (sys.executable, "-m", "mezzo.pytorch.launch")
"""What runs a request; the request's file is its one argument."""

POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0


def run_child(
    command: Sequence[str], log: Path, records: Path, on_steps: Callable[[int], None] = lambda _: None
) -> int:
    """Run a command to its end, its output in `log`, and return its exit status (negative: killed by that
    signal).

    The child has a session of its own, so that on an interrupt it goes with every worker it started: it is
    asked to end, and after five seconds made to. While it runs, `on_steps` is told how many steps `records`
    holds.

    Raises:
        OSError: the log can't be written, or the command can't be started.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    counter = _StepCounter(records)
    with log.open("wb") as output:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = child.wait(POLL_SECONDS)
                    on_steps(counter.count())
                    return status
                on_steps(counter.count())
        finally:
            _end(child)


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


class _StepCounter:
    """Counts the steps in a file of records that grows, reading each byte once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._updates = 0
        self._losses = 0

    def count(self) -> int:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                text = file.read()
        except FileNotFoundError:
            return 0
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        self._losses += whole.count(b'{"kind": "loss"')
        self._updates += sum(
            line.startswith(b'{"kind": "update"') and b'"optimizer": 0,' in line
            for line in whole.splitlines()
        )
        return self._updates or self._losses


@contextlib.contextmanager
def terminated_like_an_interrupt() -> Iterator[None]:
    """SIGTERM ends what is done here as Ctrl-C does, so that no child is left behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
