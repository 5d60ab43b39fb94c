"""The experiment of lost updates: what it counts against plain loops, its ways to keep weights, its findings."""

from __future__ import annotations

import json
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from mezzo.reproduce import expected, figures, lost_updates
from mezzo.reproduce.experiment import Effort, Outcome
from mezzo.reproduce.lost_updates import ARMS, LOWEST, Size, Updates, train
from mezzo.verify.folder import strict

NUMPY = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
BY_NAME = {arm.name: arm for arm in ARMS}


def model_of(weights: list[float], gradients: list[float]) -> nn.Module:
    model = nn.Linear(len(weights), 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weights]))
    model.weight.grad = torch.tensor([gradients])
    model.bias.grad = torch.tensor([1e30])  # a vector: not counted
    return model


def test_updates_are_counted_as_a_plain_loop_counts_them() -> None:
    random = np.random.default_rng(0)
    weights = [
        float(np.float32(w)) for w in random.standard_normal(500) * 2.0 ** random.integers(-12, 3, 500)
    ]
    updates = [
        float(np.float32(u)) for u in random.standard_normal(500) * 2.0 ** random.integers(-30, -4, 500)
    ]
    updates[:20] = [0.0] * 20
    seen = Updates(model_of(weights, [-2 * u for u in updates]), 0.5)
    seen.look(7)
    moving = [(w, u) for w, u in zip(weights, updates) if u]
    counts = [0] * (1 - LOWEST)
    for w, u in moving:
        counts[max(min(math.floor(math.log2(abs(u / w))), 0), LOWEST) - LOWEST] += 1
    assert seen.counts.tolist() == counts
    assert (seen.total, seen.zero, seen.steps) == (500, 20, [7])
    assert seen.underflows == sum(abs(u) < 2.0**-24 for _, u in moving)
    for form, dtype in NUMPY.items():
        lost = 0
        for w, u in moving:
            stored = np.float64(np.float32(w).astype(dtype))
            lost += np.float64(np.float64(stored + u).astype(dtype)) == stored
        assert seen.lost[form] == [pytest.approx(lost / 480, abs=1e-12)]
        assert 0.2 < lost / 480 < 0.95


# weight, update as a share of it -> lost in fp16, lost in bf16
RULE = [
    (1.5, 2.0**-8, False, False),
    (1.5, 2.0**-9, False, True),
    (1.5, 2.0**-11, False, True),
    (1.5, 2.0**-12, True, True),
    (1.999, 0.9 * 2.0**-12, True, True),
    (1.001, 0.9 * 2.0**-11, True, True),
    (1.0, -1.1 * 2.0**-12, False, True),  # the gap below a power of two is half as wide
]


@pytest.mark.parametrize(("weight", "share", "in_fp16", "in_bf16"), RULE)
def test_the_rule_of_2048(weight: float, share: float, in_fp16: bool, in_bf16: bool) -> None:
    seen = Updates(model_of([weight], [-weight * share]), 1.0)
    seen.look(0)
    assert {form: bool(lost[0]) for form, lost in seen.lost.items()} == {"fp16": in_fp16, "bf16": in_bf16}


def test_what_breaks_the_rule_is_noticed() -> None:
    seen = Updates(model_of([1.5] * 4, [1.0] * 4), 1.0)
    stored, ones = torch.full((4,), 1.5).double(), torch.ones(4).double()
    for update, lost, holds in (
        (2.0**-10, False, True),
        (2.0**-10, True, False),
        (2.0**-14, True, True),
        (2.0**-14, False, False),
    ):
        seen.within_rule["fp16"] = True
        seen._check_rule("fp16", stored=stored, update=update * ones, is_lost=torch.full((4,), lost))
        assert seen.within_rule["fp16"] is holds
    seen.within_rule["fp16"] = True  # subnormal weights have gaps of their own
    seen._check_rule("fp16", stored=stored * 2.0**-20, update=2.0**-30 * ones, is_lost=torch.full((4,), True))
    assert seen.within_rule["fp16"] is True


def test_a_naive_step_rounds_the_weight_and_nothing_else() -> None:
    """The weights after a few steps are those of FP32 arithmetic rounded after each update."""
    arm, rate = BY_NAME["bf16"], 2.0**-6
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    step, region = lost_updates._stepper(arm, model, rate)
    x = torch.randn(16, 8)
    for _ in range(5):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with region():
            loss = model(x).float().square().mean()
        step(loss)
        for parameter, was in zip(model.parameters(), before):
            assert parameter.dtype is torch.bfloat16
            assert parameter.grad is not None
            exact = was.float() - rate * parameter.grad.float()
            assert torch.equal(parameter.detach(), exact.to(torch.bfloat16))


