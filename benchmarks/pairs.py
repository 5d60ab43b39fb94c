"""The ratio of two interleaved series of timings, with its interval: how every benchmark says "faster"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats


@dataclass(frozen=True)
class Ratio:
    """``median(above) / median(below)`` with a 95 % percentile-bootstrap interval over paired rounds."""

    value: float
    low: float
    high: float


def _ratio(above: NDArray[np.float64], below: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.median(above, axis=axis) / np.median(below, axis=axis)
    return found


def ratio_of_medians(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Rounds are resampled as pairs, so that what slowed a whole round slows both sides of it.

    Args:
        above: seconds, one a round.
        below: seconds of the other contender in the same rounds.
    """
    pair = (np.asarray(above), np.asarray(below))
    found = stats.bootstrap(
        pair, _ratio, paired=True, method="percentile", n_resamples=4000, rng=np.random.default_rng(0)
    )
    low, high = found.confidence_interval
    return Ratio(float(_ratio(*pair)), float(low), float(high))
