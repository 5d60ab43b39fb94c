"""The value that says how fp8 factors are scaled, and its one way of being written."""

from __future__ import annotations

import doctest
import math
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.core import fp8
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.fp8 import MOST_HISTORY, MOST_MARGIN, Fp8Scaling

WRITTEN = [
    ("tensorwise", Fp8Scaling(), "tensorwise"),
    ("rowwise", Fp8Scaling("rowwise"), "rowwise"),
    (" tensorwise ( ) ", Fp8Scaling(), "tensorwise"),
    ("tensorwise(history=0,margin=0)", Fp8Scaling(), "tensorwise"),
    ("rowwise(history=0)", Fp8Scaling("rowwise"), "rowwise"),
    ("tensorwise(history=16)", Fp8Scaling(history=16), "tensorwise(history=16)"),
    ("tensorwise(history=16.0)", Fp8Scaling(history=16), "tensorwise(history=16)"),
    ("rowwise(pays_from=0, margin = 2)", Fp8Scaling("rowwise", 0, 2, 0.0), "rowwise(margin=2,pays_from=0)"),
    ("tensorwise(pays_from=0.5)", Fp8Scaling(pays_from=0.5), "tensorwise(pays_from=0.5)"),
    (
        "tensorwise(history=16,margin=1,pays_from=360)",
        Fp8Scaling("tensorwise", 16, 1, 360.0),
        "tensorwise(history=16,margin=1,pays_from=360)",
    ),
]


@pytest.mark.parametrize(("text", "value", "printed"), WRITTEN)
def test_it_reads_and_prints(text: str, value: Fp8Scaling, printed: str) -> None:
    assert Fp8Scaling.parse(text) == value
    assert str(value) == printed
    assert Fp8Scaling.parse(printed) == value


@given(
    st.sampled_from(["tensorwise", "rowwise"]),
    st.integers(0, MOST_HISTORY),
    st.integers(0, MOST_MARGIN),
    st.none() | st.floats(0, allow_nan=False, allow_infinity=False),
)
def test_what_is_printed_reads_back(
    granularity: str, history: int, margin: int, pays_from: float | None
) -> None:
    value = Fp8Scaling(granularity, history if granularity == "tensorwise" else 0, margin, pays_from)
    again = Fp8Scaling.parse(str(value))
    assert again == value
    assert hash(again) == hash(value)
    assert str(again) == str(value)


WRONG = [
    ("colwise", UnknownNameError, "here: unknown fp8 scaling 'colwise'. Use one of rowwise, tensorwise."),
    ("tensorwize", UnknownNameError, "Did you mean 'tensorwise'?"),
    ("", UnknownNameError, "here: unknown fp8 scaling ''"),
    ("rowwise(history=2)", UsageError, "Use tensorwise(history=2), or rowwise without a history."),
    ("tensorwise(depth=2)", UnknownNameError, "unknown setting of an fp8 scaling 'depth'"),
    ("tensorwise(margin=1,margin=2)", UsageError, "has margin twice. Keep one of the two."),
    ("tensorwise(history)", UsageError, "history='' is no number"),
    ("tensorwise(history=many)", UsageError, "history='many' is no number"),
    ("tensorwise(history=1.5)", UsageError, "history=1.5. Use a whole number from 0 to 65536."),
    ("tensorwise(history=-1)", UsageError, "history=-1. Use a whole number from 0 to 65536."),
    ("tensorwise(history=65537)", UsageError, "history=65537. Use a whole number from 0 to 65536."),
    ("tensorwise(margin=16)", UsageError, "margin=16. Use a whole number from 0 to 15."),
    ("tensorwise(pays_from=-1)", UsageError, "pays_from=-1. Use a number from 0 up"),
    ("tensorwise(pays_from=nan)", UsageError, "pays_from='nan' is no number"),
    ("tensorwise(pays_from=inf)", UsageError, "pays_from='inf' is no number"),
    (
        "tensorwise(margin=1",
        UsageError,
        "here: 'tensorwise(margin=1' is no fp8 scaling. Use tensorwise, rowwise",
    ),
    ("tensorwise(margin=(1))", UsageError, "is no fp8 scaling"),
    ("tensorwise(margin=1) rowwise", UsageError, "is no fp8 scaling"),
]


@pytest.mark.parametrize(("text", "error", "message"), WRONG)
def test_what_cannot_be_is_refused(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        Fp8Scaling.parse(text, "here: ")
    assert str(caught.value).startswith("here: ")
    assert message in str(caught.value)
    assert type(caught.value) is error


VALUES = [
    {"history": True},
    {"margin": 1.0},
    {"history": None},
    {"pays_from": "360"},
    {"pays_from": False},
    {"pays_from": math.nan},
    {"pays_from": math.inf},
]


@pytest.mark.parametrize("given", VALUES, ids=str)
def test_a_value_of_another_type_is_refused(given: dict[str, object]) -> None:
    (name,) = given
    with pytest.raises(UsageError, match=name):
        Fp8Scaling(**given)  # type: ignore[arg-type]


def test_it_is_a_frozen_value() -> None:
    value = Fp8Scaling(pays_from=360)
    assert type(value.pays_from) is float
    with pytest.raises(FrozenInstanceError):
        value.margin = 1  # type: ignore[misc]


def test_the_docstrings_examples_are_true() -> None:
    failed, tried = doctest.testmod(fp8)
    assert tried
    assert not failed
