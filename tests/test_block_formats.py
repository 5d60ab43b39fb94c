"""The formats of blocks: 4- and 6-bit elements without NaN, and e8m0, whose values are powers of two."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from mezzo.core import formats
from mezzo.core.errors import UsageError
from mezzo.core.formats import FORMATS

THEIRS = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}


def values(name: str) -> np.ndarray:
    """Every bf16 value, and a million random float32 values; without NaN where the format has none."""
    few = np.arange(1 << 16, dtype=np.uint32) << 16
    many = np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    x = np.concatenate([few, many]).view(np.float32)
    if name == "e8m0":  # ml_dtypes rounds up every value between the two smallest, 2^-127 and 2^-126
        return x[~((x > 2.0**-127) & (x < 2.0**-126))]
    return x[~np.isnan(x)]


@pytest.mark.parametrize("name", THEIRS)
def test_arrays_and_tensors_round_as_ml_dtypes_casts(name: str) -> None:
    x = values(name)
    with np.errstate(invalid="ignore"):
        expected, wide = x.astype(THEIRS[name]).astype(np.float32), x.astype(np.float64)
    rounded = formats.round(x, name)
    assert np.array_equal(rounded, expected, equal_nan=True)
    assert np.array_equal(np.signbit(rounded[rounded == 0]), np.signbit(x[rounded == 0]))
    assert np.array_equal(formats.round(torch.from_numpy(x), name).numpy(), expected, equal_nan=True)
    assert np.array_equal(formats.round(wide, name), expected.astype(np.float64), equal_nan=True)
    some = slice(None, None, 501)
    assert np.array_equal([formats.round(v, name) for v in x[some].tolist()], expected[some], equal_nan=True)


@pytest.mark.parametrize("name", THEIRS)
def test_every_code_point(name: str) -> None:
    form = FORMATS[name]
    theirs = np.arange(1 << form.bits, dtype=np.uint8).view(THEIRS[name]).astype(np.float64)
    for code, value in enumerate(theirs.tolist()):
        ours = formats.decode(code, name)
        assert ours == value or (math.isnan(ours) and math.isnan(value))
        assert formats.bits(ours, name).code == code
        assert formats.bits(ours, name).kind == (
            "nan" if math.isnan(value) else formats.bits(ours, name).kind
        )


# the ties of e2m1, from its standard
TIES = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4}


@pytest.mark.parametrize(("tie", "value"), TIES.items())
def test_ties_of_e2m1(tie: float, value: float) -> None:
    assert formats.round(tie, "e2m1") == value
    assert formats.round(-tie, "e2m1") == -value
    least = Fraction(1, 10**30)
    below, above = (formats.round(Fraction(tie) + sign * least, "fp4") for sign in (-1, 1))
    assert below < above


@pytest.mark.parametrize(
    ("number", "value"), [(3, 4), (2.999, 2), (2.0**-140, 2.0**-127), (1.4 * 2.0**-127, 2.0**-127)]
)
def test_e8m0_rounds_up_from_the_middle_and_has_a_smallest_value(number: float, value: float) -> None:
    assert formats.round(number, "e8m0") == value
    assert formats.round(np.float32(number), "e8m0") == value


@pytest.mark.parametrize("number", [0.0, -0.0, -1.0, -math.inf, math.inf, math.nan, 2.0**128])
def test_what_is_nan_in_e8m0(number: float) -> None:
    assert math.isnan(formats.round(number, "e8m0"))
    assert math.isnan(formats.round(np.float64(number), "e8m0"))


@pytest.mark.parametrize("name", ["e2m1", "e3m2", "e2m3"])
def test_without_nan_and_infinity_what_is_too_large_becomes_the_largest(name: str) -> None:
    largest = FORMATS[name].max
    for overflow in formats.OVERFLOW:
        assert formats.round(-math.inf, name, overflow=overflow) == -largest
        assert formats.round(torch.tensor([1e30]), name, overflow=overflow).item() == largest
    assert math.isnan(formats.round(math.nan, name))  # the rounded value is a float32, which has NaN
    with pytest.raises(UsageError, match="no code for NaN"):
        formats.bits(math.nan, name)
