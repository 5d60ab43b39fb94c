"""Histograms of binary exponents, and what each format would make of a tensor's numbers.

A histogram is counted once, in FP32's exponents, and serves every format. A loss scale of 2^k moves it by k bins. Of
the values in a format's top binade, those above its largest number are not counted as overflowed; `largest` is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mezzo.core import formats
from mezzo.core.formats import Format, named

BINS = 258
"""Length of the vector that a kernel counts into, by the exponent field of the FP32 number.

Index 0: subnormal in FP32, not zero. 1 to 254: normal, with exponent ``index - 127``. 255: infinite. 256: zero.
257: NaN.
"""

INFINITE, ZERO, NAN = 255, 256, 257
_BIAS = 127


class Limits(NamedTuple):
    """A format's ends as exponents: numbers below ``2**zero`` become zero, from ``2**normal`` on keep every bit."""

    zero: int
    normal: int
    overflow: int


def limits_of(form: Format) -> Limits:
    """The ends of a format; half of its smallest subnormal number ties to zero."""
    return Limits(form.minexp - form.nmant - 1, form.minexp, form.maxexp)


@dataclass(frozen=True)
class Shares:
    """Shares of the nonzero numbers that a format rounds to zero, keeps with fewer bits, keeps, makes infinite."""

    underflow: float
    subnormal: float
    normal: float
    overflow: float


@dataclass(frozen=True)
class Histogram:
    """How often each exponent occurs among the magnitudes of a tensor's elements.

    Args:
        lowest: exponent of the first of `counts`, ``2**lowest <= |x| < 2**(lowest+1)``; FP32's subnormals are at -127.
        counts: a count for each exponent; neither the first nor the last is 0.
        zeros, infinities, nans: elements without an exponent.
        largest: the largest finite magnitude; 0 if there is none.
    """

    lowest: int = 0
    counts: list[int] = field(default_factory=list)
    zeros: int = 0
    infinities: int = 0
    nans: int = 0
    largest: float = 0.0

    @classmethod
    def from_bins(cls, bins: Sequence[int], largest: float = 0.0) -> Histogram:
        """From a vector of `BINS` counts."""
        used = [index for index in range(INFINITE) if bins[index]]
        first, last = (used[0], used[-1] + 1) if used else (_BIAS, _BIAS)
        counts = list(map(int, bins[first:last]))
        zeros, infinities, nans = (int(bins[index]) for index in (ZERO, INFINITE, NAN))
        return cls(first - _BIAS, counts, zeros, infinities, nans, float(largest))

    @property
    def elements(self) -> int:
        """All elements."""
        return sum(self.counts) + self.zeros + self.infinities + self.nans

    def shares(self, format: str | Format, shift: int = 0) -> Shares | None:
        """The shares after multiplying the numbers by ``2**shift``; None if no number is finite and not 0.

        >>> seen = Histogram(lowest=-30, counts=[1, 0, 0, 0, 0, 2, 0, 1])  # 2^-30, 2^-25 twice, 2^-23
        >>> seen.shares("fp16").underflow, seen.shares("fp16", shift=10).underflow
        (0.25, 0.0)
        """
        form = named(format)
        total = sum(self.counts)
        if not total:
            return None
        kept, normal, beyond = (max(0, exponent - shift - self.lowest) for exponent in limits_of(form))
        under, sub, over = sum(self.counts[:kept]), sum(self.counts[kept:normal]), sum(self.counts[beyond:])
        return Shares(under / total, sub / total, (total - under - sub - over) / total, over / total)

    def scaled_to(self, format: str | Format) -> Histogram:
        """Times the power of two that brings the largest number just under the format's, as fp8 scales a tensor.

        >>> Histogram(-30, [1, 1]).scaled_to("e4m3fn")  # up to 2^-28: 2^36 times that is below 448
        Histogram(lowest=6, counts=[1, 1], zeros=0, infinities=0, nans=0, largest=0.0)
        """
        largest = self.largest or math.ldexp(1.0, self.lowest + len(self.counts))
        shift = math.floor(math.log2(float(named(format).max) / largest))
        return replace(self, lowest=self.lowest + shift, largest=math.ldexp(self.largest, shift))

    def overflows(self, format: str | Format, shift: int = 0) -> bool:
        """Whether the largest number, times ``2**shift``, rounds to beyond the format's largest: exact."""
        form = named(format)
        try:
            value = math.ldexp(self.largest, shift)
        except OverflowError:
            return True
        return not math.isfinite(formats.round(value, form))

    def lost(self, format: str | Format) -> float | None:
        """Of ratios update / weight, an estimate of the share too small to move a weight of this format, or None.

        An update is lost below half a unit in the weight's last place: a ratio between ``2**-(nmant + 2)`` and
        ``2**-(nmant + 1)``, depending on the weight's mantissa. Half of the binade between these is counted.

        >>> Histogram(lowest=-10, counts=[1, 2, 1]).lost("bf16")  # one under 2^-9, two up to 2^-8, one above
        0.5
        """
        total = sum(self.counts)
        if not total:
            return None
        between = -(named(format).nmant + 2) - self.lowest
        gone: float = sum(self.counts[: max(0, between)])
        if 0 <= between < len(self.counts):
            gone += self.counts[between] / 2
        return gone / total

    def plus(self, other: Histogram) -> Histogram:
        """Both together."""
        ends = [h for h in (self, other) if h.counts]
        lowest = min((h.lowest for h in ends), default=0)
        counts = [0] * (max((h.lowest + len(h.counts) for h in ends), default=0) - lowest)
        for one in ends:
            for place, count in enumerate(one.counts):
                counts[one.lowest - lowest + place] += count
        others = (self.zeros + other.zeros, self.infinities + other.infinities, self.nans + other.nans)
        return Histogram(lowest, counts, *others, max(self.largest, other.largest))


