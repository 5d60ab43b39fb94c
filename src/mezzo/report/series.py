"""Curves made drawable: aligned, smoothed by a declared window, thinned by extremes so that no spike is lost. A value
that is not finite is a gap (NaN), and is reported apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

BUCKETS = 240


def align(runs: Sequence[Array]) -> Array:
    """Losses of several runs as one array (runs, steps); a run that ended early is NaN from there on."""
    steps = max((len(run) for run in runs), default=0)
    aligned = np.full((len(runs), steps), np.nan)
    for row, run in zip(aligned, runs):
        row[: len(run)] = run
    return aligned


def window_for(steps: int) -> int:
    """The odd number of steps to average over in a curve of so many steps: 1 below 120, at most 501."""
    return min(501, max(0, steps // 60) // 2 * 2 + 1)


def smooth(values: Array, window: int) -> Array:
    """Centred mean over ``window`` steps along the last axis; NaN or inf stays a gap where it stood.

    Equals ``[v[i-h : i+h+1][isfinite].mean()]`` with ``h = min(window // 2, i, n - 1 - i)``.
    """
    n = values.shape[-1]
    ok = np.isfinite(values)
    if window <= 1 or n == 0:
        return np.where(ok, values, np.nan)
    steps = np.arange(n)
    half = np.minimum(window // 2, np.minimum(steps, n - 1 - steps))
    edges = np.stack([steps - half, steps + half + 1], axis=1).ravel()

    def sums(part: Array) -> Array:
        # Each window is summed by itself: differences of one running sum would cancel once a loss explodes.
        padded = np.concatenate([part, np.zeros((*part.shape[:-1], 1))], axis=-1)
        return np.asarray(np.add.reduceat(padded, edges, axis=-1)[..., ::2])

    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        means = sums(np.where(ok, values, 0.0)) / sums(ok.astype(float))
    return np.where(ok & np.isfinite(means), means, np.nan)


def band(rows: Array) -> tuple[Array, Array, Array]:
    """Minimum, mean and maximum over the first axis (runs), gaps left out; NaN where none is finite."""
    ok = np.isfinite(rows)
    kept = np.where(ok, rows, np.nan)
    number = ok.sum(axis=0)
    mean = np.where(ok, rows, 0.0).sum(axis=0, initial=0.0) / np.where(number > 0, number, np.nan)
    return np.fmin.reduce(kept, axis=0, initial=np.nan), mean, np.fmax.reduce(kept, axis=0, initial=np.nan)


def thin(values: Array, buckets: int = BUCKETS) -> tuple[Array, Array]:
    """Steps and values to draw: all where they fit, else the extremes of each bucket in the order they came."""
    n = len(values)
    kept = np.where(np.isfinite(values), values, np.nan)
    if n <= 2 * buckets:
        return np.arange(n, dtype=float), kept
    picks: list[int] = []
    for bucket in np.array_split(np.arange(n), buckets):
        good = bucket[np.isfinite(kept[bucket])]
        ends = {int(good[kept[good].argmin()]), int(good[kept[good].argmax()])} if len(good) else {bucket[0]}
        picks += sorted(ends)
    return np.array(picks, dtype=float), kept[picks]


def thin_band(low: Array, high: Array, buckets: int = BUCKETS) -> tuple[Array, Array, Array]:
    n = len(low)
    if n <= 2 * buckets:
        return np.arange(n, dtype=float), low, high
    edges = np.linspace(0, n, buckets, endpoint=False).astype(int)
    return edges.astype(float), np.fmin.reduceat(low, edges), np.fmax.reduceat(high, edges)


def sample(steps: int, most: int) -> list[int]:
    found: list[int] = np.unique(np.linspace(0, steps - 1, min(steps, most)).round().astype(int)).tolist()
    return found
