"""Paired TOST (two one-sided tests) with a fixed margin: equivalent if the 90 % interval of the mean difference lies
within it. A margin derived from the measured noise would say "equivalent" far too often (docs/compare.md has figures).

Source: Schuirmann, J. Pharmacokinet. Biopharm. 15, 657 (1987); the power is exact for normal differences.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

CONFIDENCE = 0.90
"""Of the two-sided interval. TOST at 5 % a side reads this one."""
_LEVEL = 1 - (1 - CONFIDENCE) / 2

POWER = 0.80
"""The power that `pairs_needed` plans for."""

MOST_PAIRS = 10_000

FAR = 6.0
"""Withholds `equivalent` from under 3 % of equivalent normal differences (four or more pairs)."""

Floats = NDArray[np.float64]


@functools.lru_cache(maxsize=4096)
def t_quantile(level: float, freedom: int) -> float:
    """Student's t quantile: the x with P(T <= x) = `level`."""
    return float(special.stdtrit(freedom, level))


def paired_interval(differences: ArrayLike, confidence: float = CONFIDENCE) -> tuple[Floats, Floats]:
    """The two-sided t interval of the mean of two or more differences (else ValueError), along the last axis.

    Equals ``mean -+ t(1 - (1 - confidence) / 2, n - 1) * std(ddof=1) / sqrt(n)``; NaN for a NaN or an infinity.
    """
    d: Floats = np.asarray(differences, dtype=np.float64)
    n = d.shape[-1]
    if n < 2:
        raise ValueError(f"an interval needs at least two differences, not {n}")
    half = t_quantile(1 - (1 - confidence) / 2, n - 1) * d.std(axis=-1, ddof=1) / np.sqrt(n)
    mean = d.mean(axis=-1)
    return mean - half, mean + half


@functools.lru_cache(maxsize=1024)
def _spread_quantiles(freedom: int) -> Any:
    """256 equally likely values of s / sigma: midpoints of the chi distribution's quantiles."""
    u = (np.arange(256) + 0.5) / 256
    return np.sqrt(2.0 * special.gammaincinv(freedom / 2.0, u) / freedom)


def tost_power(sd: float, pairs: int, margin: float, gap: float = 0.0) -> float:
    """The chance that the interval of normal differences with mean `gap` and deviation `sd` is within the margin."""
    if pairs < 2:
        return 0.0
    if sd <= 0.0:
        return float(abs(gap) < margin)
    error = sd / np.sqrt(pairs)
    room = (margin - t_quantile(_LEVEL, pairs - 1) * error * _spread_quantiles(pairs - 1)) / error
    chances = special.ndtr(room - gap / error) - special.ndtr(-room - gap / error)
    return float(np.mean(np.maximum(chances, 0.0)))


def null_deviation(differences: Floats) -> float:
    """The deviation of the differences if their true mean is zero; a mean beyond chance counts only up to chance.

    Equals ``sqrt(mean(d * d))`` where the 90 % interval of the mean holds zero.
    """
    n = len(differences)
    variance = float(differences.var(ddof=1))
    mean = min(n * float(differences.mean()) ** 2, t_quantile(_LEVEL, n - 1) ** 2 * variance)
    return float(np.sqrt(((n - 1) * variance + mean) / n))


def estimated_power(deviation: float, pairs: int, margin: float) -> float:
    """Estimate `tost_power` at a gap of zero from `null_deviation` of that many pairs (three or more).

    This is the share of all samples with that root mean square that pass the test, so its mean over samples is the
    power (Rao and Blackwell). ``tost_power(std(d), pairs, margin)`` is biased: 33 % for 13 %, 3 pairs, 1 margin.
    """
    n, t = pairs, t_quantile(_LEVEL, pairs - 1)
    u = (np.arange(256) + 0.5) / 256
    of_mean = special.betaincinv(0.5, (n - 1) / 2, u)  # the mean's share of the sum of squares
    ends = deviation * (np.sqrt(of_mean) + t * np.sqrt((1 - of_mean) / (n - 1)))
    return float(np.mean(ends < margin))


def far_outside(harms: Floats, margin: float) -> bool:
    """Whether one pair's harm is beyond the margin, and above the median by `FAR` robust deviations (1.4826 MAD)."""
    away = harms - np.median(harms)
    return bool(np.any((harms > margin) & (away > FAR * 1.4826 * np.median(np.abs(away)))))


def failure_rate_bound(pairs: int) -> float:
    """The share of seeds that may fail though none of `pairs` did (95 % confidence)."""
    return float(1.0 - 0.05 ** (1.0 / pairs))


def pairs_needed(sd: float, margin: float, power: float = POWER) -> int | None:
    """The fewest pairs (three or more) whose TOST has that power when the gap is zero; None above 10,000."""
    counts = range(3, MOST_PAIRS + 1)
    found = bisect_left(counts, True, key=lambda pairs: tost_power(sd, pairs, margin) >= power)
    return counts[found] if found < len(counts) else None


def planned(differences: Floats, margin: float) -> tuple[float, int | None]:
    """The estimated power of these pairs (three or more), and the pairs needed; the two agree on whether to add."""
    n, deviation = len(differences), null_deviation(differences)
    power, needed = estimated_power(deviation, n, margin), pairs_needed(deviation, margin)
    return power, min(needed, n) if needed is not None and power >= POWER else needed
