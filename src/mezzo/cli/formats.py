"""The number formats that mixed precision chooses from, and any number's bits in each of them.

  mezzo formats                     the table: range and precision of every format
  mezzo formats fp16 bfloat16       the table of these
  mezzo formats show -4.2e9 1/3     what becomes of these numbers in every format

A number is a decimal (-4.2e9, 1e-400), a hexadecimal float (0x1.8p3), a fraction (1/3), a power (2^-24),
inf or nan.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from rich.console import Console
from rich.text import Text

from mezzo.cli.tables import plain_table
from mezzo.core import formats
from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.formats import ALIASES, FORMATS, OVERFLOW, Bits, Format, magnitude, named

_FIELDS = {"sign": "bold red", "exponent": "green", "mantissa": "cyan"}
_WORDS = {
    "exact": "green",
    "rounded": "",
    "subnormal": "yellow",
    "underflow": "bold red",
    "overflow": "bold red",
}
_IN_JSON = (
    "name title source bits nexp nmant storage_bits bias minexp maxexp max min smallest_normal smallest_subnormal eps "
    "epsneg precision resolution has_infinity"
)
_LARGEST_EXPONENT = 2000  # beyond fp64 on both sides, and still read at once


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    # argparse takes -4.2 for a number, but -4.2e9, -1/3, -0x1p3 and -inf for options.
    parser._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)
    parser.add_argument(
        "words", nargs="*", metavar="NAME | show NUMBER", help="formats, or numbers to show in each"
    )
    parser.add_argument(
        "--overflow", default="infinity", help=f"for what is beyond a format: {', '.join(OVERFLOW)}"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (infinities and NaN as strings)")


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or numbers' bits."""
    words: list[str] = arguments.words
    if words[:1] == ["show"]:
        if not words[1:]:
            raise UsageError("nothing to show: give a number, for instance `mezzo formats show -4.2e9`")
        numbers = {
            word: [stored(parse(word), name, arguments.overflow) for name in FORMATS] for word in words[1:]
        }
        shown: dict[str, Any] = {"numbers": [_number_json(*item) for item in numbers.items()]}
    else:
        asked, numbers = [_format(word, words) for word in words] or list(FORMATS.values()), {}
        shown = {
            "formats": [{name: getattr(form, name) for name in _IN_JSON.split()} for form in asked],
        }
    if arguments.json:
        print(json.dumps({"schema": 1, **shown}, indent=2, allow_nan=False))
        return 0
    console = Console(highlight=False)
    if not numbers:
        _print_table(console, asked)
    for index, (word, found) in enumerate(numbers.items()):
        if index:
            console.print()
        _print_number(console, word, found)
    return 0


def parse(text: str) -> float | Fraction:
    """The number that a text stands for, exactly.

    >>> parse("-4.2e9"), parse("0x1.8p3"), parse("1/3"), parse("2^-3"), parse("-0"), parse("1e-400") > 0
    (Fraction(-4200000000, 1), 12.0, Fraction(1, 3), Fraction(1, 8), -0.0, True)

    Raises:
        UsageError: not a number, a division by zero, or one far beyond every format's range.
    """
    plain = text.strip().lower().replace("**", "^")
    over, _, under = plain.partition("/")
    try:
        if re.fullmatch(r"[+-]?(inf|infinity|nan)", plain):
            return float(plain)
        if "0x" in plain:
            return float.fromhex(plain)
        if power := re.fullmatch(r"([+-]?)2\^([+-]?\d{1,4})", plain):
            return Fraction(2) ** int(power[2]) * (-1 if power[1] == "-" else 1)
        parts = [Decimal(part) for part in (over, under or "1")]
        if any(part and abs(part.adjusted()) > _LARGEST_EXPONENT for part in parts):
            raise OverflowError
        return Fraction(parts[0]) / Fraction(parts[1]) if parts[0] else float(parts[0])
    except OverflowError:
        raise UsageError(f"{text!r} is beyond every format: fp64, the largest, ends at 1.8e308") from None
    except (ArithmeticError, ValueError):
        raise UsageError(
            f"{text!r} is not a number: write a decimal (-4.2e9), a hexadecimal float (0x1.8p3), a fraction (1/3), a "
            "power (2^-24), inf or nan"
        ) from None


def written(value: float, digits: int = 5) -> str:
    """A number in decimal, to so many significant digits.

    >>> written(65504.0), written(2.0**-24), written(-0.0), written(1e100)
    ('65504', '5.9605e-8', '-0', '1e100')
    """
    return re.sub(r"e([+-])0*", lambda match: "e" + match[1].strip("+"), f"{value:.{digits}g}")


