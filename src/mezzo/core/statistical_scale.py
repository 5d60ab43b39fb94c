"""StatisticalLossScale: S from how the largest gradients have been spread so far, instead of by running into overflow.

The largest gradient of a step, L, is about log-normal over the steps of a run. With the mean and the
standard deviation of log2(L), the S that overflows fp16 in one step of a thousand is known without trying it::

    S = 2 ** floor(log2(65504) - (mean + 3.09 * deviation))      # fp16's largest number; the normal's 0.1 %

`DynamicLossScale` finds the same place from above, by an overflow each time, and when gradients shrink it follows by
one power of two in thousands of steps; this one follows without an overflow (a sudden jump takes it a few windows,
since it widens the deviation first). What overflows that it was not told of, it learns of as the dynamic one does,
by backing off.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mezzo.core.errors import UsageError
from mezzo.core.scale_numbers import check_whole, checked_scale, collapsed, fl32, power_text

if TYPE_CHECKING:
    from mezzo.core.loss_scale import Observation

ROOM = fl32(math.log2(65504.0))
"""log2 of fp16's largest number. Not 16: gradients that are one power of two in each step would then overflow."""

LOG2 = (fl32(0.43872571), fl32(-0.23905811), fl32(0.08213059))
"""log2(1 + t) for t in [0, 1) is ``t + t * (1 - t) * (LOG2[0] + t * (LOG2[1] + t * LOG2[2]))`` to within 1.2e-4.

A polynomial, and not the library's logarithm, so that every device computes the same bits.
"""

SMALLEST_SEEN = 2.0**-126
"""Smaller gradients count as this one: FP32's subnormals have no exponent of their own."""


