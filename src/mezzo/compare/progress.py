"""What the user sees while runs go on: a bar on a terminal, a line a run in a pipe, nothing where asked."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Watcher:
    """Told of every run as it begins, goes on and ends. This one says nothing."""

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to close."""

    def begin(self, name: str, index: int, runs: int, steps: int | None) -> None:
        """Run number `index` (from 1) of `runs` begins; `steps` is what it should take, if that is known."""

    def steps(self, done: int) -> None:
        """The run has done this many steps."""

    def end(self, outcome: str) -> None:
        """The run is over."""

    def say(self, text: str) -> None:
        """A line for the user."""


class Lines(Watcher):
    """A line when a run ends: for pipes and log files."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._head = ""
        self._since = 0.0

    def begin(self, name: str, index: int, runs: int, steps: int | None) -> None:
        """See `Watcher`."""
        self._head = f"[{index}/{runs}] {name}"
        self._since = time.monotonic()

    def end(self, outcome: str) -> None:
        """See `Watcher`."""
        print(f"{self._head}: {outcome}, {time.monotonic() - self._since:.1f} s", file=self._file, flush=True)

    def say(self, text: str) -> None:
        """See `Watcher`."""
        print(text, file=self._file, flush=True)


class Bar(Watcher):
    """A progress bar for the run that goes on, and a line for each that is over."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, name: str, index: int, runs: int, steps: int | None) -> None:
        """See `Watcher`."""
        self._task = self._progress.add_task(f"[{index}/{runs}] {name}".replace("[", "\\["), total=steps)

    def steps(self, done: int) -> None:
        """See `Watcher`."""
        if self._task is not None:
            self._progress.update(self._task, completed=done)

    def end(self, outcome: str) -> None:
        """See `Watcher`."""
        if self._task is not None:
            done = self._progress.tasks[self._task].completed
            self._progress.update(self._task, total=max(done, 1))
            self._progress.stop_task(self._task)
            self.say(outcome)
        self._task = None

    def say(self, text: str) -> None:
        """See `Watcher`."""
        self._progress.console.print(text, markup=False, highlight=False)


def watcher(console: Console, *, quiet: bool = False) -> Watcher:
    """A bar on a terminal, lines elsewhere; there nothing where the output is to be `quiet`."""
    if console.is_terminal:
        return Bar(console)
    return Watcher() if quiet else Lines(console.file)  # type: ignore[arg-type]
