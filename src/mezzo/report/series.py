"""Curves made drawable without hiding anything: aligned, smoothed by a declared window, thinned by extremes.

A run of 100,000 steps does not fit 700 pixels. Thinning keeps the smallest and the largest value of every
bucket, in the order in which they came, so no spike is lost; a value that is not finite is a gap, and is
reported apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    The window shrinks, staying centred, towards both ends: the first and last points are the values
    themselves. Equals ``[v[i-h : i+h+1][isfinite].mean()]`` with ``h = min(window // 2, i, n - 1 - i)``.
    """
    n = values.shape[-1]
    ok = np.isfinite(values)
    if window <= 1 or n == 0:
        return np.where(ok, values, np.nan)
    steps = np.arange(n)
    half = np.minimum(window // 2, np.minimum(steps, n - 1 - steps))
    start, stop = steps - half, steps + half + 1
    # Differences of one running sum would cancel once a loss explodes; each window has a sum of its own
    # instead.
    rows = np.atleast_2d(np.where(ok, values, 0.0))
    oks = np.atleast_2d(ok)
    out = np.empty_like(rows)
    for row, good, target in zip(rows, oks, out):
        held = np.concatenate(([0], np.cumsum(good)))
        number = held[stop] - held[start]
        edges = np.stack([start, stop], axis=1).ravel()
        padded = np.append(row, 0.0)
        sums = np.add.reduceat(padded, edges)[::2]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            target[:] = np.where(good & (number > 0), sums / number, np.nan)
    out[~np.isfinite(out)] = np.nan
    return out.reshape(values.shape)


@dataclass(frozen=True)
class Band:
    """Several runs as one: smallest, mean and largest over runs at each step; NaN where none is finite."""

    low: Array
    mean: Array
    high: Array


def band(rows: Array) -> Band:
    """Minimum, mean and maximum over the first axis, gaps left out."""
    if rows.shape[0] == 0 or rows.shape[1] == 0:
        empty = np.full(rows.shape[1], np.nan)
        return Band(empty, empty, empty)
    ok = np.isfinite(rows)
    number = ok.sum(axis=0)
    gap = number == 0
    low = np.where(ok, rows, np.inf).min(axis=0)
    high = np.where(ok, rows, -np.inf).max(axis=0)
    mean = (np.where(ok, rows, 0.0) / np.maximum(number, 1)).sum(axis=0)
    return Band(*(np.where(gap, np.nan, part) for part in (low, mean, high)))


def thin(values: Array, buckets: int = BUCKETS) -> tuple[Array, Array]:
    """Steps and values to draw: all where they fit, else the extremes of each bucket in the order they came.

    A bucket without a finite value gives one NaN, so that a gap stays a gap.
    """
    n = len(values)
    if n <= 2 * buckets:
        return np.arange(n, dtype=float), np.where(np.isfinite(values), values, np.nan)
    xs: list[float] = []
    ys: list[float] = []
    for bucket in np.array_split(np.arange(n), buckets):
        part = values[bucket]
        good = np.flatnonzero(np.isfinite(part))
        if not len(good):
            xs.append(float(bucket[0]))
            ys.append(float("nan"))
            continue
        picks = {int(good[np.argmin(part[good])]), int(good[np.argmax(part[good])])}
        for pick in sorted(picks):
            xs.append(float(bucket[pick]))
            ys.append(float(part[pick]))
    return np.array(xs), np.array(ys)


def thin_band(low: Array, high: Array, buckets: int = BUCKETS) -> tuple[Array, Array, Array]:
    """Steps, lower and upper edge to draw: in each bucket the lowest low and the highest high."""
    n = len(low)
    if n <= 2 * buckets:
        return np.arange(n, dtype=float), low, high
    groups = np.array_split(np.arange(n), buckets)
    lows = [_extreme(low[group], np.min) for group in groups]
    highs = [_extreme(high[group], np.max) for group in groups]
    return np.array([float(group[len(group) // 2]) for group in groups]), np.array(lows), np.array(highs)


def _extreme(part: Array, pick: np.ufunc | object) -> float:
    good = part[np.isfinite(part)]
    return float(pick(good)) if len(good) else float("nan")  # type: ignore[operator]


def first_not_finite(values: Array) -> int | None:
    """The first step whose value is NaN or infinite, or None."""
    bad = np.flatnonzero(~np.isfinite(values))
    return int(bad[0]) if len(bad) else None


def sample(steps: int, most: int) -> NDArray[np.int64]:
    """At most so many step numbers, evenly placed, first and last among them."""
    if steps <= most:
        return np.arange(steps)
    return np.unique(np.linspace(0, steps - 1, most).round().astype(np.int64))
