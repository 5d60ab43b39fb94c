"""What the user sees while sizes are tried. Nobody knows how many there will be, so runs are counted, not measured."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from mezzo.verify.progress import Silent, Watcher


class _Lines(Silent):
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._head = ""
        self._since = 0.0

    def begin(self, name: str, index: int, runs: int, steps: int | None) -> None:
        self._head = f"run {index}: {name}"
        self._since = time.monotonic()

    def end(self, outcome: str) -> None:
        print(f"{self._head}: {outcome}, {time.monotonic() - self._since:.1f} s", file=self._file, flush=True)


class _Bar(Silent):
    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=12),
            TimeElapsedColumn(),
            TextColumn("{task.fields[outcome]}", markup=False),
            console=console,
        )
        self._task = TaskID(0)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, name: str, index: int, runs: int, steps: int | None) -> None:
        self._task = self._progress.add_task(name, total=steps, outcome="")

    def steps(self, done: int) -> None:
        self._progress.update(self._task, completed=done)

    def end(self, outcome: str) -> None:
        done = self._progress.tasks[self._task].completed
        self._progress.update(self._task, total=max(done, 1), outcome=outcome)
        self._progress.stop_task(self._task)


def watcher(console: Console) -> Watcher:
    """A bar on a terminal, lines elsewhere."""
    return _Bar(console) if console.is_terminal else _Lines(console.file)  # type: ignore[arg-type]