def test_the_loss_scale_of_fp16_is_divided_out() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    start = model.weight.detach().clone()
    step, region = lost_updates._stepper(BY_NAME["fp16"], model, 0.5)
    x = torch.randn(16, 8)
    with region():
        loss = model(x).float().square().mean()
    step(loss)
    reference = nn.Linear(8, 4)
    with torch.no_grad():
        reference.weight.copy_(start)
    assert model.weight.grad is not None
    moved = start - model.weight.detach().float()
    assert torch.allclose(moved, 0.5 * model.weight.grad.float() / lost_updates.LOSS_SCALE, atol=2e-3)
    assert moved.abs().max() > 0.05


@pytest.mark.heavy
def test_arms_start_alike_and_see_the_same_batches() -> None:
    curves = {name: train(arm, 0.01, 20)["curve"] for name, arm in BY_NAME.items()}
    for name, curve in curves.items():
        assert curve == pytest.approx(curves["fp32"], rel=0.02), name
    assert len({tuple(curve) for curve in curves.values()}) == len(curves)  # and yet no two are one


def test_threads_are_put_back() -> None:
    inside = []

    def fail() -> None:
        with lost_updates._one_thread():
            inside.append(torch.get_num_threads())
            raise ZeroDivisionError

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            fail()
        assert (inside, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_all_trainings_travel_as_far() -> None:
    for size in (lost_updates.QUICK, lost_updates.FULL):
        for rate in size.learning_rates:
            assert size.steps(rate) * rate == pytest.approx(size.travel, rel=0.01)
        assert list(size.learning_rates) == sorted(size.learning_rates)


@pytest.fixture(scope="module")
def small(request: pytest.FixtureRequest) -> Outcome:
    """A run of a few hundred steps: its findings need not hold, but all of it is there."""
    patch = pytest.MonkeyPatch()
    patch.setattr(lost_updates, "QUICK", Size((0.05, 0.1), 2.0))
    told: list[float] = []
    try:
        found = lost_updates.run(Effort(quick=True, report=lambda words, share: told.append(share)))
    finally:
        patch.undo()
    assert told == sorted(told)
    assert 0 <= told[0] < told[-1] <= 1
    return found


def test_every_finding_is_listed_in_both_efforts(small: Outcome) -> None:
    names = {finding.name for finding in small.findings}
    for listed in expected.read()["lost-updates"].values():
        assert {*listed.shown, *listed.not_shown} == names
    for finding in small.findings:
        assert finding.expected.endswith(".")
        assert finding.seen.endswith(".")
        assert any(letter.isdigit() for letter in finding.seen)


@pytest.mark.heavy
def test_the_figure_comes_from_the_numbers_alone(small: Outcome) -> None:
    written = json.loads(json.dumps(strict(small.numbers)))
    drawn = figures.draw(lost_updates.EXPERIMENT, written)
    assert max(map(len, drawn.values())) <= 150_000
    written["arms"]["fp16"]["curve"][3:] = [None] * len(written["arms"]["fp16"]["curve"][3:])  # it diverged
    written["sweep"]["fp16"][0]["loss"] = None
    assert figures.draw(lost_updates.EXPERIMENT, written)["figure.svg"] != drawn["figure.svg"]


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """One run of the quick size."""
    return lost_updates.run(Effort(quick=True, report=lambda words, share: None))


@pytest.mark.heavy
def test_quick_shows_what_is_listed(outcome: Outcome) -> None:
    listed = expected.read()["lost-updates"]["quick"]
    fates = {finding.name: listed.fate(finding) for finding in outcome.findings}
    assert fates == {**dict.fromkeys(listed.shown, "holds"), **dict.fromkeys(listed.not_shown, "known")}


# a number that came out otherwise -> the findings that must then not hold, beside those known not to
SPOILT: list[tuple[tuple[Any, ...], Any, set[str]]] = [
    (("updates", "counts", 39), 10**6, {"updates-are-small", "rule-of-2048", "updates-underflow"}),
    (("updates", "lost", "fp16", -1), 0.1, {"updates-are-lost"}),
    (("updates", "within_rule", "bf16"), False, {"rule-of-2048"}),
    (("updates", "underflows"), 0, {"updates-underflow"}),
    (("arms", "bf16", "loss"), 0.6, {"bf16-weights-stagnate"}),
    (("arms", "fp16 with masters", "loss"), 0.6, {"masters-keep-them"}),
    (("arms", "bf16 rounded stochastically", "loss"), 0.4, {"masters-keep-them"}),
    (("sweep", "fp16", 0, "loss"), 0.5, {"fp16-weights-fall-behind"}),
    (("sweep", "fp16", -1, "loss"), 0.7, {"it-is-the-ratio"}),
]
KNOWN = {"fp16-accuracy-falls-by-80-per-cent", "bf16-accuracy-falls-by-80-per-cent"}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("path", "value", "lost"), SPOILT, ids=[".".join(map(str, path)) for path, _, _ in SPOILT]
)
def test_a_finding_falls_with_its_numbers(
    path: tuple[Any, ...], value: Any, lost: set[str], outcome: Outcome
) -> None:
    changed: dict[str, Any] = json.loads(json.dumps(outcome.numbers))
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    findings = lost_updates._findings(changed)
    assert {finding.name for finding in findings if not finding.holds} == lost | KNOWN