WHAT = {
    "weight": "the parameter, before the update (its FP32 master where it has one)",
    "activation": "what the module returned",
    "activation gradient": "the gradient of what the module returned, without the loss scale",
    "weight gradient": "the gradient, unscaled; before `MixedPrecision` or Keras clips it, after a script's own",
    "update ratio": "magnitude of the update over that of the weight, element by element",
}
"""The kinds of tensors that are observed, each with its definition."""


GRADIENTS = ("activation gradient", "weight gradient")
"""The kinds of `WHAT` that a loss scale multiplies."""


def shift_of(scale: float) -> int:
    """The exponent of a loss scale; 0 for one that is not finite and positive."""
    return round(math.log2(scale)) if 0 < scale < math.inf else 0


@dataclass(frozen=True, repr=False)
class RangeRow:
    """The histogram of one tensor in one step, and its format in the run.

    `module` is a path in the model, `what` a key of `WHAT`, `name` a parameter's name in the module (``""`` for
    activations). Gradients are divided by the loss scale.
    """

    module: str
    what: str
    format: str
    histogram: Histogram
    name: str = ""

    def __str__(self) -> str:
        tensor = f"{self.module or 'the model'}{'.' + self.name if self.name else ''}"
        return f"{self.what} of {tensor}, up to {self.histogram.largest:.4g}"

    def __repr__(self) -> str:
        return f"RangeRow({str(self)!r})"


def label_of(row: RangeRow, optimizer: int) -> str:
    """The tensor of a row, and its optimizer from the second one on."""
    label = ".".join(part for part in (row.module, row.name) if part) or "(the model)"
    return f"optimizer {optimizer}: {label}" if optimizer else label


Merged = dict[tuple[str, str, str], RangeRow]
"""Rows summed over steps, by module, `what` and name; the format is that of the last step."""


def merge(into: Merged, rows: Iterable[RangeRow]) -> None:
    """Add one step's rows."""
    for row in rows:
        key = row.module, row.what, row.name
        into[key] = replace(row, histogram=into[key].histogram.plus(row.histogram)) if key in into else row


def percent(share: float) -> str:
    """A share with two digits; a tiny one is not written as 0, and less than all not as 100.

    >>> percent(1e-5), percent(0.0249), percent(0.996), percent(1)
    ('under 0.01%', '2.5%', 'over 99%', '100%')
    """
    if 0.995 <= share < 1:
        return "over 99%"
    return "under 0.01%" if 0 < share < 1e-4 else f"{float(f'{100 * share:.2g}'):g}%"
