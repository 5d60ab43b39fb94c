"""The word that says how fp8 factors are scaled."""

from __future__ import annotations

import doctest

import pytest

from mezzo.core import fp8
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.fp8 import GRANULARITIES, scaling_of


def test_it_reads_what_it_knows() -> None:
    for word in GRANULARITIES:
        assert scaling_of(f" {word} ") == word
    assert doctest.testmod(fp8).failed == 0


# Text, error, what the message must have.
WRONG = [
    ("colwise", UnknownNameError, "Use one of rowwise, tensorwise."),
    ("tensorwize", UnknownNameError, "Did you mean 'tensorwise'?"),
    ("", UnknownNameError, "Use one of rowwise, tensorwise."),
    ("tensorwise(history=16)", UsageError, "write tensorwise"),
    ("tensorwise(margin=1)", UsageError, "leave it out"),
    ("rowwise(pays_from=360)", UsageError, "module.NAME=bf16"),
    ("tensorwise(depth=2)", UsageError, "takes no settings"),
]


@pytest.mark.parametrize(("text", "error", "message"), WRONG)
def test_what_cannot_be_is_refused_and_says_what_to_write(
    text: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        scaling_of(text, "here: ")
    assert type(caught.value) is error
    assert str(caught.value).startswith("here: ")
    assert text in str(caught.value)
    assert message in str(caught.value)
