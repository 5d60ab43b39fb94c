"""Which rows run with the fast tests, and which are known not to hold: the others are heavy, and hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

NOT_NAMED: dict[str, str] = {}
"""Faults that the tracer does not name rightly, or not wholly, and why."""

ALARMS: dict[str, str] = {}
"""Clean runs in which it raises an alarm, and why."""

CHANGED: dict[str, str] = {}
"""Rows in which looking changes what is trained, and why."""

NOT_NAMED_IN_SCRIPTS: dict[str, str] = {
    "afterwards: a learned uncertainty": "its exp runs before the step's first call, from which on a script is watched",
}
"""Faults that are not named in a plain script, and why."""

_BACKWARD = "forward is mended, and a gradient is beyond fp16 at any loss scale"

NOT_MENDED: dict[str, str] = {
    "a transposed convolution's weights grown": _BACKWARD,
    "afterwards: one of four experts": _BACKWARD,
    "again: what Python's generator draws": "the next step, which draws other numbers, overflows elsewhere",
}
"""Faults for which a remedy names a policy that does not mend, and why."""


def marked(rows: Sequence[Any], fast: Sequence[str], gaps: Mapping[str, str] | None = None) -> list[Any]:
    """Rows as parameters, named; those of `gaps` have to fail, so that a gap that is closed is noticed."""
    gaps = gaps or {}
    names = [row.name for row in rows]
    assert set(fast) <= set(names)
    assert gaps.keys() <= set(names)
    return [
        pytest.param(
            row,
            id=row.name,
            marks=[
                *([] if row.name in fast else [pytest.mark.heavy]),
                *([pytest.mark.xfail(reason=gaps[row.name])] if row.name in gaps else []),
            ],
        )
        for row in rows
    ]
