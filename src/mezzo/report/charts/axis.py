"""An axis: from values to a place between 0 and 1, and the round numbers to mark on it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mezzo.report.series import Array

# Beyond this ratio of largest to smallest, a linear axis would flatten the end of training into one line.
LOG_FROM = 20.0
LARGEST = 1e280


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from ``low`` to ``high`` (``low < high``; both above 0 where ``log``)."""

    low: float
    high: float
    log: bool = False

    def place(self, values: Array) -> Array:
        """Where values lie, 0 at ``low`` and 1 at ``high``; NaN for NaN and for what a log axis lacks."""
        if not self.log:
            return np.asarray((values - self.low) / (self.high - self.low), dtype=float)
        with np.errstate(invalid="ignore", divide="ignore"):
            logs = np.where(values > 0, np.log(values), np.nan)
        return np.asarray(
            (logs - math.log(self.low)) / (math.log(self.high) - math.log(self.low)), dtype=float
        )

    def place_one(self, value: float) -> float:
        """`place` of one number."""
        return float(self.place(np.array([value]))[0])

    def ticks(self, about: int = 5) -> list[float]:
        """About so many round numbers on the axis: 1, 2 or 5 times a power of ten."""
        if self.log:
            found = _log_ticks(self.low, self.high, about)
            if len(found) >= 2:
                return found
        raw = (self.high - self.low) / max(1, about)
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]

    def powers(self, about: int = 4) -> list[float]:
        """About so many powers of two on a logarithmic axis, evenly placed."""
        first, last = math.ceil(math.log2(self.low) - 1e-9), math.floor(math.log2(self.high) + 1e-9)
        every = max(1, math.ceil((last - first) / about))
        return [2.0**power for power in range(first, last + 1, every)]


def _log_ticks(low: float, high: float, about: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**d for d in decades for f in factors if low * 0.999 <= f * 10.0**d <= high * 1.001]
        if len(found) <= about + 2:
            return found
    every = math.ceil(len(found) / (about + 1))
    return found[::every]


def axis_over(parts: Iterable[Array], *, log: bool | None = None, about_zero: bool = False) -> Axis:
    """The axis that shows every finite value of ``parts``, with a little room.

    Args:
        parts: the values to show.
        log: whether it is logarithmic; None: where all are positive and span a ratio of `LOG_FROM`.
        about_zero: whether zero must be on it.
    """
    kept = [part[np.isfinite(part)] for part in parts]
    values = np.concatenate([part for part in kept if len(part)] or [np.zeros(0)])
    if not len(values):
        return Axis(0.0, 1.0)
    # No loss is drawn to such a scale; the bound keeps the arithmetic of the axis itself finite.
    low, high = (float(np.clip(edge, -LARGEST, LARGEST)) for edge in (values.min(), values.max()))
    if log is None:
        log = low > 0 and high / low >= LOG_FROM
    if log and low > 0:
        low = max(low, 1 / LARGEST)
        logs = math.log(low), math.log(high)
        reach = 0.05 * (logs[1] - logs[0]) or 0.4
        return Axis(math.exp(logs[0] - reach), math.exp(logs[1] + reach), log=True)
    if about_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Axis(low - room, high + room)


def power_of_two(value: float) -> str:
    """A power of two as it is spoken of: ``2¹⁶``.

    >>> power_of_two(65536.0), power_of_two(2.0**-3)
    ('2¹⁶', '2⁻³')
    """
    return "2" + str(round(math.log2(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def scale_text(value: float) -> str:
    """A loss scale: as a power of two where it is one.

    >>> scale_text(65536.0), scale_text(1.0), scale_text(1000.0)
    ('2¹⁶', '1', '1,000')
    """
    if value != 1 and 0 < value < math.inf and math.frexp(value)[0] == 0.5:
        return power_of_two(value)
    return f"{value:,.6g}" if math.isfinite(value) else str(value)


def tick_label(value: float) -> str:
    """A tick's number, as short as it goes: ``0.02``, ``1,500``, ``1e-05``, ``20k``."""
    if value == 0:
        return "0"
    sign, size = ("\u2212" if value < 0 else ""), abs(value)
    if size >= 1e7 or size < 1e-4:
        mantissa, power = f"{size:.2e}".split("e")
        return f"{sign}{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    if size >= 10_000:
        return f"{sign}{size / 1000:,.4g}k"
    return f"{sign}{float(f'{size:.6g}'):,.10g}"
