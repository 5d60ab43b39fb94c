"""What was measured decides the words beside it: what an emulated format saves, why nothing is lowered."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from mezzo.core.tuning import tune
from mezzo.verify.judgement import saved
from mezzo.verify.measure import Speed
from mezzo.verify.tune.table import show
from mezzo.verify.tune.tune import Outcome
from test_tuning import measured, unit

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


@pytest.mark.parametrize(
    ("change", "low", "goal", "told"),
    [
        (1e-4, 3.0, "time", "no module runs faster in 16 bits here."),
        (
            1.0,
            1.0,
            "time",
            "what runs faster in 16 bits here does harm, or its casts take more than it saves.",
        ),
        (1.0, 3.0, "memory", "no module can run in 16 bits here without harm."),
    ],
)
def test_why_nothing_is_lowered_is_what_was_measured(change: float, low: float, goal: str, told: str) -> None:
    tuned = tune(measured(unit("a", change=change, fp32=2.0, low=low)), goal=goal)
    assert tuned.policy.is_fp32
    console = Console(file=io.StringIO(), width=200)
    show(console, Outcome(tuned, Path("policy.toml"), None, "bf16", "policy.toml"))
    assert f"FP32 it is: {told}\n" in console.file.getvalue()  # type: ignore[attr-defined]
