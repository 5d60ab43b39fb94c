"""The table of formats, against the figures of the standards and against three other libraries' finfo."""

from __future__ import annotations

import doctest
import math
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import mezzo
from mezzo.core import bits, formats, rounding
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.formats import FORMATS, Format
from mezzo.core.numerals import written

DOCS = Path(__file__).parent.parent / "docs"

# name: sign/exponent/mantissa, largest, log2 of the smallest normal, of the smallest subnormal, of eps
TABLE = {
    "fp64": ((1, 11, 52), float.fromhex("0x1.fffffffffffffp+1023"), -1022, -1074, -52),
    "fp32": ((1, 8, 23), 3.4028234663852886e38, -126, -149, -23),
    "tf32": ((1, 8, 10), float.fromhex("0x1.ffcp+127"), -126, -136, -10),
    "fp16": ((1, 5, 10), 65504.0, -14, -24, -10),
    "bf16": ((1, 8, 7), 3.3895313892515355e38, -126, -133, -7),
    "e4m3fn": ((1, 4, 3), 448.0, -6, -9, -3),
    "e5m2": ((1, 5, 2), 57344.0, -14, -16, -2),
    "binary128": ((1, 15, 112), 2**16384 - 2**16271, -16382, -16494, -112),
    "binary256": ((1, 19, 236), 2**262144 - 2**261907, -262142, -262378, -236),
}


def test_the_table_has_a_row_for_each_format_and_no_other() -> None:
    assert list(TABLE) == list(FORMATS)


@pytest.mark.parametrize("name", TABLE)
def test_a_format_is_what_its_standard_says(name: str) -> None:
    widths, largest, normal, subnormal, eps = TABLE[name]
    form = FORMATS[name]
    assert (1, form.nexp, form.nmant) == widths
    assert form.bits == sum(widths)
    assert form.max == largest
    assert form.min == -largest
    assert form.exact_max == largest
    assert form.smallest_normal == form.tiny == formats.power_of_two(normal)
    assert form.smallest_subnormal == formats.power_of_two(subnormal)
    assert form.eps == formats.power_of_two(eps)
    assert form.epsneg == formats.power_of_two(eps - 1)
    assert form.minexp == normal
    assert largest < formats.power_of_two(form.maxexp) <= 2 * Fraction(largest)
    assert form.bias == 2 ** (widths[1] - 1) - 1


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
def test_properties_are_floats_where_a_float_holds_them_and_exact_where_not(form: Format) -> None:
    for name in ("max", "min", "smallest_normal", "smallest_subnormal", "eps", "epsneg", "resolution"):
        value = getattr(form, name)
        wide = form.name in ("binary128", "binary256") and name in (
            "max",
            "min",
            "smallest_normal",
            "smallest_subnormal",
        )
        assert isinstance(value, float) is not wide, name


# Other libraries have these formats too: (format, library, its finfo, where it differs from ours and why).
_ONE_DIGIT = "counts one decimal digit where numpy's rule (and torch's resolution) counts none"
_ROUNDED = "resolution is rounded to the format itself"
FINFO = [
    ("fp64", np.finfo(np.float64), {}),
    ("fp32", np.finfo(np.float32), {"resolution": _ROUNDED}),
    ("fp16", np.finfo(np.float16), {"resolution": _ROUNDED}),
    ("bf16", ml_dtypes.finfo(ml_dtypes.bfloat16), {"resolution": _ROUNDED}),
    ("e4m3fn", ml_dtypes.finfo(ml_dtypes.float8_e4m3fn), {"precision": _ONE_DIGIT, "resolution": _ONE_DIGIT}),
    ("e5m2", ml_dtypes.finfo(ml_dtypes.float8_e5m2), {"precision": _ONE_DIGIT, "resolution": _ONE_DIGIT}),
    ("fp64", torch.finfo(torch.float64), {}),
    ("fp32", torch.finfo(torch.float32), {}),
    ("fp16", torch.finfo(torch.float16), {}),
    ("bf16", torch.finfo(torch.bfloat16), {}),
    ("e4m3fn", torch.finfo(torch.float8_e4m3fn), {}),
    ("e5m2", torch.finfo(torch.float8_e5m2), {}),
]
NAMES = (
    *(
        "bits",
        "eps",
        "epsneg",
        "max",
        "min",
        "tiny",
        "smallest_normal",
        "smallest_subnormal",
        "nmant",
        "nexp",
    ),
    *("maxexp", "minexp", "machep", "negep", "precision", "resolution"),
)


