"""precision="auto": first by what the hardware has, then by timing the user's own first steps.

The first steps alternate (FP32, candidate, candidate, FP32, ...), so that a drift of the clock or of the batch size
affects both alike, and their medians decide.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from mezzo.core.policy import Policy
from mezzo.pytorch import hardware
from mezzo.pytorch.distributed import Ranks

# bf16 first: it has FP32's range, so it needs no loss scale and skips no step.
PREFERENCE = ("bf16", "fp16")
STEPS_EACH, WARMUP, MIN_SPEEDUP = 8, 2, 1.05  # less is within the scatter of medians


def resolve(policy: Policy, device_type: str) -> tuple[Policy, str]:
    """The policy with `auto` replaced by a native format of this device (bf16, fp16 or fp32), and the reason."""
    if policy.compute != "auto":
        return policy, f"{policy.compute} was asked for"
    native = hardware.native_formats(device_type)
    for name in PREFERENCE:
        if name in native:
            why = f"auto chose {name}: this {device_type} device multiplies {name} in hardware"
            return policy.resolved(name), why
    return (
        policy.resolved("fp32"),
        f"auto chose FP32: this {device_type} device has no fast 16-bit format. To use bf16 anyway, ask for bf16",
    )


@dataclass(frozen=True)
class TrialDecision:
    """The decision of ``precision="auto"``: the format, its speedup over FP32 (median step times), and the reason."""

    precision: str
    speedup: float
    reason: str


class TimedTrial:
    """Times the first training steps in FP32 and in a candidate format, and decides by the ratio of their medians.

    A step is the sum of its pieces, each from `start` to `pause`, without the time between them (the data loader). The
    device is synchronized at both ends.
    """

    def __init__(
        self, candidate: str, device_type: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._candidate, self._device_type, self._clock = candidate, device_type, clock
        self._taken: dict[str, list[float]] = {"fp32": [], candidate: []}
        self._started: float | None = None
        self._seconds = 0.0
        self.decision: TrialDecision | None = None

    @property
    def precision(self) -> str:
        """The format for the next step."""
        if self.decision is not None:
            return self.decision.precision
        pair, second = divmod(sum(map(len, self._taken.values())), 2)
        return self._candidate if (pair + second) % 2 else "fp32"

    def start(self) -> None:
        """A piece of a step begins here, unless one has begun already."""
        if self._started is None:
            self._started = self._now()

    def pause(self) -> None:
        """The piece ends here."""
        if self._started is not None:
            self._seconds += max(0.0, self._now() - self._started)
        self._started = None

    def finish(self, *, counts: bool) -> None:
        """The step ends here. It is dropped unless it `counts` (a skipped one doesn't) and was timed."""
        self.pause()
        if counts and self._seconds > 0.0 and self.decision is None:
            self._taken[self.precision].append(self._seconds)
            if all(len(times) >= WARMUP + STEPS_EACH for times in self._taken.values()):
                self.decision = self._decide(*self._medians())
        self._seconds = 0.0

    def agree(self, ranks: Ranks) -> None:
        """Several ranks train one model: the first rank's times decide for all, at the same step."""
        own = (0.0, 0.0, 0.0) if self.decision is None else (1.0, *self._medians())
        known, plain, low = ranks.of_first(*own)
        self.decision = self._decide(plain, low) if known else None

    def _medians(self) -> tuple[float, float]:
        """Of a step in FP32, and in the candidate."""
        plain, low = (median(times[WARMUP:]) for times in self._taken.values())
        return plain, low

    def _now(self) -> float:
        if self._device_type != "cpu":
            torch.accelerator.synchronize()
        return self._clock()

    def _decide(self, plain: float, low: float) -> TrialDecision:
        name, speedup = self._candidate, plain / low
        chosen = name if speedup >= MIN_SPEEDUP else "fp32"
        times = f"a step takes {_duration(low)} in {name}, {_duration(plain)} in FP32 (medians of {STEPS_EACH} steps)"
        # Rounded down: 1.049 must not be printed as the 1.05 that it failed to reach.
        ratio = f"{math.floor(100 * speedup) / 100:.2f}x as fast (auto needs {MIN_SPEEDUP:g}x)"
        why = f"auto chose {chosen.replace('fp32', 'FP32')}: {times}, so {name} is {ratio}"
        return TrialDecision(chosen, speedup, why)


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
