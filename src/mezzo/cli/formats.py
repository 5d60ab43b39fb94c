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
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

from mezzo.core import formats
from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.formats import ALIASES, FORMATS, OVERFLOW, Format, magnitude, named
from mezzo.core.records import strict

_IN_JSON = (
    "name title source bits nexp nmant storage_bits bias minexp maxexp max min smallest_normal smallest_subnormal eps "
    "epsneg precision resolution has_infinity"
)


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
        numbers: list[dict[str, Any]] = [
            {"number": word, "formats": [stored(parse(word), name, arguments.overflow) for name in FORMATS]}
            for word in words[1:]
        ]
        shown: dict[str, Any] = {"numbers": numbers}
        lines: Iterable[str] = chain.from_iterable(
            _number_lines(row["number"], row["formats"]) for row in numbers
        )
    else:
        asked = [_format(word, words) for word in words] or list(FORMATS.values())
        shown = {"formats": [{name: getattr(form, name) for name in _IN_JSON.split()} for form in asked]}
        lines = _table_lines(asked)
    if arguments.json:
        print(json.dumps(strict({"schema": 1, **shown}), indent=2, allow_nan=False))
        return 0
    print("\n".join(lines))
    return 0


def parse(text: str) -> float | Fraction:
    """The number that a text stands for, exactly.

    >>> parse("-4.2e9"), parse("0x1.8p3"), parse("1/3"), parse("2^-3"), parse("-0"), parse("1e-400") > 0
    (Fraction(-4200000000, 1), 12.0, Fraction(1, 3), Fraction(1, 8), -0.0, True)

    Raises:
        UsageError: not a number, a division by zero, or one far beyond every format's range.
    """
    plain = text.strip().lower().replace("**", "^")
    try:
        if re.fullmatch(r"[+-]?(inf|infinity|nan)", plain):
            return float(plain)
        if "0x" in plain:
            return float.fromhex(plain)
        if power := re.fullmatch(r"([+-]?)2\^([+-]?\d{1,4})", plain):
            return Fraction(2) ** int(power[2]) * (-1 if power[1] == "-" else 1)
        if re.search(r"\d{2000}|e[+-]?\d{5}", plain):
            raise OverflowError
        return Fraction(plain) or float(plain.partition("/")[0])  # -0 keeps its sign
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


def stored(number: float | Fraction, format: str, overflow: str = "infinity") -> dict[str, Any]:
    """What the format makes of a number: a row of the JSON. The arguments are those of `mezzo.formats.round`.

    >>> [stored(x, "fp16")["word"] for x in (65520.0, 1e-8, 2.0**-20, 0.1, 0.5)]
    ['overflow', 'underflow', 'subnormal', 'rounded', 'exact']
    """
    bits = formats.bits(number, format, overflow=overflow)
    exact, kept = magnitude(number)[0], magnitude(bits.value)[0]
    if exact is None or kept is None:  # NaN or an infinity, before or after
        same = exact is None and (bits.kind == "nan" if math.isnan(number) else bits.value == number)
        absolute = relative = 0.0 if same else math.nan if bits.kind == "nan" else math.inf
        word = "exact" if same else "overflow"
    else:
        error, largest = abs(kept - exact), bits.format.max
        absolute, relative = formats.round(error, "fp64"), formats.round(error / (exact or 1), "fp64")
        word = "rounded" if error else "exact"
        if error and bits.kind == "zero":
            word = "underflow"
        elif exact > largest and error > Fraction(formats.ulp(largest, bits.format)) / 2:
            word = "overflow"  # up to half a step above the largest a number is rounded down like any other
        elif bits.kind == "subnormal":
            word = "subnormal"
    return {
        "name": bits.format.name,
        **dict(zip(("sign", "exponent", "mantissa"), bits.fields)),
        "code": f"{bits.code:#0{2 + (bits.format.bits + 3) // 4}x}",
        "value": bits.value,
        "absolute_error": absolute,
        "relative_error": relative,
        "word": word,
    }


def _format(word: str, words: list[str]) -> Format:
    """The format that a word names; the error for a number says how to show it."""
    if word.lower() in (*FORMATS, *ALIASES):
        return named(word.lower())
    if word[-1:].isdigit() and not word[:1].isalpha():
        raise UsageError(f"to see what becomes of a number write: mezzo formats show {' '.join(words)}")
    raise unknown_name("word", word, [*FORMATS, *ALIASES, "show"], where="give NAME, or show NUMBER: ")


def _table_lines(forms: Sequence[Format]) -> Iterator[str]:
    row = "{:<8}{:>8}{:>14}{:>14}{:>17}{:>14}".format
    yield row("format", "bits", "largest", "normal from", "subnormal from", "eps")
    for form in forms:
        numbers = map(written, (form.max, form.smallest_normal, form.smallest_subnormal, form.eps))
        yield row(form.name, f"1/{form.nexp}/{form.nmant}", *numbers)
    yield "\nbits: sign/exponent/mantissa; eps: the gap between 1 and the next number above."
    yield "`mezzo formats show NUMBER` shows what becomes of a number in each."


def _number_lines(number: str, formats: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{number} in each format (sign exponent mantissa)"
    for one in formats:
        error = ""
        if one["absolute_error"]:
            absolute, relative = (written(one[f"{kind}_error"], 3) for kind in ("absolute", "relative"))
            error = f"   error {absolute}, relative {relative}"
        yield f"{one['name']:<10}{one['word']:<10} {written(one['value'], 12)}{error}"
        yield f"{'':<10}{one['sign']} {one['exponent']} {one['mantissa']}"