@dataclass(frozen=True)
class Stored:
    """What a format makes of a number.

    Args:
        bits: its pattern in the format; ``bits.value`` is what is stored.
        absolute_error: ``|stored - number|``; infinite on overflow to infinity, NaN if either is NaN.
        relative_error: that over ``|number|``; 0 for a number that is stored exactly.
        word: ``exact``, ``rounded``, ``subnormal`` (stored with fewer bits than the format's precision,
            exactly or not), ``underflow`` (stored as zero) or ``overflow`` (beyond the largest value:
            infinite, NaN or saturated).
    """

    bits: Bits
    absolute_error: float
    relative_error: float
    word: str


def stored(number: float | Fraction, format: str, overflow: str = "infinity") -> Stored:
    """What the format makes of a number. The arguments are those of `mezzo.formats.round`.

    >>> [stored(x, "fp16").word for x in (65520.0, 1e-8, 2.0**-20, 0.1, 0.5)]
    ['overflow', 'underflow', 'subnormal', 'rounded', 'exact']
    """
    bits = formats.bits(number, format, overflow=overflow)
    exact, kept = magnitude(number)[0], magnitude(bits.value)[0]
    if exact is None or kept is None:  # NaN or an infinity, before or after
        same = exact is None and (bits.kind == "nan" if math.isnan(number) else bits.value == number)
        lost = 0.0 if same else math.nan if bits.kind == "nan" else math.inf
        return Stored(bits, lost, lost, "exact" if same else "overflow")
    error, largest = abs(kept - exact), bits.format.max
    if error and bits.kind == "zero":
        word = "underflow"
    elif exact > largest and error > Fraction(formats.ulp(largest, bits.format)) / 2:
        word = "overflow"  # saturated: up to half a step above the largest it is rounded down like any other
    elif bits.kind == "subnormal":
        word = "subnormal"
    else:
        word = "rounded" if error else "exact"
    return Stored(bits, _float(error), _float(error / exact if exact else error), word)


def _float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _format(word: str, words: list[str]) -> Format:
    """The format that a word names; the error for a number says how to show it."""
    if word.lower() in (*FORMATS, *ALIASES):
        return named(word.lower())
    if word[-1:].isdigit() and not word[:1].isalpha():
        raise UsageError(f"to see what becomes of a number write: mezzo formats show {' '.join(words)}")
    raise unknown_name("word", word, [*FORMATS, *ALIASES, "show"], where="give NAME, or show NUMBER: ")


def _print_table(console: Console, formats: list[Format]) -> None:
    heads = ("format", "bits", "largest", "normal from", "subnormal from", "eps")
    rows = [
        (
            form.name,
            f"1/{form.nexp}/{form.nmant}",
            *map(written, (form.max, form.smallest_normal, form.smallest_subnormal, form.eps)),
        )
        for form in formats
    ]
    if console.width >= 79:
        console.print(plain_table(heads, rows, justify="right"))
    else:
        for name, *cells in rows:
            console.print(Text(name, style="bold"))
            for head, cell in zip(heads[1:], cells):
                console.print(f"  {head:<16}{cell}", soft_wrap=True)
    console.print(
        "\nbits: sign/exponent/mantissa; eps: the gap between 1 and the next number above."
        "\n`mezzo formats show NUMBER` shows what becomes of a number in each."
    )


def _print_number(console: Console, word: str, found: list[Stored]) -> None:
    legend = Text(" ").join(Text(field, style) for field, style in _FIELDS.items())
    console.print(Text.assemble((word, "bold"), " in each format (", legend, ")"))
    for one in found:
        line = Text.assemble((f"{one.bits.format.name:<10}", "bold"), (f"{one.word:<10}", _WORDS[one.word]))
        line.append(f" {written(one.bits.value, 12)}")
        if one.absolute_error:
            line.append(
                f"   error {written(one.absolute_error, 3)}, relative {written(one.relative_error, 3)}"
            )
        console.print(line, soft_wrap=True)
        digits = Text(" ").join(Text(field, style) for field, style in zip(one.bits.fields, _FIELDS.values()))
        console.print(Text(" " * 10) + digits, soft_wrap=True)


def _number_json(word: str, found: list[Stored]) -> dict[str, Any]:
    rows = [
        {
            "name": one.bits.format.name,
            **dict(zip(_FIELDS, one.bits.fields)),
            "code": f"{one.bits.code:#0{2 + (one.bits.format.bits + 3) // 4}x}",
            "value": _strict(one.bits.value),
            "absolute_error": _strict(one.absolute_error),
            "relative_error": _strict(one.relative_error),
            "word": one.word,
        }
        for one in found
    ]
    return {"number": word, "formats": rows}


def _strict(value: float) -> float | str:
    """A JSON value: infinities and NaN as strings."""
    return value if math.isfinite(value) else str(value)
