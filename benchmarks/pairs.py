"""The ratio of two interleaved series of timings, with its interval, as used by every benchmark."""

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


def ratio_over_processes(
    above: Sequence[Sequence[float]], below: Sequence[Sequence[float]], resamples: int = 4000
) -> Ratio:
    """The same over several processes, which differ by more than the rounds of one do.

    Whole processes are resampled, and then the rounds of each, as pairs. Of one process it is the interval over its
    rounds.

    Args:
        above: the seconds of each process, one a round.
        below: seconds of the other contender in the same rounds of the same processes.
    """
    pairs = [np.stack([np.asarray(one), np.asarray(other)]) for one, other in zip(above, below, strict=True)]
    rng = np.random.default_rng(0)
    found = np.empty(resamples)
    for number in range(resamples):
        drawn = [pairs[i] for i in rng.integers(len(pairs), size=len(pairs))]
        rounds = np.concatenate(
            [pair[:, rng.integers(pair.shape[1], size=pair.shape[1])] for pair in drawn], axis=1
        )
        found[number] = _ratio(rounds[0], rounds[1])
    whole = np.concatenate(pairs, axis=1)
    low, high = np.quantile(found, [0.025, 0.975])
    return Ratio(float(_ratio(whole[0], whole[1])), float(low), float(high))
