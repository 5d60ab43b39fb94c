"""Progress of child runs: a bar on a terminal, one line per run in a pipe, or nothing."""

from __future__ import annotations

import os
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from mezzo.core.commands import folded


def tell(console: Console, text: str, style: str = "") -> None:
    """Print a text on a console as `mezzo.core.commands.say` does."""
    text = folded(text, console.width if console.is_terminal else None)
    console.print(Text(text, style), soft_wrap=True)


class Watcher:
    """Shows each run as it begins, advances and ends; without a console, or if `quiet` in a pipe, it prints nothing."""

    _bar: Progress | None = None
    _task: TaskID | None = None

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self._console = console if console is None or console.is_terminal or not quiet else None
        self._seconds: list[float] = []  # of each finished run
        # JPY_PARENT_PID: a command in a notebook cell, which would keep every frame of a bar.
        if console is not None and console.is_terminal and "JPY_PARENT_PID" not in os.environ:
            text = TextColumn("{task.description}", markup=False)
            columns = BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()
            self._bar = Progress(text, *columns, console=console)

    def __enter__(self) -> Watcher:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, name: str, index: int, runs: int, steps: int | None) -> None:
        """Run number `index` (from 1) of `runs` (0: unknown) begins; `steps` is its expected length, if known."""
        self._name = f"[{index}{f'/{runs}' * (runs > 0)}] {name}"
        self._since, self._to_come = time.monotonic(), max(0, runs - index)
        if self._bar is not None:
            left = self._left(self._to_come and self._to_come + 1)
            self._task = self._bar.add_task(f"{self._name}{left}", total=steps)

    def steps(self, done: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done)

    def end(self, outcome: str, *, goes_on: bool = True) -> None:
        """The run is over; `goes_on`: the others may follow, so show the time left."""
        if self._console is None:
            return
        seconds = time.monotonic() - self._since
        self._seconds.append(seconds)
        if self._bar is None:
            left = self._left(self._to_come if goes_on else 0)
            self.say(f"{self._name}: {outcome}, {seconds:.1f} s{left}")
        elif self._task is not None:
            done = self._bar.tasks[self._task].completed
            self._bar.update(self._task, description=f"{self._name}: {outcome}", total=max(done, 1))
            self._bar.stop_task(self._task)
            self._task = None

    def _left(self, runs: int) -> str:
        """The estimated time of so many more runs, as the end of a line; empty before the first run has ended."""
        if not self._seconds or not runs:
            return ""
        seconds = round(runs * sum(self._seconds) / len(self._seconds))
        return f"; about {f'{round(seconds / 60)} min' if seconds >= 60 else f'{seconds} s'} left"

    def say(self, text: str) -> None:
        if self._console is not None:
            tell(self._console, text)
