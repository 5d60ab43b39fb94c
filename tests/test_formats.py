"""The table of formats against the standards and three other libraries' finfo; and `mezzo formats`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mezzo
from mezzo.cli.formats import parse, stored, written
from mezzo.cli.main import main
from mezzo.core import formats
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.formats import FORMATS, Format
from mezzo.core.recipes import recipe_of

DOCS = Path(__file__).parent.parent / "docs"
Captured = pytest.CaptureFixture[str]

# name: sign/exponent/mantissa, largest, log2 of the smallest normal, of the smallest subnormal, of eps
TABLE = {
    "fp64": ((1, 11, 52), float.fromhex("0x1.fffffffffffffp+1023"), -1022, -1074, -52),
    "fp32": ((1, 8, 23), 3.4028234663852886e38, -126, -149, -23),
    "tf32": ((1, 8, 10), float.fromhex("0x1.ffcp+127"), -126, -136, -10),
    "fp16": ((1, 5, 10), 65504.0, -14, -24, -10),
    "bf16": ((1, 8, 7), 3.3895313892515355e38, -126, -133, -7),
    "e4m3fn": ((1, 4, 3), 448.0, -6, -9, -3),
    "e5m2": ((1, 5, 2), 57344.0, -14, -16, -2),
    "e3m2": ((1, 3, 2), 28.0, -2, -4, -2),
    "e2m3": ((1, 2, 3), 7.5, 0, -3, -3),
    "e2m1": ((1, 2, 1), 6.0, 0, -1, -1),
    "e8m0": ((0, 8, 0), 2.0**127, -127, -127, 0),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_format_is_what_its_standard_says(name: str) -> None:
    assert list(TABLE) == list(FORMATS)
    widths, largest, normal, subnormal, eps = TABLE[name]
    form = FORMATS[name]
    assert (form.signed, form.nexp, form.nmant) == widths
    assert form.bits == sum(widths)
    assert form.max == largest
    assert form.min == (-largest if form.signed else 2.0**normal)
    assert (form.smallest_normal, form.smallest_subnormal) == (2.0**normal, 2.0**subnormal)
    assert (form.eps, form.epsneg) == (2.0**eps, max(2.0 ** (eps - 1), 2.0**subnormal))
    assert (form.minexp, form.bias) == (normal, 2 ** (widths[1] - 1) - 1)
    assert largest < Fraction(2) ** form.maxexp <= 2 * Fraction(largest)


# Other libraries have these formats too: (format, its finfo, where it differs from ours).
# ml_dtypes counts one decimal digit of fp8, where numpy's rule and torch count none; numpy and ml_dtypes round the
# resolution to the format itself.
FINFO = [
    ("fp64", np.finfo(np.float64), ""),
    ("fp32", np.finfo(np.float32), "resolution"),
    ("fp16", np.finfo(np.float16), "resolution"),
    ("bf16", ml_dtypes.finfo(ml_dtypes.bfloat16), "resolution"),
    ("e4m3fn", ml_dtypes.finfo(ml_dtypes.float8_e4m3fn), "precision resolution"),
    ("e5m2", ml_dtypes.finfo(ml_dtypes.float8_e5m2), "precision resolution"),
    ("fp32", torch.finfo(torch.float32), ""),
    ("fp16", torch.finfo(torch.float16), ""),
    ("bf16", torch.finfo(torch.bfloat16), ""),
    ("e4m3fn", torch.finfo(torch.float8_e4m3fn), ""),
    ("e5m2", torch.finfo(torch.float8_e5m2), ""),
    ("e3m2", ml_dtypes.finfo(ml_dtypes.float6_e3m2fn), ""),
    ("e2m3", ml_dtypes.finfo(ml_dtypes.float6_e2m3fn), ""),
    ("e2m1", ml_dtypes.finfo(ml_dtypes.float4_e2m1fn), ""),
    ("e8m0", ml_dtypes.finfo(ml_dtypes.float8_e8m0fnu), "precision resolution"),
]
NAMES = (
    "bits eps epsneg max min smallest_normal smallest_subnormal nmant nexp maxexp minexp precision resolution"
)


@pytest.mark.parametrize(("name", "oracle", "differs"), FINFO, ids=lambda v: type(v).__module__)
def test_properties_agree_with_finfo(name: str, oracle: object, differs: str) -> None:
    shared = [attribute for attribute in NAMES.split() if hasattr(oracle, attribute)]
    assert len(shared) >= 6
    for attribute in shared:
        ours, theirs = getattr(FORMATS[name], attribute), getattr(oracle, attribute)
        assert (float(ours) == float(theirs)) is (attribute not in differs.split()), (attribute, ours, theirs)


def test_mezzo_formats_is_this_module_and_its_names_resolve() -> None:
    assert mezzo.formats is formats
    for name in ("bf16", "bfloat16", torch.bfloat16, FORMATS["bf16"]):
        assert formats.named(name) is FORMATS["bf16"]  # type: ignore[arg-type]
    assert str(FORMATS["tf32"]) == "tf32"
    assert (FORMATS["tf32"].storage_bits, FORMATS["fp16"].storage_bits) == (32, 16)


# call -> what the message must hold
WRONG = [
    (lambda: formats.named("f16"), "unknown format 'f16'. Use one of bf16, e2m1"),
    (lambda: formats.round(1.0, "bf16", overflow="wrap"), "Use one of infinity, saturate."),
    (lambda: formats.round(1.0, "bf16", seed=0.5), "seed=0.5 is not an integer. Use None"),
    (lambda: formats.round([1.0], "bf16"), "cannot round list '[1.0]'"),
    (lambda: formats.decode(0x10000, "fp16"), "its 16 bits hold 0 to 0xffff"),
    (lambda: formats.decode(0x10, "e2m1"), "its 4 bits hold 0 to 0xf"),
    (lambda: formats.bits(float("nan"), "e2m1"), "e2m1 has no code for NaN"),
    (lambda: Format("binary128", 15, 112, "", ""), "wider than float64"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_a_wrong_argument_is_told_how_to_mend_it(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert message in str(caught.value)
    assert isinstance(caught.value, UnknownNameError) is ("Use one of" in message or "mean" in message)


def test_the_table_of_formats_on_the_page_is_true() -> None:
    lines = (DOCS / "formats.md").read_text(encoding="utf-8").splitlines()
    rows = {
        cells[0]: cells[1:] for line in lines if (cells := [c.strip() for c in line.strip("|").split("|")])
    }
    for form in FORMATS.values():
        powers = [f"2^{power}" for power in (form.minexp, form.minexp - form.nmant, -form.nmant)]
        assert rows[form.name] == [f"{form.signed:d}/{form.nexp}/{form.nmant}", written(form.max), *powers]


READ = [
    ("-4.2e9", -4.2e9),
    ("0.1", Fraction(1, 10)),
    ("-0X.1P-4", -(2.0**-8)),
    ("-3/40", Fraction(-3, 40)),
    ("2**100", 2.0**100),
    ("-2^-1100", Fraction(-1, 2**1100)),
    ("1e-400", Fraction(1, 10**400)),
    ("-Infinity", -math.inf),
    ("9007199254740993", 2**53 + 1),
]


@pytest.mark.parametrize(("text", "number"), READ, ids=[row[0] for row in READ])
def test_a_numeral_is_read_exactly(text: str, number: float) -> None:
    assert parse(text) == number


@given(st.floats(allow_nan=False))
def test_every_float_comes_back(x: float) -> None:
    for text in (repr(x), x.hex()):
        number = formats.round(parse(text), "fp64")
        assert (number, math.copysign(1, number)) == (x, math.copysign(1, x))
    assert float(written(x, 17)) == x


UNREADABLE = [
    *[(text, "Write a decimal (-4.2e9)") for text in ("", "0xp3", "1//3", "1/0")],
    *[(text, "beyond every format") for text in ("1e999999999", "0x1p9999", "1" * 5000)],
]


@pytest.mark.parametrize(("text", "message"), UNREADABLE, ids=[row[0][:20] for row in UNREADABLE])
def test_a_bad_numeral_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert message in str(caught.value)


STORED = [
    # number, format, overflow, stored, absolute error, word
    (2049, "fp16", "infinity", 2048.0, 1.0, "rounded"),
    (65520, "fp16", "infinity", math.inf, math.inf, "overflow"),
    (-65537, "fp16", "saturate", -65504.0, 33.0, "overflow"),
    (65520, "fp16", "saturate", 65504.0, 16.0, "overflow"),
    (65519, "fp16", "saturate", 65504.0, 15.0, "rounded"),
    (464, "e4m3fn", "saturate", 448.0, 16.0, "rounded"),  # the tie goes to the even mantissa, that of 448
    (465, "e4m3fn", "infinity", math.nan, math.nan, "overflow"),
    (2.0**-25, "fp16", "infinity", 0.0, 2.0**-25, "underflow"),
    (1.5 * 2.0**-24, "fp16", "infinity", 2.0**-23, 2.0**-25, "subnormal"),
    (math.inf, "fp16", "infinity", math.inf, 0.0, "exact"),
    (math.inf, "fp16", "saturate", 65504.0, math.inf, "overflow"),
    (math.nan, "e4m3fn", "infinity", math.nan, 0.0, "exact"),
]


@pytest.mark.parametrize(("number", "name", "overflow", "value", "error", "word"), STORED)
def test_what_a_format_makes_of_a_number(
    number: float, name: str, overflow: str, value: float, error: float, word: str
) -> None:
    found = stored(number, name, overflow)
    assert found["word"] == word
    assert str(found["value"]) == str(value)
    assert str(found["absolute_error"]) == str(error)
    if error and math.isfinite(error):
        assert found["relative_error"] == error / abs(number)


def test_one_format_is_shown_in_full_and_numbers_in_those_asked_for(capsys: Captured) -> None:
    for name in ("half", "e4m3fn"):
        assert main(["formats", name]) == 0
        form, printed = formats.named(name), capsys.readouterr().out
        assert all(text in printed for text in (form.name, form.title, form.source, written(form.max)))
    assert main(["formats", "bf16", "fp8", "show", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1::2]] == ["bf16", "e4m3fn", "e5m2"]


ONE = '{ element = "e4m3fn", block = [1, 64], scale = "e8m0" }'
RECIPE = f"""multiple = 64
output = {{ x = {ONE}, w = {ONE} }}
input_gradient = {{ g = {ONE}, w = {ONE} }}
weight_gradient = {{ g = {ONE}, x = {ONE} }}
"""


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8", "nvfp4-plain", "mine.toml", "MINE.TOML"])
def test_a_recipe_of_block_formats_is_shown_with_its_blocks(
    name: str, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "." in name:
        Path(name).write_text(RECIPE, encoding="utf-8")
    assert main(["formats", name, "--json"]) == 0
    shown = [row["name"] for row in json.loads(capsys.readouterr().out)["formats"]]
    factors = recipe_of(name, recipe=name).factors
    assert shown == list(dict.fromkeys(factor.element for factor in factors))
    assert main(["formats", name]) == 0
    printed = capsys.readouterr().out
    for factor in factors:
        block = " x ".join(str(size or "all") for size in factor.block)
        assert f"{factor.element}, {block}" in printed
        assert f"scale {factor.scale}" in printed


def test_the_table_as_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert shown["schema"] == 1
    rows = {row["name"]: row for row in shown["formats"]}
    assert list(rows) == list(FORMATS)
    bf16 = {"name": "bf16", "bits": 16, "nexp": 8, "nmant": 7, "max": 3.3895313892515355e38, "eps": 2.0**-7}
    assert rows["bf16"].items() >= bf16.items()
    assert rows["e4m3fn"]["has_infinity"] is False


def test_show_prints_bits_value_errors_and_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "show", "-4.2e9"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "bf16      rounded    -4194304000   error 5.7e6, relative 0.00136\n          1 10011110 1111010\n",
        "fp32      exact      -4200000000\n          1 10011110 11110100101011011101010\n",
        "fp16      overflow   -inf   error inf, relative inf\n          1 11111 0000000000\n",
    ):
        assert line in printed


@pytest.mark.parametrize("number", ["-4.2e9", "-1/3", "-0x1.8p3", "-inf", "-.5"])
def test_no_number_is_taken_for_an_option(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "show", number, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    signs = {row["name"]: row["sign"] for row in shown["numbers"][0]["formats"]}
    assert signs == {name: "1" if form.signed else "" for name, form in FORMATS.items()}


@pytest.mark.parametrize(
    "words",
    [
        "--json --overflow saturate e4m3fn fp64 show 1e6 1/3",
        "e4m3fn --json fp64 --overflow saturate show 1e6 1/3",
        "e4m3fn fp64 show --overflow=saturate 1e6 --json 1/3",
        "e4m3fn fp64 show 1e6 1/3 --json --overflow saturate",
    ],
)
def test_show_as_json_with_its_options_anywhere(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", *words.split()]) == 0
    million, third = json.loads(capsys.readouterr().out)["numbers"]
    assert {row["name"]: row for row in million["formats"]}["e4m3fn"] == {
        "name": "e4m3fn",
        "sign": "0",
        "exponent": "1111",
        "mantissa": "110",
        "code": "0x7e",
        "value": 448.0,
        "absolute_error": 999552.0,
        "relative_error": 0.999552,
        "word": "overflow",
    }
    wide = {row["name"]: row for row in third["formats"]}["fp64"]
    assert (wide["value"], wide["code"]) == (1 / 3, "0x3fd5555555555555")


MISUSED = [
    ("show", "mezzo formats show -4.2e9"),
    ("show fp16", "mezzo formats fp16"),
    ("show 0.1 bf16", "mezzo formats bf16 show"),
    ("shaw 1", "Did you mean 'show'?"),
    ("3.5 1/3", "mezzo formats show 3.5 1/3"),
    ("fp16 0.1", "mezzo formats fp16 show 0.1"),
    ("0.1 inf nvfp4 fp16", "mezzo formats nvfp4 fp16 show 0.1 inf"),
    ("0x1.8p3", "mezzo formats show 0x1.8p3"),
    ("fp61", "Did you mean 'fp64'?"),
    ("fp17", "mxfp8, mxfp8-floor, nvfp4, nvfp4-nearest, nvfp4-plain, tf32. Did you mean 'fp16'?"),
    ("mime.toml", "'mime.toml'"),
    ("show 1 --overflow satrate", "Did you mean 'saturate'?"),
]


@pytest.mark.parametrize(("words", "message"), MISUSED, ids=[row[0] for row in MISUSED])
def test_wrong_usage_exits_2_and_says_how_to_fix_it(words: str, message: str, capsys: Captured) -> None:
    assert main(["formats", *words.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
