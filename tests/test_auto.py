"""precision="auto": what the hardware has, then what the user's own first steps measure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo.core.policy import policy
from mezzo.pytorch import auto
from mezzo.pytorch.dtypes import name_of
from mezzo.pytorch.hardware import ASSUME_NATIVE

pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    real = auto.TimedTrial
    monkeypatch.setattr(auto, "TimedTrial", lambda name, device: real(name, device, made))
    return made


def timed(seconds: Callable[[str], float], device: str = "cpu") -> tuple[int, auto.TrialDecision]:
    """How many steps a trial took on a fake clock, and the decision; `seconds` of a step of a precision."""
    clock = Clock()
    trial, count = auto.TimedTrial("bf16", device, clock), 0
    while trial.decision is None:
        trial.start()
        trial.start()
        clock.now += seconds(trial.precision)
        trial.finish(counts=True)
        count += 1
    assert trial.precision == trial.decision.precision
    return count, trial.decision


DECISIONS = [
    # fp32 seconds, candidate seconds, the decision, words of the reason
    (0.1, 0.06, "bf16", "60 ms in bf16, 100 ms in FP32 (medians of 8 steps), so bf16 is 1.66x"),
    (0.1051, 0.100, "bf16", "1.05x as fast"),
    (0.1049, 0.100, "fp32",
     "FP32: a step takes 100 ms in bf16, 105 ms in FP32 (medians of 8 steps), so bf16 is 1.04x"),
]  # fmt: skip


@pytest.mark.parametrize(("fp32", "low", "chosen", "words"), DECISIONS)
def test_decides_by_the_ratio_of_medians(fp32: float, low: float, chosen: str, words: str) -> None:
    _, decision = timed(lambda precision: fp32 if precision == "fp32" else low)
    assert decision.precision == chosen
    assert words in decision.reason


@pytest.mark.parametrize(
    ("native", "asked", "got", "reason"),
    [
        ("bf16,fp16", "auto", "bf16", "bf16: this cpu device multiplies bf16 in hardware"),
        ("", "auto", "fp32", "no fast 16-bit format"),
        ("", "bf16", "bf16", "bf16 was asked for"),
        ("fp16", "compute=auto,op.softmax=fp32", "fp16,op.softmax=fp32", "fp16"),
    ],
)
def test_resolve_takes_what_the_hardware_has(
    native: str, asked: str, got: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ASSUME_NATIVE, native)
    resolved, why = auto.resolve(policy(asked), "cpu")
    assert str(resolved) == got
    assert reason in why
    assert resolved.loss_scale == ("dynamic" if "fp16" in got else "none")


def make(native: str, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> Any:
    monkeypatch.setenv(ASSUME_NATIVE, native)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)


def steps(mp: Any, clock: Clock, seconds: dict[str, float], count: int, factor: float = 1.0) -> list[str]:
    """Steps that take as long as their precision does, with a slow data loader between them."""
    ran = []
    for _ in range(count):
        ran.append(mp.precision)
        for _ in range(mp.accumulate):
            with mp.autocast():
                out = mp.model(torch.ones(2, 3))
                clock.now += seconds[mp.precision] / mp.accumulate
            assert name_of(out.dtype) == ran[-1]
            mp.step(out.float().mean() * factor)
            clock.now += 100.0
    return ran


@pytest.mark.parametrize(
    ("candidate", "accumulate", "ratio", "winner"),
    [("bf16", 1, 2.0, "bf16"), ("fp16", 3, 2.0, "fp16"), ("bf16", 3, 1.0, "fp32"), ("fp16", 1, 0.5, "fp32")],
)
def test_the_first_steps_decide(
    candidate: str, accumulate: int, ratio: float, winner: str, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    mp = make(candidate, monkeypatch, accumulate=accumulate)
    length = 2 * (8 + 2)
    seconds = {"fp32": 3.0 * ratio, candidate: 3.0}
    ran = steps(mp, clock, seconds, length - 1)
    assert mp.decision is None
    ran += steps(mp, clock, seconds, 1)
    assert sorted(ran) == sorted(["fp32", candidate] * (length // 2))
    assert mp.decision is not None
    assert mp.decision.precision == str(mp.policy) == winner
    assert mp.decision.speedup == pytest.approx(ratio)
    assert steps(mp, clock, seconds, 2) == [winner] * 2
    assert mp.loss_scale == (2.0**16 if winner == "fp16" else 1.0)


def test_skipped_steps_are_not_timed(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    mp = make("fp16", monkeypatch)
    seconds = {"fp32": 2.0, "fp16": 1.0}
    assert steps(mp, clock, seconds, 2) == ["fp32", "fp16"]
    assert steps(mp, clock, seconds, 3, factor=math.inf) == ["fp16"] * 3
    assert mp.decision is None
    assert mp.loss_scale == 2.0**13
    assert steps(mp, clock, seconds, 2) == ["fp16", "fp32"]
    assert mp.step(mp.model(torch.ones(2, 3)).mean()).loss_scale == 1.0  # none in FP32


@pytest.mark.parametrize("ratio", [2.0, 0.5])
def test_a_decision_is_carried_into_the_resumed_run(ratio: float, monkeypatch: Any, clock: Clock) -> None:
    mp = make("fp16", monkeypatch)
    steps(mp, clock, {"fp32": ratio, "fp16": 1.0}, 20)
    if mp.precision == "fp16":
        mp.load_state_dict(torch.amp.GradScaler("cpu", init_scale=64.0).state_dict())
    state = mp.state_dict()
    twin = make("fp16", monkeypatch)
    twin.load_state_dict(state)
    assert twin.decision == mp.decision
    assert twin.precision == mp.precision
    assert twin.loss_scale == mp.loss_scale == (64.0 if ratio > 1 else 1.0)
    undecided = make("fp16", monkeypatch)
    third = make("fp16", monkeypatch)
    third.load_state_dict(undecided.state_dict())
    assert third.decision is None


def test_a_device_is_waited_for_during_the_trial_only(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(1))
    count, _ = timed(lambda _: 1.0, "cuda")
    assert len(waits) == 2 * count == 2 * 20
