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
from fractions import Fraction
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mezzo.core import formats
from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.formats import ALIASES, FORMATS, OVERFLOW, Bits, Format, named
from mezzo.core.numerals import Number, exactly, parse, split, written

_FIELDS = {"sign": "bold red", "exponent": "green", "mantissa": "cyan"}
_WORDS = {
    "exact": "green",
    "rounded": "",
    "subnormal": "yellow",
    "underflow": "bold red",
    "overflow": "bold red",
}
_IN_JSON = (
    "bits nexp nmant storage_bits bias minexp maxexp max min smallest_normal smallest_subnormal eps epsneg precision "
    "resolution has_infinity"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    # argparse knows -4.2 for a number, but takes -4.2e9, -1/3, -0x1p3 and -inf for options.
    parser._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)
    parser.add_argument(
        "words", nargs="*", metavar="NAME | show NUMBER", help="formats, or numbers to show in each"
    )
    parser.add_argument(
        "--overflow", default="infinity", help=f"for what is beyond a format: {', '.join(OVERFLOW)}"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON (numbers that no float holds as strings)"
    )


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
        shown = {"formats": [_format_json(form) for form in asked]}
    if arguments.json:
        print(json.dumps({"schema": 1, **shown}, indent=2, allow_nan=False))
        return 0
    console = Console(highlight=False)
    if not numbers:
        _print_table(console, asked)
    for index, item in enumerate(numbers.items()):
        _print_number(console, *item, first=index == 0)
    return 0


@dataclass(frozen=True)
class Stored:
    """What a format makes of a number.

    Args:
        bits: its pattern in the format; ``bits.value`` is what is stored.
        absolute_error: ``|stored - number|``; infinite on overflow to infinity, NaN where either is NaN.
        relative_error: that over ``|number|``; 0 for a number that is stored exactly.
        word: ``exact``, ``rounded``, ``subnormal`` (stored with fewer bits than the format's precision,
            exactly or not), ``underflow`` (stored as zero) or ``overflow`` (beyond the largest value:
            infinite, NaN or saturated).
    """

    bits: Bits
    absolute_error: Number
    relative_error: Number
    word: str


def stored(number: Number, format: str, overflow: str = "infinity") -> Stored:
    """What the format makes of a number. The arguments are those of `mezzo.formats.round`.

    >>> [stored(x, "fp16").word for x in (65520.0, 1e-8, 2.0**-20, 0.1, 0.5)]
    ['overflow', 'underflow', 'subnormal', 'rounded', 'exact']
    """
    bits = formats.bits(number, format, overflow=overflow)
    exact, kept = split(number)[0], split(bits.value)[0]
    if exact is None or kept is None:  # NaN or an infinity, before or after
        same = exact is None and (bits.kind == "nan" if math.isnan(number) else bits.value == number)
        lost = 0.0 if same else math.nan if bits.kind == "nan" else math.inf
        return Stored(bits, lost, lost, "exact" if same else "overflow")
    error, largest = abs(kept - exact), bits.format.exact_max
    if error and bits.kind == "zero":
        word = "underflow"
    elif exact > largest and error > Fraction(formats.ulp(largest, bits.format)) / 2:
        word = "overflow"  # saturated: up to half a step above the largest it is rounded down like any other
    elif bits.kind == "subnormal":
        word = "subnormal"
    else:
        word = "rounded" if error else "exact"
    return Stored(bits, exactly(error), exactly(error / exact if exact else error), word)


def _format(word: str, words: list[str]) -> Format:
    """The format that a word names; raises an error that says how to show a number."""
    if word.lower() in (*FORMATS, *ALIASES):
        return named(word.lower())
    if word[-1:].isdigit() and not word[:1].isalpha():
        raise UsageError(f"to see what becomes of a number write: mezzo formats show {' '.join(words)}")
    raise unknown_name("word", word, [*FORMATS, *ALIASES, "show"], where="give NAME, or show NUMBER: ")


def _print_table(console: Console, formats: list[Format]) -> None:
    rows = [
        (
            form.name,
            f"1/{form.nexp}/{form.nmant}",
            *map(written, (form.max, form.smallest_normal, form.smallest_subnormal, form.eps)),
        )
        for form in formats
    ]
    heads = ("format", "bits", "largest", "normal from", "subnormal from", "eps")
    if console.width >= 79:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for head in heads:
            table.add_column(head, justify="left" if head == "format" else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        for row, form in zip(rows, formats):
            console.print(Text(form.name, style="bold"))
            for head, cell in zip(heads[1:], row[1:]):
                console.print(f"  {head:<16}{cell}", soft_wrap=True)
    console.print(
        "\nbits: sign/exponent/mantissa; eps: the gap between 1 and the next number above."
        "\n`mezzo formats show NUMBER` shows what becomes of a number in each."
    )


def _print_number(console: Console, word: str, found: list[Stored], *, first: bool) -> None:
    if not first:
        console.print()
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
        console.print(_bits(one, console), soft_wrap=True)


def _bits(one: Stored, console: Console) -> Text:
    digits = Text(" ").join(Text(field, style) for field, style in zip(one.bits.fields, _FIELDS.values()))
    indent = Text(" " * 10)
    width = max(console.width - len(indent), 20)
    if not console.is_terminal or len(digits) <= width:  # a pipe gets each pattern on one line
        return indent + digits
    return Text("\n").join(indent + line for line in digits.divide(range(width, len(digits), width)))


def _format_json(form: Format) -> dict[str, Any]:
    values = {name: _strict(getattr(form, name)) for name in _IN_JSON.split()}
    return {"name": form.name, "title": form.title, "source": form.source, **values}


def _number_json(word: str, found: list[Stored]) -> dict[str, Any]:
    return {
        "number": word,
        "formats": [
            {
                "name": one.bits.format.name,
                **dict(zip(_FIELDS, one.bits.fields)),
                "code": f"{one.bits.code:#0{2 + (one.bits.format.bits + 3) // 4}x}",
                "value": _strict(one.bits.value),
                "absolute_error": _nearest(one.absolute_error),
                "relative_error": _nearest(one.relative_error),
                "word": one.word,
            }
            for one in found
        ],
    }


def _nearest(value: Number) -> Any:
    """A JSON value for an error, which need not be exact: the nearest float, where that is a normal one."""
    if isinstance(value, float) or not 1e-300 < Fraction(value) < 1e300:
        return _strict(value)
    return float(value)


def _strict(value: Number) -> Any:
    """A JSON value: a number where a finite float or a small int holds it, else a string of 17 digits."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return value if isinstance(value, int) and abs(value) < 2**53 else written(value, 17)
