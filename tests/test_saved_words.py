"""What was measured decides the words beside it: what an emulated format saves."""

from __future__ import annotations

import pytest

from mezzo.compare.judgement import saved
from mezzo.compare.measure import Speed

FASTER, SLOWER, ALIKE = (
    Speed(1.5, (1.2, 1.8), 3, 100),
    Speed(0.6, (0.5, 0.7), 3, 100),
    Speed(0.9, (0.7, 1.1), 3, 100),
)


@pytest.mark.parametrize(
    ("memory", "fast", "told"),
    [
        (0.79, ALIKE, "memory is saved, time is not"),
        (0.79, SLOWER, "memory is saved, time is lost"),
        (0.79, FASTER, "memory is saved, time is saved"),
        (1.1, ALIKE, "memory is not saved (1.10x), time is not saved"),
        (1.1, SLOWER, "memory is not saved (1.10x), time is lost"),
        (1.1, FASTER, "memory is not saved (1.10x), time is saved"),
        (0.998, ALIKE, "memory is not saved (1.00x), time is not saved"),  # as it is printed
        (None, SLOWER, "memory was not measured, time is lost"),
        (0.5, None, "memory is saved, time was not measured"),
    ],
)
def test_words_follow_the_figures(memory: float | None, fast: Speed | None, told: str) -> None:
    assert saved(memory, fast) == told
