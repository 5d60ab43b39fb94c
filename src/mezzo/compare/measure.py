"""Step times and the final metric of a run: the speed of two precisions with its interval, the metric from the output.

A step is an update of the first optimizer, and of one that takes over from it, as in a second phase or for a second
model (a loss, if no optimizer was seen). Its time is the time since the one before. Medians are compared, because a
validation pass or another process makes a few steps long and none short.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mezzo.core.comparison import SINGLE_PAIR_FACTOR
from mezzo.core.equivalence import paired_interval
from mezzo.core.errors import UsageError
from mezzo.core.records import LossRecord, UpdateRecord
from mezzo.core.verdict import Margins

WARM_UP = 5
WARM_UP_SHARE = 0.05
FEWEST_STEPS = 5
FEWEST_FOR_SPEED = WARM_UP + FEWEST_STEPS + 1  # a time is between two steps
CONFIDENCE = 0.95

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Speed:
    """FP32's time over the candidate's with its 95 % interval; `steps` counts the candidate's timed steps."""

    speedup: float
    interval: tuple[float, float]
    steps: int

    @property
    def word(self) -> str:
        """``faster`` or ``slower`` if the interval excludes 1, else ``not told apart``."""
        low, high = self.interval
        return "faster" if low > 1.0 else "slower" if high < 1.0 else "not told apart"


class Phases:
    """Which optimizers take over from one another, from their numbers in the order of their updates.

    Those that step in turns, as a GAN's, are one phase, of the first of them.
    """

    def __init__(self, optimizers: Iterable[int] = ()) -> None:
        self._spans: dict[int, list[int]] = {}  # the first update, the last, and how many
        self._updates = 0
        for optimizer in optimizers:
            self.add(optimizer)

    def add(self, optimizer: int) -> None:
        """One more update."""
        span = self._spans.setdefault(optimizer, [self._updates, 0, 0])
        span[1:] = self._updates, span[2] + 1
        self._updates += 1

    @property
    def leaders(self) -> dict[int, int]:
        """The optimizer of each phase -> the index of its last update, in order."""
        found: dict[int, int] = {}
        end = -1
        for optimizer, (first, last, _) in self._spans.items():
            if first > end:
                found[optimizer] = end = last
        return found

    @property
    def steps(self) -> int:
        """How many updates the optimizers of the phases made."""
        return sum(self._spans[optimizer][2] for optimizer in self.leaders)


def step_times(updates: Sequence[UpdateRecord], losses: Sequence[LossRecord] = ()) -> Floats:
    """Seconds of each step, without the first five (or 5 %, if more) and those that touch an observed update."""
    leaders = Phases(update.optimizer for update in updates).leaders
    first = [update for update in updates if update.optimizer in leaders]
    watched = np.zeros(len(losses), dtype=bool)
    at = np.array([loss.at for loss in losses])
    if len(first) > 1:
        at = np.array([update.at for update in first])
        watched = np.array([update.observed for update in first])
    if len(at) < 2:
        return np.zeros(0)
    usable = ~(watched[1:] | watched[:-1])
    usable[: max(WARM_UP, int(WARM_UP_SHARE * len(at)))] = False
    times: Floats = np.diff(at)[usable]
    return times


def speed(pairs: Sequence[tuple[Floats, Floats]], perturbed: Sequence[Floats] = ()) -> Speed | None:
    """The geometric mean over pairs of ``median(FP32's times) / median(candidate's)``, with Student's t interval.

    FP32's own runs, a pair's and `perturbed`, show how the machine's speed differs between runs. With one pair nothing
    else does, and the errors of both medians add to that; with more pairs, which may agree by chance, no interval is
    narrower. None if no pair has five timed steps.
    """
    usable = [(a, b) for a, b in pairs if min(len(a), len(b)) >= FEWEST_STEPS and min(a.min(), b.min()) > 0]
    if not usable:
        return None
    ratios = np.array([np.log(np.median(a) / np.median(b)) for a, b in usable])
    middle = ratios.mean()
    measured = (np.median(times) for times in perturbed if len(times) >= FEWEST_STEPS)
    own = max((abs(np.log(np.median(usable[0][0]) / median)) for median in measured), default=0.0)
    if len(usable) > 1:
        half = max(paired_interval(ratios, CONFIDENCE)[1] - middle, 2 * own / math.sqrt(len(usable)))
    else:
        half = SINGLE_PAIR_FACTOR * own + math.hypot(*map(_error, usable[0]))
    low, high = middle - half, middle + half
    steps = sum(len(times) for _, times in usable)
    return Speed(float(np.exp(middle)), (float(np.exp(low)), float(np.exp(high))), steps)


