"""What becomes of one number in one format: the bits it gets, the value they hold, and the error made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from mezzo.core.bits import Bits, encode
from mezzo.core.formats import Format, Number, exactly, named, overflow_named
from mezzo.core.rounding import split, ulp


@dataclass(frozen=True)
class Fate:
    """A number, and what a format makes of it.

    Args:
        number: the number as it was.
        bits: its pattern in the format; ``bits.value`` is what is stored.
        absolute_error: ``|stored - number|``; infinite on overflow to infinity, NaN where either is NaN.
        relative_error: that over ``|number|``; 0 for a number that is stored exactly.
        word: ``exact``, ``rounded``, ``subnormal`` (stored with fewer bits than the format's precision,
            exactly or not), ``underflow`` (stored as zero) or ``overflow`` (beyond the largest value:
            infinite, NaN or saturated).
    """

    number: Number
    bits: Bits
    absolute_error: Number
    relative_error: Number
    word: str


def fate(number: Number, format: str | Format, *, overflow: str = "infinity") -> Fate:
    """What the format makes of a number. The arguments are those of `mezzo.formats.round`.

    >>> [fate(x, "fp16").word for x in (65520.0, 1e-8, 2.0**-20, 0.1, 0.5)]
    ['overflow', 'underflow', 'subnormal', 'rounded', 'exact']
    """
    form = named(format)
    bits = encode(number, form, overflow_named(overflow))
    stored = bits.value
    exact, _ = split(number)
    kept, _ = split(stored)
    if exact is None:  # NaN or an infinity: stored as such, or beyond the format
        same = bits.kind == "nan" if math.isnan(number) else stored == number
        error = 0.0 if same else math.nan if bits.kind == "nan" else math.inf
        return Fate(number, bits, error, error, "exact" if same else "overflow")
    if kept is None:
        error = math.nan if bits.kind == "nan" else math.inf
        return Fate(number, bits, error, error, "overflow")
    difference = abs(kept - exact)
    relative = difference / exact if exact else Fraction(0)
    return Fate(number, bits, exactly(difference), exactly(relative), _word(exact, difference, bits))


def _word(exact: Fraction, difference: Fraction, bits: Bits) -> str:
    if difference and bits.kind == "zero":
        return "underflow"
    if difference and exact > bits.format.exact_max:
        # Up to half a step above max it was rounded down like any other; further out it was saturated.
        half_step = Fraction(ulp(bits.format.max, bits.format)) / 2
        return "rounded" if difference <= half_step else "overflow"
    if bits.kind == "subnormal":
        return "subnormal"
    return "rounded" if difference else "exact"
