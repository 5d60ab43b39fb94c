"""Timings of many small tasks, taken in turn so that a machine's drift falls on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """How long a task took, in seconds, each time it ran; an empty tuple means that it could not run, for a
    reason."""

    seconds: tuple[float, ...]
    reason: str = ""

    @property
    def median(self) -> float:
        """The median of the repeats, in seconds; NaN where there are none."""
        return statistics.median(self.seconds) if self.seconds else float("nan")

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles: between these two lies the middle half of the repeats (their range, if fewer than
        four)."""
        if len(self.seconds) < 4:
            return (min(self.seconds), max(self.seconds)) if self.seconds else (float("nan"), float("nan"))
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


Task = Callable[[], object]


def take_turns(
    tasks: Sequence[Task],
    *,
    budget: float,
    synchronize: Callable[[], object],
    least: int = 3,
    most: int = 25,
    tell: Callable[[float], object] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Time every task, in turn, until the budget is spent.

    Each task first runs once untimed. A task that raises then (NotImplementedError, RuntimeError) is left
    out and its reason kept. A task that alone would take a third of the budget is timed once more and no
    further.

    Args:
        tasks: what to run; the return value is dropped.
        budget: seconds for all of them together, not counting the untimed runs.
        synchronize: waits for the device.
        least: repeats of every task whatever the budget, slow ones apart.
        most: repeats after which nothing is learnt.
        tell: is told the part that is done, from 0 to 1, now and then.
        clock: for tests.
    """
    taken: list[list[float]] = [[] for _ in tasks]
    reasons = ["" for _ in tasks]
    slow = [False for _ in tasks]
    for index, task in enumerate(tasks):
        start = clock()
        try:
            task()
            synchronize()
        except (RuntimeError, NotImplementedError, TypeError) as error:
            reasons[index] = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
        slow[index] = clock() - start > budget / 3
        tell((index + 1) / len(tasks) / 3)
    begun, spent = clock(), 0.0
    for turn in range(most):
        if turn >= least and spent >= budget:
            break
        for index, task in enumerate(tasks):
            if reasons[index] or (slow[index] and taken[index]):
                continue
            start = clock()
            task()
            synchronize()
            taken[index].append(clock() - start)
        spent = clock() - begun
        tell(1 / 3 + 2 / 3 * max(min(spent / budget, 1.0), (turn + 1) / most))
    return [Timing(tuple(seconds), reason) for seconds, reason in zip(taken, reasons)]
