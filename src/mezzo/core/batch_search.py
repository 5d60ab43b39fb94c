"""The largest batch size that fits, by trial: which size to try next, given what the sizes so far took.

Sizes grow by a factor until one fails, and then the gap is halved until it is one multiple wide. Where bytes are
measured against a limit, a line through the nearest two measured sizes says where the limit lies: then the
next size is that one, and what the line puts far beyond the limit is not tried at all, since a CPU that allocates too
much does not fail but swaps.

Pure: no clock, no device, no framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from mezzo.core.errors import MezzoError, UsageError

BEYOND = 0.10
"""A size is tried if it is expected to take no more than this share beyond the limit."""

UNCHANGING = 64
"""The same bytes over a range of sizes this wide: it is no batch size that was varied."""

OVER = "over the limit"
OUT_OF_MEMORY = "out of memory"


class NothingFitsError(MezzoError, RuntimeError):
    """Not even the smallest batch size fits into the memory there is."""


@dataclass(frozen=True)
class Trial:
    """What one batch size showed.

    Attributes:
        size: samples a step.
        fits: whether a step ran within the memory there is.
        peak_bytes: the most bytes at once in a step; None where the step did not come to its end.
        seconds: of a step, the median; None where it was not timed.
        why: what kept it from fitting, in words.
        resting_bytes: alive between two steps, as far as known: what a batch of no samples would take at least.
    """

    size: int
    fits: bool
    peak_bytes: int | None = None
    seconds: float | None = None
    why: str = ""
    resting_bytes: int | None = None

    @property
    def samples_per_second(self) -> float | None:
        """Size over seconds."""
        return self.size / self.seconds if self.seconds else None


@dataclass(frozen=True)
class BatchSearch:
    """The state of a search; `next_size` says what to try, `observe` gives the next state.

    Naive code, whose answer this is wherever memory grows with the size::

        size = multiple_of
        while fits(size + multiple_of):
            size += multiple_of

    It takes about ``log2(answer / start)`` trials of growth and as many of halving; where bytes are known and lie on
    a line, two in place of the halving.

    Args:
        start: the first size, rounded up to the multiple.
        multiple_of: every size is a multiple of it; it is the smallest size, too.
        factor: how sizes grow, above 1.
        limit: the bytes that may be taken; None where only failure tells.
        max_size: no size above it is tried.

    Raises:
        UsageError: an argument out of range.
    """

    start: int = 8
    multiple_of: int = 1
    factor: float = 2.0
    limit: int | None = None
    max_size: int | None = None
    trials: tuple[Trial, ...] = ()

    def __post_init__(self) -> None:
        for name in ("start", "multiple_of"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: give 1 or more")
        if not (1.0 < self.factor < math.inf):
            raise UsageError(f"factor={self.factor}: sizes grow by it, so give a number above 1, such as 2")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit={self.limit}: give 1 byte or more")
        if self.max_size is not None and self.max_size < self.multiple_of:
            raise UsageError(
                f"max_size={self.max_size} is below multiple_of={self.multiple_of}, so there is no size to try: "
                "raise the one or lower the other"
            )

    def observe(self, trial: Trial) -> BatchSearch:
        """The state after a trial."""
        return replace(self, trials=(*self.trials, trial))

    @property
    def next_size(self) -> int | None:
        """The size to try next; None when the search is over."""
        step = self.multiple_of
        if not self.trials:
            first = -(-self.start // step) * step
            return first if self._ceiling is None else min(first, self._ceiling)
        if self.reach is not None or self.unchanging:
            return None
        low, high = self._low, self._high
        if high is not None:
            if high - low <= step:
                return None
            middle = (low + high) // 2 // step * step
            aimed = self._aim() if len(self.trials) % 2 else None  # by turns: aiming alone may creep
            if aimed is None or aimed >= high:  # what failed there was not on the line
                aimed = middle
            return min(max(aimed, low + step), high - step)
        ceiling = self._ceiling
        if ceiling is not None and low >= ceiling:
            return None
        grown = max(int(low * self.factor) // step * step, low + step)
        grown = grown if ceiling is None else min(grown, ceiling)
        if self.limit is None or self.expected(grown) <= self.limit:
            return grown
        aimed = self._aim()
        aimed = low + step if aimed is None else min(max(aimed, low + step), grown)
        return None if self._is_far_beyond(aimed) else aimed

    def run(self, attempt: Callable[[int], Trial]) -> BatchSearch:
        """The state at the end, each size tried by `attempt`."""
        search = self
        while (size := search.next_size) is not None:
            search = search.observe(attempt(size))
        return search

    @property
    def largest(self) -> Trial | None:
        """The largest size that fits; None where none does."""
        return max(self.counted, key=lambda trial: trial.size, default=None)

    @property
    def fastest(self) -> Trial | None:
        """The size that fits and trains the most samples a second; None where none was timed."""
        timed = [trial for trial in self.counted if trial.samples_per_second]
        return max(timed, key=lambda trial: trial.samples_per_second or 0.0, default=None)

    @property
    def counted(self) -> tuple[Trial, ...]:
        """The trials that fit, less those beyond `reach`, whose batches may have held fewer samples than asked."""
        reach = self.reach
        return tuple(trial for trial in self.trials if trial.fits and (reach is None or trial.size < reach))

    @property
    def refused(self) -> int | None:
        """The next multiple above the largest, where the line puts it so far beyond the limit that it isn't
        tried.
        """
        if self.next_size is not None or self._high is not None or not self._low:
            return None
        above = self._low + self.multiple_of
        if self._ceiling is not None and above > self._ceiling:
            return None
        return above if self.limit is not None and self._is_far_beyond(above) else None

    @property
    def reach(self) -> int | None:
        """The size from which bytes no longer grow with the size, after they did: the data may hold no more.

        Two larger sizes must show it. It may itself be larger than the data.
        """
        measured = sorted((t.size, t.peak_bytes) for t in self.trials if t.fits and t.peak_bytes is not None)
        most = max((peak for _, peak in measured), default=0)
        at = [size for size, peak in measured if peak == most]
        if not at or measured[0][1] == most or sum(size > at[0] for size, _ in measured) < 2:
            return None
        return at[0] if len(at) > 1 else next(size for size, _ in measured if size > at[0])

    @property
    def unchanging(self) -> bool:
        """Whether sizes that lie far apart all took the same bytes."""
        sizes = [trial.size for trial in self.trials]
        peaks = {trial.peak_bytes for trial in self.trials}
        return len(peaks) == 1 and None not in peaks and max(sizes) >= UNCHANGING * min(sizes)

    def expected(self, size: int) -> float:
        """The bytes that a size is expected to take: on the line through the nearest two measured sizes.

        With one measured size the line goes through what is alive between steps, or else through zero; then it is
        a bound from above for larger sizes. 0 where nothing was measured.
        """
        (x0, y0), (x1, y1) = self._line
        return y1 if x1 == x0 else y1 + (size - x1) * (y1 - y0) / (x1 - x0)

    @property
    def _low(self) -> int:
        return max((trial.size for trial in self.trials if trial.fits), default=0)

    @property
    def _high(self) -> int | None:
        return min((trial.size for trial in self.trials if not trial.fits), default=None)

    @property
    def _ceiling(self) -> int | None:
        return None if self.max_size is None else self.max_size // self.multiple_of * self.multiple_of

    @property
    def _points(self) -> list[tuple[int, int]]:
        """Size and bytes of each measured trial, by size; before them what a batch of no samples takes."""
        resting = [(0, t.resting_bytes) for t in self.trials[:1] if t.resting_bytes is not None]
        return resting + sorted((t.size, t.peak_bytes) for t in self.trials if t.peak_bytes is not None)

    @property
    def _line(self) -> tuple[tuple[int, int], tuple[int, int]]:
        points = self._points
        below = [point for point in points if point[0] <= self._low]
        above = [point for point in points if point[0] > self._low]
        chosen = [*below[-1:], above[0]] if above else below[-2:]
        while len(chosen) < 2:
            chosen.insert(0, (0, 0))
        return chosen[0], chosen[1]

    def _aim(self) -> int | None:
        """The largest multiple that the line puts within the limit; None where there is no rising line."""
        (x0, y0), (x1, y1) = self._line
        if self.limit is None or x1 == x0 or y1 <= y0:
            return None
        return int(x1 + (self.limit - y1) * (x1 - x0) / (y1 - y0)) // self.multiple_of * self.multiple_of

    def _is_far_beyond(self, size: int) -> bool:
        """Whether a size is expected to take far more than the limit; a line through one size proves nothing."""
        if self.limit is None or len(self._points) < 2:
            return False
        return self.expected(size) > self.limit * (1 + BEYOND)
