"""Experiments run one after another; each leaves its files when it is over, whatever becomes of the next.

Nothing here prints: a watcher is told what goes on, and the caller is given what came of it.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mezzo.reproduce import expected, figures, load, outputs
from mezzo.reproduce.experiment import Effort, Experiment


class Watcher(Protocol):
    """Told of every experiment as it begins, goes on and ends."""

    def begin(self, name: str, index: int, count: int) -> None:
        """Experiment number `index` (from 1) of `count` begins."""

    def stage(self, words: str, share: float) -> None:
        """What it does now, and how much of it is done."""

    def end(self, result: Result) -> None:
        """It is over."""


@dataclass(frozen=True)
class Result:
    """What came of one experiment.

    Args:
        name: the experiment's.
        record: what ``numbers.json`` holds; None if it crashed.
        reason: the error in a line, if it crashed, or if only its figure could not be drawn.
        trace: the error in full.
    """

    name: str
    record: dict[str, Any] | None
    reason: str = ""
    trace: str = ""

    @property
    def lost(self) -> tuple[str, ...]:
        """Findings that should be shown and don't hold any more, or were not spoken of."""
        if self.record is None:
            return ()
        found = self.record["findings"]
        return tuple(one["name"] for one in found if one["fate"] == "lost") + tuple(self.record["missing"])

    @property
    def passed(self) -> bool:
        """Whether it ran to its end and all that should be shown was."""
        return self.record is not None and not self.reason and not self.lost


def run_all(
    names: Sequence[str],
    folder: Path,
    watcher: Watcher,
    *,
    quick: bool,
    find: Callable[[str], Experiment] = load,
    table: dict[str, dict[str, expected.Expected]] | None = None,
) -> list[Result]:
    """Run the experiments, and write each one's files and the index as it ends.

    Args:
        names: which, in this order.
        folder: where they are written; it exists.
        watcher: is told.
        quick: the small size.
        find: from a name to its experiment.
        table: what is expected; the packaged table, unless one is given.

    Raises:
        UsageError: a file can't be written.
        KeyboardInterrupt: the files of what was over by then are there, and the index.
    """
    table = expected.read() if table is None else table
    results: list[Result] = []
    for index, name in enumerate(names, 1):
        watcher.begin(name, index, len(names))
        result = _run(name, find, folder, watcher, table, quick=quick)
        results.append(result)
        outputs.write_index(folder, {one.name: one.reason for one in results if one.record is None})
        watcher.end(result)
    return results


def _run(
    name: str,
    find: Callable[[str], Experiment],
    folder: Path,
    watcher: Watcher,
    table: dict[str, dict[str, expected.Expected]],
    *,
    quick: bool,
) -> Result:
    """Run one experiment. What it raises is its result and not ours, so that the others go on."""
    import torch

    effort = Effort(quick=quick, report=watcher.stage)
    began = time.monotonic()
    try:
        experiment = find(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # which other experiments ran before must not matter
            outcome = experiment.run(effort)
        record = outputs.record_of(
            experiment,
            outcome,
            effort.name,
            table.get(name, {}).get(effort.name, expected.Expected()),
            seconds=time.monotonic() - began,
        )
    except Exception as error:
        return Result(name, None, *_told(error))
    reason = trace = ""
    drawn: dict[str, bytes] = {}
    try:
        drawn = figures.draw(experiment, record["numbers"])
    except Exception as error:  # the numbers may have taken an hour
        reason, trace = _told(error)
        reason = f"its figure could not be drawn: {reason}"
    outputs.write_experiment(folder / name, record, drawn)
    return Result(name, record, reason, trace)


def _told(error: Exception) -> tuple[str, str]:
    return f"{type(error).__name__}: {error}", traceback.format_exc()