@pytest.mark.parametrize(("name", "oracle", "differs"), FINFO, ids=lambda v: type(v).__module__ if v else "")
def test_properties_agree_with_finfo(name: str, oracle: object, differs: dict[str, str]) -> None:
    seen = 0
    for attribute in NAMES:
        if not hasattr(oracle, attribute):
            continue
        ours, theirs = getattr(FORMATS[name], attribute), getattr(oracle, attribute)
        assert (float(ours) == float(theirs)) is (attribute not in differs), (attribute, ours, theirs)
        seen += 1
    assert seen >= 7


def test_mezzo_formats_is_this_module_and_its_names_resolve() -> None:
    assert mezzo.formats is formats
    assert formats.named("bf16") is FORMATS["bf16"]
    assert formats.named(FORMATS["bf16"]) is FORMATS["bf16"]
    assert str(FORMATS["tf32"]) == "tf32"
    assert FORMATS["tf32"].storage_bits == 32
    assert FORMATS["fp16"].storage_bits == 16


# call -> what the message must hold
WRONG = [
    (lambda: formats.named("f16"), "unknown format 'f16'. Use one of bf16, binary128"),
    (lambda: formats.named("f16"), "Did you mean 'fp16'?"),
    (
        lambda: formats.round(1.0, "bf16", overflow="wrap"),
        "unknown overflow behaviour 'wrap'. Use one of infinity, saturate.",
    ),
    (lambda: formats.bits(1.0, "bf16", overflow="inf"), "Did you mean 'infinity'?"),
    (lambda: formats.round([1.0], "bf16"), "cannot round list '[1.0]'"),
    (lambda: formats.round("1.0", "bf16"), "give a float, int, Fraction or Decimal"),
    (lambda: formats.decode(0x10000, "fp16"), "0x10000 is no fp16: its 16 bits hold 0 to 0xffff"),
    (lambda: formats.decode(-1, "e5m2"), "its 8 bits hold 0 to 0xff"),
    (lambda: bits.Bits(0, 16, 0, FORMATS["e4m3fn"]), "exponent 16 does not fit e4m3fn: it is 0 to 15"),
    (lambda: bits.Bits(2, 1, 0, FORMATS["e4m3fn"]), "sign 2 does not fit e4m3fn: it is 0 to 1"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_a_wrong_argument_is_told_how_to_mend_it(call: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()  # type: ignore[operator]
    assert message in str(caught.value)
    assert isinstance(caught.value, UnknownNameError) is ("unknown" in message or "mean" in message)


def test_exactly_gives_the_plainest_type() -> None:
    assert isinstance(formats.exactly(Fraction(1, 4)), float)
    assert formats.exactly(Fraction(1, 3)) == Fraction(1, 3)
    assert isinstance(formats.exactly(Fraction(2**53 + 1)), int)
    assert isinstance(formats.exactly(Fraction(2**2000)), int)
    assert isinstance(formats.exactly(Fraction(2**2000 + 1, 2)), Fraction)
    assert isinstance(formats.exactly(formats.power_of_two(-1075)), Fraction)
    assert math.copysign(1, formats.round(-0.0, "binary128")) == -1


@pytest.mark.parametrize("module", [formats, rounding, bits], ids=lambda m: m.__name__)
def test_the_examples_in_the_docstrings_are_true(module: object) -> None:
    failed, _ = doctest.testmod(module)  # type: ignore[arg-type]
    assert failed == 0


def test_the_examples_of_the_page_on_numerics_are_true() -> None:
    failed, tried = doctest.testfile(str(DOCS / "numerics.md"), module_relative=False)
    assert failed == 0
    assert tried >= 20


def test_the_table_of_the_page_on_numerics_is_the_table() -> None:
    lines = (DOCS / "numerics.md").read_text(encoding="utf-8").splitlines()
    rows = {
        cells[0]: cells[1:] for line in lines if (cells := [c.strip() for c in line.strip("|").split("|")])
    }
    for form in FORMATS.values():
        powers = [form.minexp, form.minexp - form.nmant, form.machep]
        expected = [f"1/{form.nexp}/{form.nmant}", written(form.max), *(f"2^{power}" for power in powers)]
        assert rows[form.name] == expected
