"""The errors: what a caller can catch apart, and the sentence that goes with a wrong name."""

from __future__ import annotations

import doctest

import pytest

from mezzo.core import errors
from mezzo.core.errors import MezzoError, UnknownNameError, UsageError, unknown_name

CAUGHT_AS = {
    "UsageError": (MezzoError, ValueError),
    "UnknownNameError": (UsageError, LookupError, ValueError),
    "UnsupportedPrecisionError": (MezzoError, RuntimeError),
    "BannedOpError": (MezzoError, RuntimeError),
    "LossScaleCollapseError": (MezzoError, RuntimeError),
    "ScriptError": (MezzoError, RuntimeError),
    "CallOrderError": (MezzoError, RuntimeError),
}


@pytest.mark.parametrize(("name", "bases"), CAUGHT_AS.items())
def test_an_error_is_caught_as_what_it_is(name: str, bases: tuple[type, ...]) -> None:
    error = getattr(errors, name)
    assert error.__doc__
    for base in bases:
        assert issubclass(error, base)
    assert str(error("the message")) == "the message"


SENTENCES = [
    (
        "f15",
        ["bf16", "fp16", "fp32"],
        "",
        "unknown format 'f15'. Use one of bf16, fp16, fp32. Did you mean 'fp16'?",
    ),
    ("zzz", ["fp32", "bf16"], "", "unknown format 'zzz'. Use one of bf16, fp32."),
    ("", ["fp32"], "here: ", "here: unknown format ''. Use one of fp32."),
    ("FP16", ["bf16", "fp16"], "", "unknown format 'FP16'. Use one of bf16, fp16. Did you mean 'fp16'?"),
    ("it's", ["fp32"], "", 'unknown format "it\'s". Use one of fp32.'),
]


@pytest.mark.parametrize(("received", "allowed", "where", "sentence"), SENTENCES)
def test_unknown_name(received: str, allowed: list[str], where: str, sentence: str) -> None:
    error = unknown_name("format", received, allowed, where=where)
    assert isinstance(error, UnknownNameError)
    assert str(error) == sentence


def test_the_examples_in_the_docstrings_are_true() -> None:
    failed, _ = doctest.testmod(errors)
    assert failed == 0
