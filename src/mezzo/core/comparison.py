"""A run's losses as a curve; and one quantity, FP32's against a candidate's, over the pairs, with its word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from mezzo.core.equivalence import Floats, far_outside, paired_interval, planned

FEWEST_FOR_TOST = 3
WIDE = 100.0  # a speed's interval whose ends differ by more than this factor is not printed
NOISE_WIDTH = 2.0
"""A run's noise floor is this many times the root mean square of what FP32 does to itself: about 95 %."""
SINGLE_PAIR_FACTOR = 10.0
"""With one or two pairs the noise has hardly a degree of freedom: only a gap ten times it is called harm."""
COARSE = 25.0
"""A harm of this many margins that can't be excluded is too coarse to call anything consistent."""
COARSE_SHARE = 0.05
"""... unless, for the loss, it is under this share of what FP32 learned, which one or two pairs never call worse."""
WINDOWS = 10
LEAST = 5


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
    """The means of ten windows of (nearly) equal length, in order; fewer windows for under fifty losses."""
    values = np.asarray(losses, dtype=np.float64)
    count = max(1, min(WINDOWS, len(values) // LEAST))
    return np.asarray([_mean(part) for part in np.array_split(values, count)], dtype=np.float64)


def _mean(values: Sequence[float] | Floats) -> float:
    return float(np.asarray(values, dtype=np.float64).mean()) if len(values) else float("nan")


class Parity(str, Enum):
    """The four words of a verdict, from best to worst."""

    EQUIVALENT = "equivalent"
    CONSISTENT = "consistent"
    INCONCLUSIVE = "inconclusive"
    DIVERGENT = "divergent"


ORDER = list(Parity)
"""From best to worst."""
_WORDS = ("proven equal", "no harm found", "too few runs to tell", "worse")
READING = {word.value: plain for word, plain in zip(ORDER, _WORDS)}
"""Each word in plain English."""


@dataclass(frozen=True)
class Comparison:
    """One quantity, FP32's against the candidate's, over the pairs, in its own units."""

    quantity: str
    baseline: float
    candidate: float
    gap: float  # candidate - FP32
    interval: tuple[float, float] | None  # the gap's 90 % interval; None with one pair
    margin: float
    ulp_noise: float | None  # of a single run: of one ulp in FP32's initial weights; None: not measured
    seed_noise: float | None  # of a single run: of another seed
    power: float | None  # the chance that so many pairs prove equivalence without a gap; None below three
    pairs_needed: int | None  # how many have 80 % of it
    resolution: float | None  # the harm that the runs cannot exclude
    parity: Parity
    why: str


def compare(
    quantity: str,
    baseline: Floats,
    candidate: Floats,
    worse: float,
    margin: float,
    ulp_gaps: list[float],
    coarse: float,
    least: float = 0.0,
) -> Comparison:
    """Judge one quantity, of which `worse` is +1 if a higher value is worse, else -1.

    With three or more pairs harm is established if the whole 90 % interval is worse than the margin; the spread between
    seeds does not excuse it: pairing has removed it. A mean harm within what one ulp does to FP32 (`ulp_gaps`) is
    inconclusive, and so is a harm of `coarse` that can't be excluded. With fewer pairs only a harm over `least` counts.
    """
    d = candidate - baseline
    n = len(d)
    enough = n >= FEWEST_FOR_TOST
    shrink = float(np.sqrt(n))
    gap = float(d.mean())
    rounding = 4 * np.finfo(np.float64).eps * float(np.abs(baseline).max())  # of the differences
    gap = 0.0 if abs(gap) <= rounding else gap
    harm = worse * gap
    ends = paired_interval(d) if n > 1 else None
    interval = (float(ends[0]), float(ends[1])) if ends is not None else None
    low, high = sorted(worse * end for end in interval) if interval else (-np.inf, np.inf)  # of the harm
    ulp = NOISE_WIDTH * float(np.sqrt(np.mean(np.square(ulp_gaps)))) if ulp_gaps else None
    # Two unrelated FP32 runs differ by sqrt(2) of one's deviation.
    seeds = NOISE_WIDTH * float(np.sqrt(2.0) * baseline.std(ddof=1)) if n > 1 else None
    noise = max((floor for floor in (ulp, seeds) if floor is not None), default=None)
    beyond = low > margin
    excused = ulp is not None and harm <= ulp / shrink
    if enough:
        harmful = beyond and not excused
        resolution: float | None = max(0.0, high)
    elif noise is not None:
        least = max(least, SINGLE_PAIR_FACTOR * max(margin, noise / NOISE_WIDTH))
        harmful = bool((worse * d > 0).all()) and harm > least
        resolution = max(0.0, harm) + noise / shrink
    else:
        harmful, resolution = False, None

    within = [
        (harm <= margin, "within the margin" if harm > -margin else "on the better side of FP32"),
        (excused, "no larger than the effect of one ulp in the initial weights on FP32"),
        (enough and low <= 0.0, "no larger than the spread of the pairs (its interval contains zero)"),
        (not enough and seeds is not None and harm <= seeds / shrink, "within FP32's spread between seeds"),
    ]
    named = next((text for holds, text in within if holds), "")
    if harmful:
        shown = f"harm is larger than the {least:.3g} that one or two pairs need to show it"
        parity, why = Parity.DIVERGENT, "harm is established" if enough else shown
    elif enough and -margin < low and high < margin:
        parity, why = Parity.EQUIVALENT, "the interval lies within the margin"
        if far_outside(worse * d, margin):
            one = f"the harm of one pair ({float((worse * d).max()):.3g}) lies far outside it"
            parity, why = Parity.CONSISTENT, f"{why}, but {one}"
    elif beyond:
        excuse = "two pairs are too few to establish harm"
        if enough:
            excuse = "a change of one ulp in the initial weights changes FP32 as much"
        parity, why = Parity.INCONCLUSIVE, f"the interval lies outside the margin, but {excuse}"
    elif resolution is not None and resolution > coarse:
        parity = Parity.INCONCLUSIVE
        why = f"the noise is too large to tell: a harm of {resolution:.3g} cannot be excluded"
    elif named:
        parity, why = Parity.CONSISTENT, f"the gap is {named}"
    else:
        parity = Parity.INCONCLUSIVE
        why = "the gap is larger than the margin and the noise, but harm is not established"
    plan: tuple[float | None, int | None] = planned(d, margin) if enough else (None, None)
    means = float(baseline.mean()), float(candidate.mean())
    return Comparison(quantity, *means, gap, interval, margin, ulp, seeds, *plan, resolution, parity, why)


def sentence(part: Comparison, plan: bool = True) -> str:
    """The comparison in words; with `plan` also the pairs that a proof would take."""
    name = part.quantity[0].upper() + part.quantity[1:]
    values = f"{name} {part.candidate:.5g} (FP32 {part.baseline:.5g})"
    where = f", 90 % interval {part.interval[0]:+.3g} to {part.interval[1]:+.3g}" if part.interval else ""
    text = f"{values}: gap {part.gap:+.3g}{where}, margin {part.margin:.3g}: {part.why}."
    if plan and part.parity in (Parity.CONSISTENT, Parity.INCONCLUSIVE):
        if part.power is None:
            measured = part.ulp_noise is not None or part.seed_noise is not None
            unmeasured = "" if measured else " (no noise was measured)"
            text += f" {FEWEST_FOR_TOST} or more pairs can prove equivalence{unmeasured}."
        elif part.pairs_needed is None:
            text += " No number of pairs under 10,000 would prove equivalence within this margin."
        else:
            text += f" If there is no true gap, about {part.pairs_needed} pairs would prove equivalence (80 % power)."
    return text
