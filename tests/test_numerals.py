"""Numbers read from text and written as text, exactly, of any size; and what becomes of them in a format."""

from __future__ import annotations

import doctest
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.core import fate as fate_module
from mezzo.core import formats, numerals
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.fate import fate
from mezzo.core.numerals import parse, written

READ = [
    ("-4.2e9", -4.2e9),
    (" +1_000.5 ", 1000.5),
    (".5", 0.5),
    ("5.", 5.0),
    ("1E3", 1000.0),
    ("0x1.8p3", 12.0),
    ("-0X.1P-4", -(2.0**-8)),
    ("0xff", 255.0),
    ("1/3", Fraction(1, 3)),
    ("-1.5/2e1", -0.075),
    ("2^-24", 2.0**-24),
    ("2**100", 2.0**100),
    ("-2^-16494", Fraction(-1, 2**16494)),
    ("1e-400", Fraction(1, 10**400)),
    ("1e400", 10**400),
    ("inf", math.inf),
    ("-Infinity", -math.inf),
    ("9007199254740993", 2**53 + 1),
    ("0", 0.0),
]


@pytest.mark.parametrize(("text", "number"), READ, ids=[row[0] for row in READ])
def test_a_numeral_is_read_exactly(text: str, number: object) -> None:
    if text == "-1.5/2e1":
        number = Fraction(-3, 40)
    assert parse(text) == number
    assert type(parse(text)) is type(number)


def test_signs_of_zero_and_nan_are_read() -> None:
    assert math.copysign(1, parse("-0")) == math.copysign(1, parse("-0x0p0")) == -1
    assert math.copysign(1, parse("0.0")) == 1
    assert math.isnan(parse("NaN"))
    assert math.copysign(1, parse("-nan")) == -1


@given(st.floats(allow_nan=False))
def test_every_float_comes_back_from_both_of_pythons_notations(x: float) -> None:
    assert parse(x.hex()) == x
    for text in (repr(x), x.hex()):
        number = formats.round(parse(text), "fp64")
        assert number == x
        assert math.copysign(1, number) == math.copysign(1, x)


@given(st.fractions())
def test_every_fraction_comes_back(x: Fraction) -> None:
    assert Fraction(parse(f"{x.numerator}/{x.denominator}")) == x


UNREADABLE = [
    ("", "'' is no number: write a decimal (-4.2e9)"),
    ("foo", "'foo' is no number"),
    ("1e", "is no number"),
    ("--1", "is no number"),
    ("0x", "is no number"),
    ("0xp3", "is no number"),
    ("1/0", "'1/0' divides by zero"),
    ("1//3", "is no number"),
    ("1e999999999", "beyond every format: use powers of ten up to 100000"),
    ("1/1e-999999999", "beyond every format"),
    ("2^999999999", "beyond every format: use powers of two up to 400000"),
    ("0x1p-999999999", "beyond every format"),
    ("1" * 5000, "a number of 5000 characters is more than can be read: use at most 4000"),
]


@pytest.mark.parametrize(("text", "message"), UNREADABLE)
def test_a_bad_numeral_is_told_how_to_mend_it(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert message in str(caught.value)


WRITTEN = [
    (65504.0, 5, "65504"),
    (65504.0, 3, "65500"),
    (-4.2e9, 12, "-4200000000"),
    (-4.2e9, 5, "-4.2e9"),
    (0.1, 12, "0.1"),
    (0.0999755859375, 12, "0.0999755859375"),
    (2.0**-149, 5, "1.4013e-45"),
    (math.inf, 5, "inf"),
    (-math.inf, 5, "-inf"),
    (math.nan, 5, "nan"),
    (0.0, 5, "0"),
    (-0.0, 5, "-0"),
    (0, 5, "0"),
    (Fraction(1, 10**5000), 5, "1e-5000"),
    (10**70000 + 1, 5, "1e70000"),
    (999999.6, 6, "1e6"),
]


@pytest.mark.parametrize(("value", "digits", "text"), WRITTEN, ids=[row[2] for row in WRITTEN])
def test_a_number_is_written_in_so_many_digits(value: float, digits: int, text: str) -> None:
    assert written(value, digits) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_seventeen_digits_say_which_float_it_is(x: float) -> None:
    assert float(written(x, 17)) == x


FATES = [
    # number, format, overflow, stored, absolute error, word
    (1.0, "fp16", "infinity", 1.0, 0.0, "exact"),
    (0.0, "fp16", "infinity", 0.0, 0.0, "exact"),
    (-0.0, "fp16", "infinity", -0.0, 0.0, "exact"),
    (2049, "fp16", "infinity", 2048.0, 1.0, "rounded"),
    (65519, "fp16", "infinity", 65504.0, 15.0, "rounded"),
    (65519, "fp16", "saturate", 65504.0, 15.0, "rounded"),
    (65520, "fp16", "infinity", math.inf, math.inf, "overflow"),
    (-65537, "fp16", "saturate", -65504.0, 33.0, "overflow"),
    (464, "e4m3fn", "infinity", 448.0, 16.0, "rounded"),
    (465, "e4m3fn", "infinity", math.nan, math.nan, "overflow"),
    (465, "e4m3fn", "saturate", 448.0, 17.0, "overflow"),
    (2.0**-25, "fp16", "infinity", 0.0, 2.0**-25, "underflow"),
    (2.0**-24, "fp16", "infinity", 2.0**-24, 0.0, "subnormal"),
    (1.5 * 2.0**-24, "fp16", "infinity", 2.0**-23, 2.0**-25, "subnormal"),
    (math.inf, "fp16", "infinity", math.inf, 0.0, "exact"),
    (math.inf, "fp16", "saturate", 65504.0, math.inf, "overflow"),
    (math.inf, "e4m3fn", "infinity", math.nan, math.nan, "overflow"),
    (math.nan, "e4m3fn", "infinity", math.nan, 0.0, "exact"),
    (math.nan, "fp16", "saturate", math.nan, 0.0, "exact"),
    (Fraction(10**400), "binary128", "infinity", None, None, "rounded"),
]


@pytest.mark.parametrize(
    ("number", "name", "overflow", "stored", "error", "word"), FATES, ids=[str(k) for k in range(len(FATES))]
)
def test_fate(
    number: float, name: str, overflow: str, stored: float | None, error: float | None, word: str
) -> None:
    found = fate(number, name, overflow=overflow)
    assert found.word == word
    if stored is not None and error is not None:
        assert str(float(found.bits.value)) == str(stored)
        assert str(float(found.absolute_error)) == str(error)
        if error and math.isfinite(error):
            assert Fraction(found.relative_error) == Fraction(error) / abs(Fraction(number))


def test_fate_refuses_unknown_names() -> None:
    with pytest.raises(UnknownNameError, match="unknown format 'fp17'"):
        fate(1.0, "fp17")
    with pytest.raises(UnknownNameError, match="unknown overflow behaviour 'sat'"):
        fate(1.0, "fp16", overflow="sat")


@pytest.mark.parametrize("module", [numerals, fate_module], ids=lambda m: m.__name__)
def test_the_examples_in_the_docstrings_are_true(module: object) -> None:
    failed, _ = doctest.testmod(module)  # type: ignore[arg-type]
    assert failed == 0
