"""The trial behind precision='auto': order, warm-up, threshold and the sentence that it gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.core.trial import PrecisionTrial, TrialDecision


def run(trial: PrecisionTrial, seconds: dict[str, float]) -> tuple[list[str], TrialDecision]:
    turns = []
    while trial.decision is None:
        turns.append(trial.precision)
        trial = trial.observe(seconds[trial.precision])
    return turns, trial.decision


DECISIONS = [
    # fp32 seconds, candidate seconds, the decision, words of the reason
    (
        0.1,
        0.06,
        "bf16",
        "bf16: a step takes 60 ms in bf16 and 100 ms in FP32 (medians of 8 steps each, 1.66x",
    ),
    (0.1051, 0.100, "bf16", "1.05x as fast"),
    (0.1049, 0.100, "fp32", "1.04x as fast); bf16 is used only where it is at least 1.05x as fast"),
    (0.100, 0.100, "fp32", "FP32: a step takes 100 ms in bf16"),
    (2.0, 40.0, "fp32", "40 s in bf16 and 2 s in FP32 (medians of 8 steps each, 0.05x as fast)"),
    (0.0, 0.0, "fp32", "1.00x"),
    (0.1, 0.0, "bf16", "infx"),
]


@pytest.mark.parametrize(("fp32", "low", "chosen", "words"), DECISIONS)
def test_decides_by_the_ratio_of_medians(fp32: float, low: float, chosen: str, words: str) -> None:
    _, decision = run(PrecisionTrial("bf16"), {"fp32": fp32, "bf16": low})
    assert decision.precision == chosen
    assert words in decision.reason


@given(st.integers(1, 12), st.integers(0, 5))
def test_the_order_is_fair(steps_each: int, warmup: int) -> None:
    turns, _ = run(PrecisionTrial("fp16", steps_each, warmup), {"fp32": 1.0, "fp16": 1.0})
    assert len(turns) == 2 * (steps_each + warmup)
    assert turns[:4] == ["fp32", "fp16", "fp16", "fp32"][: len(turns)]
    for start in range(0, len(turns), 2):
        assert set(turns[start : start + 2]) == {"fp32", "fp16"}
    # A drift that grows by the same amount at every step adds up to the same for both over each four.
    drift = {name: sum(i for i, turn in enumerate(turns) if turn == name) for name in ("fp32", "fp16")}
    assert abs(drift["fp32"] - drift["fp16"]) == len(turns) // 2 % 2


def test_a_linear_drift_decides_nothing() -> None:
    trial = PrecisionTrial("bf16", steps_each=8, warmup=2)
    for index in range(20):
        trial = trial.observe(1.0 + 0.2 * index)
    assert trial.decision is not None
    assert trial.decision.precision == trial.precision == "fp32"
    assert trial.decision.speedup == pytest.approx(1.0)
    assert trial.observe(9.0) is trial  # after the decision nothing changes


def test_warm_up_and_one_stall_do_not_count() -> None:
    trial = PrecisionTrial("bf16", steps_each=3, warmup=3)
    count = {"fp32": 0, "bf16": 0}
    while trial.decision is None:
        now = trial.precision
        assert now == trial.precision  # a step that is not observed is tried again
        slow = now == "bf16" and count[now] in (0, 1, 2, 4)  # compilation at first, later one stall
        count[now] += 1
        trial = trial.observe(50.0 if slow else {"fp32": 2.0, "bf16": 1.0}[now])
    assert trial.decision.speedup == 2.0
