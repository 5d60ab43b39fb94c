"""`mezzo formats`, as a user meets it: the table, a number's bits, JSON, and wrong words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mezzo.cli.main import main
from mezzo.core.formats import FORMATS

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    return monkeypatch


def test_the_table_has_every_format_and_fits_80_columns(
    columns: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["formats"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in printed
    for name in FORMATS:
        assert sum(line.startswith(f"{name} ") for line in lines) == 1
    assert re.search(r"^fp16 +1/5/10 +65504 +6\.1035e-5 +5\.9605e-8 +0\.00097656$", printed, re.MULTILINE)
    assert re.search(r"^binary256 +1/19/236 +1\.6113e78913 ", printed, re.MULTILINE)


def test_a_narrow_terminal_gets_a_list(
    columns: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns.setenv("COLUMNS", "40")
    assert main(["formats"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 40
    assert "…" not in printed
    assert printed.count("largest") == len(FORMATS)
    assert re.search(r"^  largest +65504$", printed, re.MULTILINE)


def test_the_table_as_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert shown["schema"] == 1
    rows = {row["name"]: row for row in shown["formats"]}
    assert list(rows) == list(FORMATS)
    assert rows["bf16"] == {
        "name": "bf16",
        "title": "bfloat16",
        "source": "Intel, BFLOAT16 Hardware Numerics Definition, 2018",
        "bits": 16,
        "nexp": 8,
        "nmant": 7,
        "storage_bits": 16,
        "bias": 127,
        "minexp": -126,
        "maxexp": 128,
        "max": 3.3895313892515355e38,
        "min": -3.3895313892515355e38,
        "smallest_normal": 2.0**-126,
        "smallest_subnormal": 2.0**-133,
        "eps": 2.0**-7,
        "epsneg": 2.0**-8,
        "precision": 2,
        "resolution": 0.01,
        "has_infinity": True,
    }
    assert rows["binary128"]["max"] == "1.1897314953572318e4932"
    assert rows["e4m3fn"]["has_infinity"] is False


def test_show_prints_bits_value_errors_and_a_word(
    columns: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["formats", "show", "-4.2e9"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "-4.2e9 in each format (sign exponent mantissa)\n" in printed
    assert (
        "bf16      rounded    -4194304000   error 5.7e6, relative 0.00136\n          1 10011110 1111010\n"
        in printed
    )
    assert "fp32      exact      -4200000000\n          1 10011110 11110100101011011101010\n" in printed
    assert "fp16      overflow   -inf   error inf, relative inf\n          1 11111 0000000000\n" in printed
    mantissas = {line.split()[-1] for line in printed.splitlines() if line.startswith(" ")}
    assert {len(mantissa) for mantissa in mantissas} == {form.nmant for form in FORMATS.values()}


def test_a_terminal_gets_colours_and_wrapped_bits(
    columns: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns.setenv("FORCE_COLOR", "1")
    columns.setenv("COLUMNS", "50")
    assert main(["formats", "show", "0.1"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b[1;31m0\x1b[0m \x1b[32m01011\x1b[0m \x1b[36m1001100110\x1b[0m" in printed
    bit_lines = [line for line in ANSI.sub("", printed).splitlines() if line.startswith(" ")]
    assert max(map(len, bit_lines)) == 50
    assert sum(len(line.replace(" ", "")) for line in bit_lines) == sum(
        form.bits for form in FORMATS.values()
    )


NUMBERS = [
    "-4.2e9",
    "-1/3",
    "-0x1.8p3",
    "-inf",
    "-nan",
    "-.5",
    "-2^-24",
    "nan",
    "inf",
    "1e-400",
    "-0",
    "-Infinity",
]


@pytest.mark.parametrize("number", NUMBERS)
def test_no_number_is_taken_for_an_option(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "show", number, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    (found,) = shown["numbers"]
    assert found["number"] == number
    assert [row["name"] for row in found["formats"]] == list(FORMATS)
    assert {row["sign"] for row in found["formats"]} == {"1" if number.startswith("-") else "0"}


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "--json", "--overflow", "saturate", "show", "1e6", "1/3"]) == 0
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
    wide = {row["name"]: row for row in third["formats"]}["binary128"]
    assert wide["value"] == "0.33333333333333333"
    assert wide["code"] == "0x3ffd5555555555555555555555555555"


WRONG = [
    (["formats", "show", "foo"], "mezzo formats: 'foo' is no number: write a decimal (-4.2e9)"),
    (["formats", "show"], "nothing to show: give a number, for instance `mezzo formats show -4.2e9`"),
    (["formats", "shaw", "1"], "Did you mean 'show'?"),
    (["formats", "show", "1", "--overflow", "satrate"], "Did you mean 'saturate'?"),
    (["formats", "--jsn"], "unrecognized arguments: --jsn"),
    (["formats", "show", "-foo"], "unrecognized arguments: -foo"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_usage_exits_2_and_says_how_to_mend_it(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err


def test_every_key_and_word_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent / "docs" / "formats.md").read_text(encoding="utf-8")
    found: set[str] = set()
    for words in (["formats", "--json"], ["formats", "--json", "show", "1", "0.1", "1e-6", "1e-50", "1e9"]):
        assert main(words) == 0
        shown = json.loads(capsys.readouterr().out)
        found |= set(shown)
        for outer in shown.get("formats", []) + shown.get("numbers", []):
            found |= set(outer)
            for inner in outer.get("formats", []):
                found |= set(inner) | {inner["word"]}
    assert {"underflow", "overflow", "subnormal", "rounded", "exact", "relative_error", "epsneg"} <= found
    assert {name for name in found if f"`{name}`" not in page} == set()