@dataclass(frozen=True)
class StatisticalLossScale:
    """S from the running mean and variance of log2 of the largest gradient, of activations and weights.

    One step, each operation rounded to FP32, `bad` = found_inf as 0 or 1, without a branch on a value::

        if largest was given, is finite, above 0, and not bad:
            seen      = min(seen + 1, window)
            weight    = 1 / seen
            delta     = log2(largest) - mean
            mean      = mean + weight * delta
            variance  = (1 - weight) * (variance + weight * (delta * delta))
            if seen >= warm_up:
                fitted = clamp(2 ** floor(ROOM - (mean + sigmas * sqrt(variance))), floor, ceiling)
        stuck      = (stuck + 1) * bad * (scale <= floor)      # the scale that this step had
        good_steps = (good_steps + 1) * (1 - bad)
        limit      = max(scale / 2, floor) if bad else min(limit * 2, ceiling) every `recovery` good steps
        scale      = min(fitted, limit)

    The first `window` observations weigh the same, which is Welford's mean and variance of all of them; after that
    each weighs ``1 / window``, an exponential average that forgets: gradients shrink by orders of magnitude over a
    run, and a mean of the whole past would lag further behind with every step. A step that overflowed is not
    observed: its largest gradient is not known.

    Args:
        init: S until `warm_up` gradients have been observed; a power of two, as all that S ever is.
        sigmas: how many standard deviations the largest gradient may lie above its mean: 3.09 are exceeded by one
            normal number in a thousand. `floor` takes half a power of two off S besides, on average.
        window: observations that the average remembers.
        warm_up: observations before they decide; a deviation of two numbers is no deviation.
        recovery: good steps after which a limit that an overflow has set is doubled. An overflow halves S at once;
            it stays at most there for so many good steps, then at most twice that, until the limit is above what
            the gradients ask for.
        floor: S never goes below; see `DynamicLossScale`.
        ceiling: S never goes above.
        patience: skips in a row at the floor after which `LossScaleCollapseError` is raised.
        mean: state: of log2 of the largest gradients.
        variance: state: of the same.
        seen: state: observations, at most `window`.
        fitted: state: S by the observations; 0 stands for `init`.
        limit: state: S is at most this; 0 stands for `ceiling`.
        good_steps: state: good steps since the last overflow or doubling of the limit.
        stuck: state: overflows in a row at the floor.

    Raises:
        UsageError: an argument out of range, a scale that is no power of two, or bounds that are not in order.

    >>> from mezzo.core.loss_scale import Observation
    >>> state = StatisticalLossScale(warm_up=3)
    >>> for largest in (0.01, 0.02, 0.04):  # 2^-6.64, 2^-5.64, 2^-4.64: mean -5.64, deviation 0.82
    ...     state = state.next(Observation(found_inf=False, largest=largest))
    >>> state.scale == 2.0 ** 19  # 16.0 + 5.64 - 3.09 * 0.82 = 19.1
    True
    """

    init: float = 2.0**16
    sigmas: float = 3.09
    window: int = 100
    warm_up: int = 10
    recovery: int = 500
    floor: float = 2.0**-14
    ceiling: float = 2.0**24
    patience: int = 50
    mean: float = 0.0
    variance: float = 0.0
    seen: int = 0
    fitted: float = 0.0
    limit: float = 0.0
    good_steps: int = 0
    stuck: int = 0

    def __post_init__(self) -> None:
        for name, stands_for in (
            ("floor", ""),
            ("ceiling", ""),
            ("init", ""),
            ("fitted", "init"),
            ("limit", "ceiling"),
        ):
            value = getattr(self, name)
            value = getattr(self, stands_for) if stands_for and value == 0 else checked_scale(name, value)
            if math.frexp(value)[0] != 0.5:
                raise UsageError(
                    f"{name} is {value:g}: a statistical loss scale is a power of two, such as 2**10"
                )
            object.__setattr__(self, name, value)
        for name in ("window", "warm_up"):
            check_whole(name, getattr(self, name), 2)
        if self.warm_up > self.window:
            raise UsageError(
                f"warm_up is {self.warm_up}: it must be at most the window, {self.window}, which remembers no more"
            )
        for name in ("recovery", "patience"):
            check_whole(name, getattr(self, name), 1)
        for name in ("seen", "good_steps", "stuck"):
            check_whole(name, getattr(self, name), 0)
        if not 0 <= self.sigmas < math.inf:
            raise UsageError(
                f"sigmas is {self.sigmas!r}: give how many standard deviations of room, 0 or more"
            )
        if not math.isfinite(self.mean) or not 0 <= self.variance < math.inf:
            raise UsageError(f"mean {self.mean!r} and variance {self.variance!r}: they must be finite")
        for name in ("sigmas", "mean", "variance"):
            object.__setattr__(self, name, fl32(getattr(self, name)))
        for name in ("init", "fitted", "limit"):
            value = getattr(self, name)
            if not self.floor <= value <= self.ceiling:
                raise UsageError(
                    f"{name} is {power_text(value)}: it must lie between the floor {power_text(self.floor)} and the "
                    f"ceiling {power_text(self.ceiling)}"
                )

    @property
    def scale(self) -> float:
        """S for the next step."""
        return min(self.fitted, self.limit)

    @property
    def deviation(self) -> float:
        """The standard deviation of log2 of the largest gradients, in powers of two."""
        return fl32(math.sqrt(self.variance))

    def next(self, observation: Observation) -> StatisticalLossScale:
        """The state after one step.

        Raises:
            LossScaleCollapseError: this was the `patience`-th skip in a row at the floor.
        """
        if observation.found_inf:
            stuck = self.stuck + 1 if self.scale <= self.floor else 0
            if stuck >= self.patience:
                raise collapsed(self.floor, stuck)
            return replace(self, limit=max(self.scale * 0.5, self.floor), good_steps=0, stuck=stuck)
        good_steps, limit = self.good_steps + 1, self.limit
        if good_steps >= self.recovery:
            good_steps, limit = 0, min(limit * 2.0, self.ceiling)
        learnt = self._learnt(observation.largest)
        return replace(self, limit=limit, good_steps=good_steps, stuck=0, **learnt)

    def _learnt(self, largest: float | None) -> dict[str, Any]:
        if largest is None or not 0 < fl32(largest) < math.inf:
            return {}
        seen = min(self.seen + 1, self.window)
        weight = fl32(1.0 / seen)
        delta = fl32(log2(largest) - self.mean)
        mean = fl32(self.mean + fl32(weight * delta))
        spread = fl32(self.variance + fl32(weight * fl32(delta * delta)))
        variance = fl32(fl32(1.0 - weight) * spread)
        found: dict[str, Any] = {"seen": seen, "mean": mean, "variance": variance}
        if seen >= self.warm_up:
            top = fl32(mean + fl32(self.sigmas * fl32(math.sqrt(variance))))
            exponent = max(-126.0, min(126.0, math.floor(fl32(ROOM - top))))
            found["fitted"] = max(self.floor, min(2.0**exponent, self.ceiling))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything, settings and state, as plain values for `from_state_dict`."""
        return {"kind": "statistical", **asdict(self)}


STATE = ("mean", "variance", "seen", "fitted", "limit", "good_steps", "stuck")
SETTINGS = {f.name: f.default for f in fields(StatisticalLossScale) if f.name not in STATE}
"""What a user may set, with its default."""


def log2(value: float) -> float:
    """log2 of a finite FP32 number above 0, to within 1.2e-4, in FP32 arithmetic that every device repeats to the bit.

    >>> log2(8.0), log2(0.5), round(log2(10.0), 3)
    (3.0, -1.0, 3.322)
    """
    bits = int(np.float32(max(fl32(value), SMALLEST_SEEN)).view(np.int32))
    t = fl32(float(np.int32((bits & 0x7FFFFF) | 0x3F800000).view(np.float32)) - 1.0)
    inner = fl32(LOG2[0] + fl32(t * fl32(LOG2[1] + fl32(t * LOG2[2]))))
    fraction = fl32(t + fl32(fl32(t * fl32(1.0 - t)) * inner))
    return fl32(float((bits >> 23) - 127) + fraction)
