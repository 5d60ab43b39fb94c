"""Numbers as the page prints them: one way for each quantity, and the same words where a number is missing.

Each function takes what `verdict.json` may hold (a number, None, or a string such as ``"nan"``) and returns
text.
"""

from __future__ import annotations

import math

MISSING = "not measured"
MINUS = "\u2212"


def number(value: object) -> float | None:
    """The value as a float, NaN and infinities included; None where it is no number (a bool is none either).

    >>> number("inf"), number(None), number(True), number(3)
    (inf, None, None, 3.0)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def finite(value: object) -> float | None:
    """The value as a float where it is a finite number, else None."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def pair(value: object) -> tuple[float, float] | None:
    """Two finite numbers, low then high, from a list of two; else None."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    low, high = finite(value[0]), finite(value[1])
    return None if low is None or high is None else (min(low, high), max(low, high))


def significant(value: object, digits: int = 4) -> str:
    """To so many significant digits, with a true minus sign: losses and metrics.

    >>> significant(0.0123456), significant(-2.5e-7), significant(12345.678), significant(float("nan"))
    ('0.01235', '−2.500e-07', '12,346', 'NaN')
    """
    found = number(value)
    if found is None:
        return MISSING
    if math.isnan(found):
        return "NaN"
    if math.isinf(found):
        return "infinity" if found > 0 else f"{MINUS}infinity"
    size = abs(found)
    if size == 0:
        text = "0"
    elif 1e-4 <= size < 1e6:
        places = max(0, digits - 1 - math.floor(math.log10(size)))
        text = f"{size:,.{places}f}"
    else:
        text = f"{size:.{digits - 1}e}"
    return (MINUS if found < 0 else "") + text


def signed(value: object, digits: int = 3) -> str:
    """As `significant`, with the sign always written: gaps."""
    found = number(value)
    text = significant(found, digits)
    return f"+{text}" if found is not None and found > 0 else text


def ratio(value: object) -> str:
    """A ratio to two places and a times sign: ``1.62×``."""
    found = finite(value)
    return MISSING if found is None else f"{found:,.2f}×"


def percent(value: object, digits: int = 2) -> str:
    """A share as a percentage, to so many significant digits, or to whole percents with 0; it does not break.

    >>> [" ".join(percent(share).split()) for share in (0.005, -0.0131, None)], percent(0.934, 0)[:2]
    (['0.50 %', '−1.3 %', 'not measured'], '93')
    """
    found = finite(value)
    if found is None:
        return MISSING
    return (significant(100 * found, digits) if digits else f"{100 * found:.0f}") + "\u00a0%"


def count(value: object) -> str:
    """A whole number with thousands marked."""
    found = finite(value)
    return MISSING if found is None else f"{round(found):,}"


def size(value: object) -> str:
    """Bytes in decimal units (1 MB is 10^6 bytes), three significant digits.

    >>> size(421_700_000), size(1.2e9), size(512)
    ('422 MB', '1.20 GB', '512 B')
    """
    found = finite(value)
    if found is None:
        return MISSING
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(found) >= 0.9995 * scale:
            shown = abs(found) / scale
            places = 0 if shown >= 99.95 else 1 if shown >= 9.995 else 2
            return f"{found / scale:,.{places}f} {unit}"
    return f"{found:.0f} B"


def seconds(value: object) -> str:
    """A duration in the unit that suits it: ``182 ms``, ``7.28 s``, ``2 min 5 s``."""
    found = finite(value)
    if found is None:
        return MISSING
    if found < 1e-3:
        return f"{significant(found * 1e6, 3)} µs"
    if found < 1:
        return f"{significant(found * 1e3, 3)} ms"
    if found < 60:
        return f"{significant(found, 3)} s"
    minutes, rest = divmod(round(found), 60)
    return f"{minutes} min {rest} s"


def counted(how_many: int, noun: str, plural: str = "") -> str:
    """A count with its noun: ``1 seed``, ``3 seeds``."""
    return f"{how_many:,} {noun if how_many == 1 else plural or noun + 's'}"