def _error(times: Floats) -> float:
    """Half of a 95 % interval of the logarithm of a run's median, from order statistics: for any distribution."""
    reach = 0.98 / np.sqrt(len(times))
    low, high = np.quantile(np.log(times), [max(0.0, 0.5 - reach), min(1.0, 0.5 + reach)])
    return float(high - low) / 2


POINTS = 0.2
LESS_IS_BETTER = "loss error perplexity mse mae distance entropy"  # also inside a word: rmse
LESS_AS_WORDS = "err ppl nll bpc bpb wer cer fid"  # not inside one: answer, confidence


class Reading(NamedTuple):
    """A metric as a script printed it."""

    value: float
    percent: bool  # whether a percent sign follows it
    decimals: int


@dataclass(frozen=True)
class Metric:
    """How the metric is found and judged; a wrong value raises UsageError."""

    pattern: str  # the first group of its last match in the output is the number
    better: str = "auto"  # "higher", "lower", or "auto": lower if the pattern's text names a loss or an error
    margin: float | None = None  # the largest acceptable harm in the metric's units; None for the default

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise UsageError(
                f"--metric {self.pattern!r}: not a valid regular expression: {error}. Put a backslash before each "
                "special character that stands for itself. Example: --metric 'accuracy: ([0-9.]+)'"
            ) from error
        if not groups:
            raise UsageError(
                f"--metric {self.pattern!r}: has no group. Put parentheses around the number. Example: --metric "
                "'accuracy: ([0-9.]+)'"
            )
        if self.margin is not None and not 0 < self.margin < math.inf:
            raise UsageError(f"--metric-margin {self.margin:g}: must be above 0, in the metric's units")

    @property
    def higher(self) -> bool:
        if self.better == "auto":
            text = self.pattern.lower()
            inside = any(word in text for word in LESS_IS_BETTER.split())
            return not inside and not {*LESS_AS_WORDS.split()} & {*re.findall("[a-z]+", text)}
        return self.better == "higher"

    def read(self, text: str) -> Reading | None:
        """The last match's number; None if nothing matches."""
        matches = list(re.finditer(self.pattern, text, re.MULTILINE))
        if not matches:
            return None
        found = (matches[-1].group(1) or "").strip()
        try:
            value = float(found.rstrip("%"))
        except ValueError:
            raise UsageError(
                f"--metric {self.pattern!r}: its group matched {found!r}, which is not a number. Put the first pair of "
                "parentheses around the number only. Example: --metric 'accuracy: ([0-9.]+)'"
            ) from None
        percent = found.endswith("%") or re.match(r"\s*%", text[matches[-1].end(1) :]) is not None
        exponent = Decimal(found.rstrip("%")).as_tuple().exponent
        return Reading(value, percent, max(0, -exponent) if isinstance(exponent, int) else 0)

    def nearest(self, text: str) -> str:
        """A pattern that matches, for a pattern that does not: the text has its last word in another spelling."""
        words = re.findall("[A-Za-z]{3,}", self.pattern.partition("(")[0])
        found = re.findall(rf"\w*{words[-1][:3]}\w*[ :=]+(?=[0-9.])", text, re.IGNORECASE) if words else []
        return f"{found[-1]}([0-9.]+)" if found else ""

    def margins(self, loss: float, percent: bool) -> Margins:
        """The margins of a comparison; the metric's default is 0.2 points, or the loss's share if less is better."""
        if self.margin is not None:
            return Margins(loss, self.margin, self.higher)
        if not self.higher:
            return Margins(loss, loss, metric_higher=False, metric_relative=True)
        return Margins(loss, POINTS if percent else POINTS / 100)
