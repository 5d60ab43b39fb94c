"""Numbers and words as the page prints them, from what `verdict.json` may hold: a number, None, or a string such as
``"nan"``.
"""

from __future__ import annotations

import math
import re

from mezzo.core.byte_counts import written_bytes

MISSING = "not measured"
MINUS = "\u2212"
# Control characters, bidirectional overrides, and halves of surrogate pairs (an argument that was not UTF-8). A browser
# would drop them, reorder the line by them, or refuse the file for them.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def printable(text: str) -> str:
    """The text, with each character that a browser would drop, obey or refuse shown as its code."""

    def code(match: re.Match[str]) -> str:
        number = ord(match.group())
        return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"

    return _UNPRINTABLE.sub(code, text.replace("\r\n", "\n"))


def number(value: object) -> float | None:
    """The value as a float, NaN and infinities included; None if it is not a number (a bool is not one either)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def finite(value: object) -> float | None:
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def pair(value: object) -> tuple[float, float] | None:
    """Two finite numbers, low then high, from a list of two; else None."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    low, high = finite(value[0]), finite(value[1])
    return None if low is None or high is None else (min(low, high), max(low, high))


def significant(value: object, digits: int = 4) -> str:
    """To so many significant digits, with a true minus sign (``−2.500e-07``, ``12,346``)."""
    found = number(value)
    if found is None:
        return MISSING
    if math.isnan(found):
        return "NaN"
    size = abs(found)
    if math.isinf(size):
        text = "infinity"
    elif size == 0:
        text = "0"
    else:
        text = f"{size:.{digits - 1}e}"
        if 1e-4 <= size < 1e6:
            text = f"{size:,.{max(0, digits - 1 - int(text.partition('e')[2]))}f}"
    return (MINUS if found < 0 else "") + text


def signed(value: object, digits: int = 3) -> str:
    found = number(value)
    return ("+" if found is not None and found > 0 else "") + significant(found, digits)


def ratio(value: object) -> str:
    found = finite(value)
    return MISSING if found is None else f"{found:,.2f}×"


def percent(value: object, digits: int = 2) -> str:
    """A share as a percentage, to so many significant digits, or to whole percents with 0."""
    found = finite(value)
    if found is None:
        return MISSING
    return (significant(100 * found, digits) if digits else f"{100 * found:.0f}") + "\u00a0%"


def share_text(share: float) -> str:
    """A share as a percentage that never rounds something to nothing: ``0``, ``<0.01 %``, ``3.2 %``."""
    shown = 100 * share
    if math.isnan(share) or share < 0:
        return "–"
    if share == 0:
        return "0"
    if shown < 0.01:
        return "<0.01\u00a0%"
    if shown >= 99.95:
        return "100\u00a0%" if share == 1 else ">99.9\u00a0%"
    return f"{shown:.2f}\u00a0%" if shown < 10 else f"{shown:.1f}\u00a0%"


def count(value: object) -> str:
    found = finite(value)
    return MISSING if found is None else f"{round(found):,}"


def counted(how_many: int, noun: str, plural: str = "") -> str:
    return f"{how_many:,} {noun if how_many == 1 else plural or noun + 's'}"


def listed(numbers: list[int], most: int) -> str:
    """Whole numbers in a row, the first `most` of them: ``1, 2, …``."""
    return ", ".join(f"{one:,}" for one in numbers[:most]) + (", …" if len(numbers) > most else "")


def size(value: object) -> str:
    found = finite(value)
    return MISSING if found is None else written_bytes(round(found))


def seconds(value: object) -> str:
    """A duration in the unit that suits it: ``182 ms``, ``7.28 s``, ``2 min 5 s``."""
    found = finite(value)
    if found is None:
        return MISSING
    for below, scale, unit in ((1e-3, 1e6, "µs"), (1, 1e3, "ms"), (60, 1, "s")):
        if found < below:
            return f"{significant(found * scale, 3)} {unit}"
    minutes, rest = divmod(round(found), 60)
    return f"{minutes} min {rest} s"


def power_of_two(exponent: float) -> str:
    return "2" + str(round(exponent)).translate(_SUPERSCRIPT)


def scale_text(value: float) -> str:
    """A loss scale: ``2¹⁶`` if it is a power of two, else ``1,000``; 1 is ``1``."""
    if value != 1 and 0 < value < math.inf and math.frexp(value)[0] == 0.5:
        return power_of_two(math.log2(value))
    return f"{value:,.6g}" if math.isfinite(value) else str(value)


def tick_label(value: float) -> str:
    """The number at a tick, as short as possible: ``0.02``, ``1,500``, ``1e-5``, ``20k``."""
    sign, size = (MINUS if value < 0 else ""), abs(value)
    if size and (size >= 1e7 or size < 1e-4):
        mantissa, power = f"{size:.2e}".split("e")
        return f"{sign}{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    if size >= 10_000:
        return f"{sign}{size / 1000:,.4g}k"
    return f"{sign}{float(f'{size:.6g}'):,.10g}"
