"""Which rows run with the fast tests; the others are heavy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

FAST = [
    "an activation multiplied by 1e7",
    "a sentence whose every token is padding",
    "the slope of a length at the origin",
    "a NaN in the head's weight",
    "a NaN pixel",
    "the loss takes the logarithm of 0",
]
FAST_CLEAN = ["a CNN from 2^24", "a causal mask of -inf", "a GAN"]


def marked(rows: Sequence[Any], fast: list[str]) -> list[Any]:
    """Rows as parameters, named."""
    names = [row.name for row in rows]
    assert set(fast) <= set(names)
    return [
        pytest.param(row, id=row.name, marks=[] if row.name in fast else [pytest.mark.heavy]) for row in rows
    ]
