"""A run's losses read as a curve: where it starts, where it ends, and its windows.

The *final loss* is the mean of the last tenth of the losses, and of no fewer than five; the *tail* is the last
fiftieth, and no fewer than five; the *start* is the mean of the first fiftieth, of no fewer than three. (All of them,
if a run recorded fewer.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WINDOWS = 10
LEAST = 5

Floats = NDArray[np.float64]


def final_count(count: int) -> int:
    """How many of `count` losses the final loss is the mean of."""
    return min(count, max(LEAST, -(-count // WINDOWS)))


def final_loss(losses: Sequence[float] | Floats) -> float:
    """The mean of the last tenth of the losses, of at least five; NaN if one is, or there is none."""
    return _mean(losses[-final_count(len(losses)) :])


def tail_loss(losses: Sequence[float] | Floats) -> float:
    """The mean of the last fiftieth, of at least five: it shows a run that diverges at the very end."""
    return _mean(losses[-max(LEAST, len(losses) // 50) :])


def start_loss(losses: Sequence[float] | Floats) -> float:
    """The mean of the first fiftieth of the losses, of at least three."""
    return _mean(losses[: max(3, len(losses) // 50)])


def window_losses(losses: Sequence[float] | Floats) -> Floats:
    """The means of ten windows of (nearly) equal length, in order; fewer windows for under fifty losses.

    NaN for a window that holds a NaN.
    """
    values = np.asarray(losses, dtype=np.float64)
    count = max(1, min(WINDOWS, len(values) // LEAST))
    return np.asarray([_mean(part) for part in np.array_split(values, count)], dtype=np.float64)


def _mean(values: Sequence[float] | Floats) -> float:
    return float(np.asarray(values, dtype=np.float64).mean()) if len(values) else float("nan")
