"""gradient-histogram: its counts against tensors made by hand, its rules against numbers that keep and break them."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch

from mezzo.reproduce import detector, figures
from mezzo.reproduce import gradient_histogram as experiment
from mezzo.reproduce.experiment import Effort
from mezzo.reproduce.gradient_histogram_figure import together

MADE_BY_HAND = torch.tensor(
    [
        0.0,
        -0.0,
        2.0**-28,  # zero in fp16, even times 8: 2^-25 is a tie, and goes to zero
        -(2.0**-27),  # zero in fp16; times 8 the smallest subnormal number
        2.0**-25,  # a tie with zero
        2.0**-25 * 1.01,  # rounds up to 2^-24
        2.0**-24,
        -(2.0**-15),  # subnormal; times 8 normal
        2.0**-14,  # the smallest normal number
        1.0,
        16384.0,  # times 8 infinite
        -70000.0,  # infinite
    ]
)


def test_shares_of_a_tensor_made_by_hand():
    found = experiment.shares(MADE_BY_HAND.view(3, 4), (1.0, 8.0))
    twelfths = {name: round(12 * share, 6) for name, share in (("zero", found.zero), ("below", found.below))}
    assert twelfths == {"zero": 2, "below": 1}
    assert round(12 * found.between, 6) == 3  # 2^-27, 2^-25, just above it; 2^-24 is outside
    assert {key: round(12 * share, 6) for key, share in found.lost.items()} == {"1": 3, "8": 1}
    assert {key: round(12 * share, 6) for key, share in found.subnormal.items()} == {"1": 3, "8": 4}
    assert {key: round(12 * share, 6) for key, share in found.overflow.items()} == {"1": 1, "8": 2}
    assert found.elements == 12


def test_what_is_no_number_overflows():
    found = experiment.shares(torch.tensor([math.nan, math.inf, 1.0, 0.0]), (1.0,))
    assert (found.overflow["1"], found.lost["1"], found.zero) == (0.5, 0.0, 0.25)


EXPONENTS = [
    ([1.0, 1.5, -1.999], {0: 3}),
    ([2.0, 0.5, 0.75], {1: 1, -1: 2}),
    ([0.0, -0.0], {}),
    ([2.0**-59, 2.0**-60, 2.0**-61, 2.0**-149], {-59: 1, -60: 3}),
    ([2.0**19, 2.0**20, 2.0**21, math.inf, math.nan, -math.inf], {19: 1, 20: 5}),
]


@pytest.mark.parametrize(("values", "expected"), EXPONENTS)
def test_histogram(values, expected):
    counts = experiment.histogram(torch.tensor(values))
    assert len(counts) == experiment.HIGHEST - experiment.LOWEST + 1
    assert {experiment.LOWEST + i: n for i, n in enumerate(counts) if n} == expected


def test_moments_together_are_weighted_by_elements():
    small = {"elements": 1, "zero": 1.0, "between": 0.0, "below": 0.0}
    large = {"elements": 3, "zero": 0.0, "between": 1.0, "below": 0.0}
    by_scale = {"lost": {"1": 0.0}, "subnormal": {"1": 0.0}, "overflow": {"1": 0.0}}
    found = together({"start": {**small, **by_scale}, "end": {**large, **by_scale, "lost": {"1": 0.4}}})
    assert found["zero"] == 0.25
    assert found["between"] == 0.75
    assert found["lost"]["1"] == pytest.approx(0.3)


def test_the_detectors_anchors_and_pictures():
    places = detector.anchors()
    assert len(places) == 6 * (16 * 16 + 8 * 8)
    images, boxes, kinds = detector.pictures(64, torch.Generator().manual_seed(0))
    assert images.shape == (64, 1, 32, 32)
    assert set(kinds.tolist()) == {1, 2, 3}
    assert ((boxes[:, :2] - boxes[:, 2:] >= 0) & (boxes[:, :2] + boxes[:, 2:] <= 1)).all()
    centre = (boxes[:, :2] * 32).long()
    inside = images[torch.arange(64), 0, centre[:, 1], centre[:, 0]]
    assert inside.mean() > images.mean() + 0.5


def test_easy_negatives_have_no_gradient():
    _, boxes, kinds = detector.pictures(4, torch.Generator().manual_seed(0))
    outputs = torch.randn(4, len(detector.anchors()), 7, generator=torch.Generator().manual_seed(1))
    outputs[..., 0] += 4  # background is likely, so that positives are harder than any negative
    outputs.requires_grad_()
    loss, shown = detector.loss_of(outputs, boxes, kinds)
    (gradient,) = torch.autograd.grad(loss, outputs)
    boxed = (gradient[..., 4:] != 0).any(-1).sum(1)
    counted = (gradient[..., :4] != 0).any(-1).sum(1)
    assert (counted == 4 * boxed).all()  # the positives and three negatives for each
    assert (boxed > 0).all()
    assert shown.item() == pytest.approx(loss.item() * 4 * len(detector.anchors()) / boxed.sum().item())


SCALES = (2.0**-9, 1.0, 8.0, 2.0**15)


def numbers():
    """Made up, and every finding holds."""
    moment = {
        "elements": 1000,
        "zero": 0.6,
        "lost": {"1": 0.1, "8": 0.04, "32768": 0.0005},
        "subnormal": {"1": 0.2, "8": 0.1, "32768": 0.0},
        "overflow": {"1": 0.0, "8": 0.0, "32768": 0.0},
        "between": 0.1,
        "below": 0.05,
        "counts": [1] * (experiment.HIGHEST - experiment.LOWEST + 1),
    }
    held_out = {0.0: [3.0, 3.1, 3.2], 2.0**-9: [5.0, 5.1, 5.2], 1.0: [3.3, 3.42, 3.51]}

    def runs(scale):
        rows = held_out.get(scale, [3.001, 3.1, 3.199])
        return [{"held_out": row, "losses": [5.0, 4.0, row], "skipped": 0} for row in rows]

    return {
        "size": {"scales": list(SCALES)},
        "margin": 0.01,
        "lowest": experiment.LOWEST,
        "moments": {name: copy.deepcopy(moment) for name in experiment.MOMENTS},
        "runs": {"fp32": runs(0.0), **{experiment.scaled(scale): runs(scale) for scale in SCALES}},
    }


def end(numbers, scale, values):
    for run, value in zip(numbers["runs"][experiment.scaled(scale)], values):
        run["held_out"] = value


def every_moment(numbers, **changes):
    for moment in numbers["moments"].values():
        moment.update(changes)


BREAKS = [
    ("mostly-zeros", lambda n: every_moment(n, zero=0.49)),
    ("lost-unscaled", lambda n: n["moments"]["middle"]["lost"].update({"1": 0.019, "8": 0.007})),
    ("shift-3-recovers-most", lambda n: every_moment(n, lost={"1": 0.1, "8": 0.051, "32768": 0.0})),
    ("shift-15-recovers-all", lambda n: every_moment(n, lost={"1": 0.1, "8": 0.04, "32768": 0.0011})),
    (
        "shift-15-recovers-all",
        lambda n: n["moments"]["end"].update(overflow={"1": 0.0, "8": 0.0, "32768": 0.001}),
    ),
    ("unscaled-falls-behind", lambda n: end(n, 1.0, [3.3, 3.1, 3.2])),
    ("scaled-lies-on-fp32", lambda n: end(n, 8.0, [3.1, 3.21, 3.3])),
    ("scaled-lies-on-fp32", lambda n: end(n, 8.0, [2.9, 3.0, 3.09])),  # better by more than the margin
    ("scaled-lies-on-fp32", lambda n: end(n, 2.0**15, [3.0, 3.1, math.nan])),
    ("small-gradients-matter-later", lambda n: end(n, 2.0**-9, [3.0, 3.1, 3.3])),
]


def test_every_finding_can_hold():
    found = experiment.findings(numbers())
    assert [finding.name for finding in found if not finding.holds] == []
    assert {finding.name for finding in found} == {name for name, _ in BREAKS}


@pytest.mark.parametrize(("name", "damage"), BREAKS)
def test_every_finding_can_fail(name, damage):
    broken = numbers()
    damage(broken)
    assert [finding.name for finding in experiment.findings(broken) if not finding.holds] == [name]


def test_a_run_that_broke_has_fallen_behind():
    broken = numbers()
    end(broken, 1.0, [math.nan, 3.1, 3.2])
    assert {one.name: one.holds for one in experiment.findings(broken)}["unscaled-falls-behind"]


@pytest.mark.heavy
def test_a_tiny_run_and_its_figure():
    size = experiment.Size(width=2, batch=4, steps=4, seeds=2, scales=(2.0**-9, 1.0, 8.0, 2.0**15))
    told = []
    outcome = experiment.run(Effort(True, lambda words, share: told.append((words, share))), size)
    assert [share for _, share in told] == [i / 10 for i in range(10)]
    moments = outcome.numbers["moments"]
    assert list(moments) == ["start", "middle", "end"]
    for moment in moments.values():
        assert sum(moment["counts"]) == round(moment["elements"] * (1 - moment["zero"]))
        assert 0 < moment["zero"] < 1
    runs = outcome.numbers["runs"]
    assert runs["fp32"][0]["losses"][0] == pytest.approx(
        runs["fp16,loss_scale=8.0"][0]["losses"][0], rel=1e-2
    )
    assert runs["fp32"][0]["losses"] != runs["fp32"][1]["losses"]
    drawn = figures.draw(experiment.EXPERIMENT, json.loads(json.dumps(outcome.numbers)))
    assert drawn["figure.png"].startswith(b"\x89PNG")


@pytest.mark.heavy
def test_the_figure_of_a_run_that_broke():
    broken = numbers()
    end(broken, 2.0**-9, [None, None, None])
    broken["runs"][experiment.scaled(2.0**-9)][0]["losses"] = [5.0, None, None]
    assert figures.draw(experiment.EXPERIMENT, broken)["figure.svg"]
