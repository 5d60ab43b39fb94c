"""side-by-side: what is declared, how a verdict becomes a finding, and two comparisons at the same time."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mezzo.core.errors import ScriptError
from mezzo.core.policy import policy
from mezzo.demos import Demo
from mezzo.reproduce import figures, side_by_side
from mezzo.reproduce.experiment import Effort
from mezzo.reproduce.side_by_side import CONTROL, EXPERIMENT, FULL, PAPER, QUICK, Counter, Side, Stopped
from mezzo.reproduce.side_by_side_figure import rows

FAKE = (sys.executable, str(Path(__file__).parent / "children" / "fake_launch.py"))
ONE: dict[str, Any] = {
    "parity": "equivalent", "reason": "", "seeds": 5, "final_metric": 98.95, "fp32_metric": 99.0,
    "metric_gap": -0.05, "metric_gap_interval": [-0.2, 0.1], "metric_margin": 0.5, "loss_gap": 0.001,
    "loss_gap_relative": 0.0021, "margin_relative": 0.01, "skipped_steps": 0, "power": 0.59, "metric_power": 0.8,
}  # fmt: skip


def quiet(words: str, share: float) -> None:
    """An effort that is told nothing."""


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Demos whose runs are pretended: behaviours by network."""

    def of(**behaviours: dict[str, Any]) -> tuple[Side, ...]:
        demos = {}
        for name, behaviour in behaviours.items():
            path = tmp_path / f"{name}.json"
            path.write_text(json.dumps(behaviour), encoding="utf-8")
            demos[name] = Demo(name, path, r"accuracy: ([0-9.]+) %", name)
        monkeypatch.setattr(side_by_side, "find", demos.__getitem__)
        monkeypatch.setattr(side_by_side.compare_all, "__kwdefaults__", {"command": FAKE})
        precisions = ("bf16", "fp16")
        return tuple(
            Side(name, f"a {name}", name, (), precisions, 3, 0.01, "test accuracy, %", 0.5) for name in demos
        )

    return of


@pytest.mark.parametrize(
    ("word", "holds"),
    [("equivalent", True), ("consistent", False), ("inconclusive", False), ("divergent", False)],
)
def test_only_a_proof_holds(word: str, holds: bool) -> None:
    found = side_by_side.judged(QUICK[0], "bf16", {**ONE, "parity": word})
    assert (found.name, found.holds) == ("cnn-bf16-as-good", holds)
    assert found.seen.startswith(f"{word}: ")


@pytest.mark.parametrize(
    ("word", "holds"),
    [("equivalent", False), ("consistent", False), ("inconclusive", False), ("divergent", True)],
)
def test_the_control_holds_only_if_it_is_found_out(word: str, holds: bool) -> None:
    found = side_by_side.judged(FULL[0], CONTROL, {**ONE, "parity": word})
    assert (found.name, found.holds) == ("cnn-control-divergent", holds)


def test_the_sentence_has_the_verdicts_numbers() -> None:
    assert side_by_side.judged(QUICK[0], "bf16", ONE).seen == (
        "equivalent: test accuracy 98.95 % against FP32's 99.00 % over 5 seeds, difference -0.05 (90 % interval -0.2 "
        "to +0.1), margin 0.5; final training loss +0.21% of FP32's, margin 1.0%."
    )
    unproven = {**ONE, "parity": "consistent", "skipped_steps": 3}
    assert side_by_side.judged(QUICK[0], "fp16", unproven).seen.endswith(
        "; 3 steps were skipped by the loss scale; equal networks would have been proven so with a chance of 59% by "
        "the loss and 80% by the metric."
    )
    broken = {**ONE, "parity": "divergent", "metric_gap": None, "reason": "Its loss is nan from step 7 on."}
    assert side_by_side.judged(QUICK[0], "fp16", broken).seen == "divergent: Its loss is nan from step 7 on."


@pytest.mark.parametrize("side", [*QUICK, *FULL], ids=lambda side: f"{side.name}-{side.margin}")
def test_what_is_declared_is_what_compare_is_asked(side: Side) -> None:
    request = side.request()
    assert request.seeds >= 5
    assert request.margin == side.margin
    assert request.how_metric is not None
    asked = request.how_metric.margins(side.margin, side.metric_label.endswith("%"))
    assert asked.metric_higher is side.metric_label.endswith("%")
    assert asked.metric == (side.margin if side.metric_margin is None else side.metric_margin)
    if side in FULL:
        assert (side.margin, side.metric_margin) in ((0.005, 0.2), (0.005, None)), (
            "mezzo compare's own margins"
        )


