"""The number formats of mixed precision: range, precision, and the stored value of any number.

  mezzo formats                     range and precision of every format, as a table
  mezzo formats fp16                all about one format
  mezzo formats fp16 bf16           the table of these two
  mezzo formats show -4.2e9 1/3     how each format stores these numbers
  mezzo formats bf16 show 0.1       how bf16 stores 0.1
  mezzo formats nvfp4-plain         a recipe of block formats; also mine.toml

A number is a decimal (-4.2e9, 1e-400), a hexadecimal float (0x1.8p3), a fraction (1/3), a power (2^-24),
inf or nan.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from mezzo.core import formats
from mezzo.core.commands import say
from mezzo.core.compute import COMPUTE
from mezzo.core.errors import UsageError, did_you_mean, unknown_name
from mezzo.core.formats import ALIASES, FORMATS, Format, magnitude, named
from mezzo.core.policy_text import is_toml
from mezzo.core.recipes import FACTORS, RECIPES, SCALES, recipe_of
from mezzo.core.records import strict

_IN_JSON = (
    "name title source bits nexp nmant storage_bits bias minexp maxexp max min smallest_normal smallest_subnormal eps "
    "epsneg precision resolution has_infinity"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    # argparse takes -4.2 for a number, but -4.2e9, -1/3, -0x1p3 and -inf for options.
    parser._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)
    parser.add_argument("words", nargs="*", metavar="[FORMAT ...] [show NUMBER ...]", help="what to show")
    overflow = "result of a number beyond a format"
    parser.add_argument("--overflow", default="infinity", metavar="{infinity,saturate}", help=overflow)
    parser.add_argument("--json", action="store_true", help="print JSON (infinities and NaN as strings)")


def run(arguments: argparse.Namespace) -> int:
    """Print formats, or numbers in formats."""
    words: list[str] = arguments.words
    at = words.index("show") if "show" in words else len(words)
    asked = list(dict.fromkeys(form for word in words[:at] for form in _formats(word, words[:at])))
    forms, lines = asked or list(FORMATS.values()), list[str]()
    if at < len(words):
        numbers: list[dict[str, Any]] = []
        if not words[at + 1 :]:
            raise UsageError("show: no number is given. Example: mezzo formats show -4.2e9")
        for word in words[at + 1 :]:
            rows = [stored(parse(word), form.name, arguments.overflow) for form in forms]
            numbers.append({"number": word, "formats": rows})
            lines += _number_lines(word, rows)
        shown: dict[str, Any] = {"numbers": numbers}
    else:
        shown = {"formats": [{name: getattr(form, name) for name in _IN_JSON.split()} for form in forms]}
        lines += _format_lines(asked[0]) if len(asked) == 1 else _table_lines(forms)
        lines += ["One format: mezzo formats fp16. A number in each: mezzo formats show 0.1"] * (not words)
        recipes = filter(_is_recipe, dict.fromkeys(words[:at]))
        lines += [line for name in recipes for line in _recipe_lines(name)]
    if arguments.json:
        print(json.dumps(strict({"schema": 1, **shown}), indent=2, allow_nan=False))
        return 0
    say("\n".join(lines), out=True)
    return 0


def parse(text: str) -> float | Fraction:
    """The number that a text stands for, exactly.

    >>> parse("-4.2e9"), parse("0x1.8p3"), parse("1/3"), parse("2^-3"), parse("-0"), parse("1e-400") > 0
    (Fraction(-4200000000, 1), 12.0, Fraction(1, 3), Fraction(1, 8), -0.0, True)
    """
    plain = text.strip().lower().replace("**", "^")
    if plain in (*FORMATS, *ALIASES):
        show = f"mezzo formats {text}"
        raise UsageError(f"{text!r} is a format. To show it: {show}. To show a number in it: {show} show 0.1")
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
        raise UsageError(f"{text!r} is beyond every format: the largest number of fp64 is 1.8e308.") from None
    except (ArithmeticError, ValueError):
        raise UsageError(
            f"{text!r} is not a number. Write a decimal (-4.2e9), a hexadecimal float (0x1.8p3), a fraction (1/3), a "
            "power (2^-24), inf or nan."
        ) from None


def written(value: float, digits: int = 5) -> str:
    """A number in decimal, rounded to a number of significant digits.

    >>> written(65504.0), written(2.0**-24), written(-0.0), written(1e100)
    ('65504', '5.9605e-8', '-0', '1e100')
    """
    return re.sub(r"e([+-])0*", lambda match: "e" + match[1].strip("+"), f"{value:.{digits}g}")


def stored(number: float | Fraction, format: str, overflow: str = "infinity") -> dict[str, Any]:
    """How a format stores a number: a row of the JSON. The arguments are those of `mezzo.formats.round`.

    >>> [stored(x, "fp16")["word"] for x in (65520.0, 1e-8, 2.0**-20, 0.1, 0.5)]
    ['overflow', 'underflow', 'subnormal', 'rounded', 'exact']
    """
    form = named(format)
    if number != number and not form.has_nan:
        empty = dict.fromkeys(("sign", "exponent", "mantissa", "code"), "")
        errors = {"absolute_error": 0.0, "relative_error": 0.0}
        return {"name": form.name, **empty, "value": math.nan, **errors, "word": "no code"}
    bits = formats.bits(number, form, overflow=overflow)
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
        elif exact > largest and formats.bits(number, form).value != bits.value:
            word = "overflow"  # saturated; at half a step above the largest, ties to even decides
        elif exact > largest and error > Fraction(formats.ulp(largest, bits.format)) / 2:
            word = "overflow"  # in a format without infinity and NaN; below that a number is rounded as any other
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


def _formats(word: str, words: list[str]) -> list[Format]:
    """The format that a word names, or those of a precision; the error for a number has the command that shows it."""
    if word.lower() in (*FORMATS, *ALIASES):
        return [named(word.lower())]
    if word in COMPUTE:
        return [named(COMPUTE[word].forward), named(COMPUTE[word].backward)]
    if _is_recipe(word):
        return [named(factor.element) for factor in recipe_of(word, recipe=word).factors]
    known = {*FORMATS, *ALIASES, *COMPUTE, *RECIPES}
    if word[-1:].isdigit() and not word[:1].isalpha():
        order = sorted([*words, "show"], key=lambda one: 2 * (one.lower() not in known) - (one == "show"))
        raise UsageError(f"{word!r} is not a format. To show a number: mezzo formats {' '.join(order)}")
    if show := did_you_mean(word, ["show"], 0.7):
        raise UsageError(f"{word!r} is not a format.{show}")
    raise unknown_name("format", word, known)


def _is_recipe(word: str) -> bool:
    return word in RECIPES or is_toml(word)


def _format_lines(form: Format) -> Iterator[str]:
    """All about one format."""
    row = "  {:<20}{}".format
    yield f"{form.name}: {form.title}"
    yield row("bits", f"{form.bits} ({int(form.signed)} sign, {form.nexp} exponent, {form.nmant} mantissa)")
    yield row("largest", written(form.max))
    yield row("smallest normal", written(form.smallest_normal))
    yield row("smallest subnormal", written(form.smallest_subnormal))
    yield row("eps", f"{written(form.eps)} (the gap between 1 and the next number above)")
    beyond = "NaN" if form.has_nan else "the largest number"
    yield row("infinity", "yes" if form.has_infinity else f"no: beyond the largest number is {beyond}")
    names = [other for other, name in ALIASES.items() if name == form.name]
    yield row("other names", ", ".join(names) or "none")
    users = [each.name for each in COMPUTE.values() if form.name in (each.forward, each.backward)]
    yield row("use it", " or ".join(f"--precision {name}" for name in users) or "no precision computes in it")
    yield row("defined in", form.source)


def _recipe_lines(name: str) -> Iterator[str]:
    """The elements, blocks and scales of a linear layer's six factors."""
    recipe, row = recipe_of(name, recipe=name), "  {:<20}{}".format
    yield f"{name}: in the products of a linear layer, a block (rows x elements of the sum) has one scale"
    places = (f"{product.replace('_', ' ')}, {one}" for product, names in FACTORS.items() for one in names)
    for place, factor in zip(places, recipe.factors):
        block = " x ".join(str(size or "all") for size in factor.block)
        extra = ", stochastic rounding" * factor.stochastic + ", Hadamard transform" * factor.hadamard
        yield row(place, f"{factor.element}, {block}{extra}")
    for scale in dict.fromkeys(factor.scale for factor in recipe.factors):
        yield row(f"scale {scale}", SCALES[scale])


def _table_lines(forms: Sequence[Format]) -> Iterator[str]:
    row = "{:<6}{:>8}{:>11}{:>12}{:>12}{:>11}".format
    yield row("format", "bits", "largest", "normal", "subnormal", "eps")
    for form in forms:
        numbers = map(written, (form.max, form.smallest_normal, form.smallest_subnormal, form.eps))
        yield row(form.name, f"{int(form.signed)}/{form.nexp}/{form.nmant}", *numbers)
    yield ""
    yield "bits: sign/exponent/mantissa; normal, subnormal: the smallest; eps: from 1 to the next number."


def _number_lines(number: str, formats: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{number} in each format (sign exponent mantissa)"
    for one in formats:
        error = ""
        if one["absolute_error"]:
            absolute, relative = (written(one[f"{kind}_error"], 3) for kind in ("absolute", "relative"))
            error = f"   error {absolute}, relative {relative}"
        yield f"{one['name']:<10}{one['word']:<10} {written(one['value'], 12)}{error}"
        fields = " ".join(filter(None, (one["sign"], one["exponent"], one["mantissa"])))
        yield f"{'':<10}{fields}".rstrip()
