"""precision="auto": is a 16-bit format really faster here? Decided by timing the user's own first steps.

A small model, a slow data loader or a kernel that falls back can make 16 bits slower on hardware that has them. So the
first steps alternate between FP32 and the candidate, and their medians decide. The order is FP32, candidate, candidate,
FP32, and so on: a drift of the clock or of the batch size hits both alike, and each precision comes equally often right
after a change of precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median


@dataclass(frozen=True)
class TrialDecision:
    """What the trial found.

    Args:
        precision: the format to go on with: `fp32` or the candidate.
        speedup: median FP32 step time over median candidate step time; inf if the candidate's clock read zero.
        reason: one plain sentence with the figures.
    """

    precision: str
    speedup: float
    reason: str


@dataclass(frozen=True)
class PrecisionTrial:
    """The state of a trial: `precision` is the next step's format, `decision` is None until it is over.

    The naive code it equals, with the first `warmup` times of each precision dropped::

        speedup = median(fp32_seconds) / median(candidate_seconds)
        precision = candidate if speedup >= min_speedup else "fp32"

    A skipped step has no optimizer in it and is not observed; the same precision is then asked for again.

    Args:
        candidate: the 16-bit format that may be chosen.
        steps_each: timed steps of each precision, at least 1.
        warmup: steps of each precision that come first and are not counted (allocation, autotuning, compilation).
        min_speedup: the ratio from which the candidate is chosen. Less than 1.05 is within the scatter of medians.
        seconds: the times observed so far, warm-up included, in order.
    """

    candidate: str
    steps_each: int = 8
    warmup: int = 2
    min_speedup: float = 1.05
    seconds: tuple[float, ...] = ()

    @property
    def precision(self) -> str:
        """The format of the next step: by turns until the trial is over, then the one decided on."""
        decision = self.decision
        return decision.precision if decision else self._turn(len(self.seconds))

    @property
    def steps_left(self) -> int:
        """How many more steps must be observed before the decision."""
        return 2 * (self.warmup + self.steps_each) - len(self.seconds)

    def observe(self, seconds: float) -> PrecisionTrial:
        """The state after a step of `self.precision` that took this long; itself once the decision is made."""
        return replace(self, seconds=(*self.seconds, float(seconds))) if self.steps_left else self

    @property
    def decision(self) -> TrialDecision | None:
        """The decision, or None while steps are still to be timed."""
        if self.steps_left:
            return None
        taken: dict[str, list[float]] = {"fp32": [], self.candidate: []}
        for index, time in enumerate(self.seconds):
            taken[self._turn(index)].append(time)
        plain, low = (median(times[self.warmup :]) for times in taken.values())
        speedup = plain / low if low else (math.inf if plain else 1.0)
        # Rounded down: 1.049 must not read as the 1.05 that it failed to reach.
        ratio = f"{math.floor(100 * speedup) / 100:.2f}" if math.isfinite(speedup) else "inf"
        timed = (
            f"a step takes {_duration(low)} in {self.candidate} and {_duration(plain)} in FP32 "
            f"(medians of {self.steps_each} steps each, {ratio}x as fast)"
        )
        if speedup >= self.min_speedup:
            return TrialDecision(self.candidate, speedup, f"{self.candidate}: {timed}")
        why = f"{self.candidate} is used only where it is at least {self.min_speedup:g}x as fast"
        return TrialDecision("fp32", speedup, f"FP32: {timed}; {why}")

    def _turn(self, index: int) -> str:
        pair, second = divmod(index, 2)
        return self.candidate if (pair + second) % 2 else "fp32"


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