def test_the_control_loses_every_gradient() -> None:
    scale = policy(CONTROL).make_loss_scale()
    assert scale.scale < 2.0**-23
    assert [side.name for side in FULL if CONTROL in side.precisions] == ["cnn"]


@pytest.mark.heavy
def test_networks_that_are_as_good_and_one_that_is_not(pretended: Any) -> None:
    sides = pretended(
        cnn={"*": {"metric": 98.0}, "fp16": {"metric": 91.0, "shift": 0.3}},
        transformer={"*": {"metric": 50.0}},
    )
    told: list[tuple[str, float]] = []
    outcome = side_by_side.run(Effort(True, lambda words, share: told.append((words, share))), sides=sides)
    assert {finding.name: finding.holds for finding in outcome.findings} == {
        "cnn-bf16-as-good": True,
        "cnn-fp16-as-good": False,
        "transformer-bf16-as-good": True,
        "transformer-fp16-as-good": True,
    }
    assert "divergent" in outcome.findings[1].seen
    assert told
    assert all(0 <= share <= 1 for _, share in told)
    numbers = json.loads(json.dumps(outcome.numbers, allow_nan=False))
    assert not [key for key in numbers["networks"]["cnn"]["candidates"]["bf16"] if "speed" in key]
    drawn = figures.draw(EXPERIMENT, numbers)
    assert drawn["figure.png"].startswith(b"\x89PNG")
    assert drawn["figure.svg"].count(b"ResNet") == 1


@pytest.mark.heavy
def test_a_candidate_without_numbers_is_in_the_table_and_not_drawn(pretended: Any) -> None:
    sides = pretended(cnn={"*": {"metric": 98.0}, "bf16": {"crash": "boom"}, "fp16": {"crash": "boom"}})
    outcome = side_by_side.run(Effort(True, quiet), sides=sides)
    assert [finding.holds for finding in outcome.findings] == [False, False]
    assert "boom" in outcome.findings[0].seen
    assert rows(outcome.numbers)[0] == ("cnn, bf16: test accuracy, %", "", "", "", "divergent")
    figures.draw(EXPERIMENT, json.loads(json.dumps(outcome.numbers)))


def test_one_comparison_that_fails_stops_the_other(pretended: Any) -> None:
    sides = pretended(cnn={"*": {"crash": "no data"}}, transformer={"*": {"hang": True}})
    began = time.monotonic()
    with pytest.raises(ScriptError, match="no data"):
        side_by_side.run(Effort(True, quiet), sides=sides)
    assert time.monotonic() - began < 30, "the other one sleeps for a minute"


def test_a_counter_counts_parts_of_runs_and_stops() -> None:
    stop = threading.Event()
    counter = Counter(stop)
    counter.begin("fp32-0", 1, 7, None)
    counter.steps(5)
    assert counter.done == 0.0
    counter.begin("bf16-0", 2, 7, 40)
    counter.steps(10)
    assert counter.done == 1.25
    counter.steps(90)
    assert counter.done == 2.0
    stop.set()
    with pytest.raises(Stopped):
        counter.steps(91)


def test_the_table_of_the_original_work() -> None:
    numbers = side_by_side.numbers_of((), ())
    assert rows(numbers)[-1] == ("ResNet-50", "75.92", "76.04", "+0.12", "original work, top-1, %")
    assert min(mixed - fp32 for fp32, mixed in PAPER.values()) == pytest.approx(-0.01)
    assert max(mixed - fp32 for fp32, mixed in PAPER.values()) == pytest.approx(0.28)


@pytest.mark.heavy
def test_a_tiny_run_of_the_real_thing() -> None:
    side = Side(
        "transformer", "a transformer", "text-gpt",
        ("--steps", "6", "--width", "16", "--layers", "1", "--context", "16", "--batch", "4", "--characters", "5000"),
        ("bf16",), 1, 0.01, "validation loss",
    )  # fmt: skip
    (verdict,) = side_by_side.compare_all((side,), Effort(True, quiet))
    assert verdict["machine"]["threads"] == 1
    (finding,) = (side_by_side.judged(side, name, one) for name, one in verdict["candidates"].items())
    assert finding.name == "transformer-bf16-as-good"
    assert not finding.holds, "one pair proves nothing"
    figures.draw(EXPERIMENT, json.loads(json.dumps(side_by_side.numbers_of((side,), (verdict,)))))
