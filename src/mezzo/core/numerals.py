"""Exact numbers of any size: taken apart, read from text and written as text.

Python's own conversions stop at float's range (``float("1e-400")`` is 0) or at 4300 digits; the numbers of
binary256 have exponents of five decimal digits.
"""

from __future__ import annotations

import decimal
import math
import re
from decimal import Decimal
from fractions import Fraction

from mezzo.core.errors import UsageError

Number = int | float | Fraction
"""A value held exactly: a float where a float can, else an int or a Fraction."""


# Beyond binary256 on both sides, and still read in no time; 1e999999999 would fill the memory.
LARGEST_POWER_OF_TEN = 100_000
LARGEST_POWER_OF_TWO = 400_000
MOST_DIGITS = 4000

_WRITTEN = (
    "write a decimal (-4.2e9), a hexadecimal float (0x1.8p3), a fraction (1/3), a power (2^-24), inf or nan"
)
_DECIMAL = r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_FORMS = {
    "infinity": re.compile(r"inf(?:inity)?"),
    "nan": re.compile(r"nan"),
    "decimal": re.compile(_DECIMAL),
    "hexadecimal": re.compile(r"0x(?P<whole>[0-9a-f]*)\.?(?P<part>[0-9a-f]*)(?:p(?P<power>[+-]?\d+))?"),
    "fraction": re.compile(rf"(?P<over>{_DECIMAL})/(?P<under>{_DECIMAL})"),
    "power": re.compile(r"2(?:\^|\*\*)(?P<power>[+-]?\d+)"),
}


def exactly(value: Fraction) -> Number:
    """The same value in the plainest type that holds it: a float, else an int, else the Fraction itself."""
    try:
        as_float = float(value)
    except OverflowError:
        return value.numerator if value.denominator == 1 else value
    return as_float if Fraction(as_float) == value else value.numerator if value.denominator == 1 else value


def power_of_two(exponent: int) -> Fraction:
    """``2**exponent``, exactly."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def split(x: Number | Decimal) -> tuple[Fraction | None, int]:
    """A number's magnitude, exactly (None for an infinity or a NaN), and its sign as +1 or -1.

    Raises:
        UsageError: not a number.
    """
    if isinstance(x, float):
        return (Fraction(abs(x)) if math.isfinite(x) else None), int(math.copysign(1, x))
    if isinstance(x, (int, Fraction)):
        return abs(Fraction(x)), -1 if x < 0 else 1
    if isinstance(x, Decimal):
        return (Fraction(x.copy_abs()) if x.is_finite() else None), -1 if x.is_signed() else 1
    raise UsageError(
        f"cannot round {type(x).__name__} {str(x)[:40]!r}: give a float, int, Fraction or Decimal, "
        "a numpy array or a torch tensor (numpy.asarray makes an array of a list)"
    )


def is_nan(x: Number | Decimal) -> bool:
    """Whether it is NaN, of any sort."""
    return x.is_nan() if isinstance(x, Decimal) else isinstance(x, float) and math.isnan(x)


def exponent(x: Fraction) -> int:
    """``floor(log2(x))`` for a positive number, exactly."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if x >= power_of_two(guess) else guess - 1


def parse(text: str) -> Number:
    """The number that a text stands for, exactly.

    >>> parse("-4.2e9"), parse("0x1.8p3"), parse("1/3"), parse("2^-3"), parse("-0"), parse("1e-400") > 0
    (-4200000000.0, 12.0, Fraction(1, 3), 0.125, -0.0, True)

    Raises:
        UsageError: not a number, a division by zero, or one far beyond every format's range.
    """
    plain = text.strip().lower().replace("_", "")
    sign = -1 if plain.startswith("-") else 1
    digits = plain[1:] if plain[:1] in ("-", "+") else plain
    if len(digits) > MOST_DIGITS:
        raise UsageError(
            f"a number of {len(digits)} characters is more than can be read: use at most {MOST_DIGITS}"
        )
    for form, pattern in _FORMS.items():
        match = pattern.fullmatch(digits)
        if match is None:
            continue
        if form in ("infinity", "nan"):
            return math.copysign(math.inf if form == "infinity" else math.nan, sign)
        magnitude = _magnitude(form, digits, match, text)
        return exactly(sign * magnitude) if magnitude else math.copysign(0.0, sign)
    raise UsageError(f"{text!r} is not a number: {_WRITTEN}")


def _magnitude(form: str, digits: str, match: re.Match[str], text: str) -> Fraction:
    if form == "decimal":
        return _decimal(digits, text)
    if form == "fraction":
        over, under = _decimal(match["over"], text), _decimal(match["under"], text)
        if not under:
            raise UsageError(f"{text!r} divides by zero: {_WRITTEN}")
        return over / under
    power = int(match["power"] or 0)
    if abs(power) > LARGEST_POWER_OF_TWO:
        raise UsageError(f"{text!r} is beyond every format: use powers of two up to {LARGEST_POWER_OF_TWO}")
    if form == "power":
        return power_of_two(power)
    if not match["whole"] and not match["part"]:
        raise UsageError(f"{text!r} is not a number: {_WRITTEN}")
    units = int(match["whole"] + match["part"], 16)
    return units * power_of_two(power - 4 * len(match["part"]))


def _decimal(digits: str, text: str) -> Fraction:
    power = int(digits.partition("e")[2] or 0)
    if abs(power) > LARGEST_POWER_OF_TEN:
        raise UsageError(f"{text!r} is beyond every format: use powers of ten up to {LARGEST_POWER_OF_TEN}")
    return Fraction(digits)


def written(value: Number, digits: int = 5) -> str:
    """A number in decimal, to so many significant digits; exactly, where that takes no more than that.

    >>> written(65504.0), written(2.0**-24), written(Fraction(1, 3), 3), written(-0.0), written(2**16383)
    ('65504', '5.9605e-8', '0.333', '-0', '5.9487e4931')
    """
    if isinstance(value, float) and (value == 0 or not math.isfinite(value)):
        return str(value).removesuffix(".0")
    exact = Fraction(value)
    context = decimal.Context(prec=digits, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)
    rounded = context.divide(Decimal(exact.numerator), Decimal(exact.denominator)).normalize(context)
    power = rounded.adjusted()
    if -5 < power < max(digits, 6):
        return f"{rounded:f}"
    shown = f"{rounded.scaleb(-power, context):f}"
    return f"{shown}e{power}"
