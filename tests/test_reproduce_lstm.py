"""lstm-loss-scale: its text, and its rules against numbers that keep and break them."""

from __future__ import annotations

import json
import math

import pytest
import torch

from mezzo.reproduce import figures, language
from mezzo.reproduce import lstm_loss_scale as experiment
from mezzo.reproduce.experiment import Effort
from mezzo.reproduce.lstm_loss_scale_figure import differences, in_figures

WORDS = [
    ("x_1 = f(10)", ["x_1", "=", "f", "(", "10", ")"]),
    ("a\n\tb", ["a", "\n", "b"]),
    ('"é"', ['"', "é", '"']),
    ("", []),
]


@pytest.mark.parametrize(("source", "expected"), WORDS)
def test_words(source, expected):
    assert language.words(source) == expected


def test_the_vocabulary_is_the_most_frequent_words():
    found = language.indices(("c", "a", "b", "a", "b", "a"), 3)
    assert found.tolist() == [0, 1, 2, 1, 2, 1]


def test_targets_are_the_inputs_one_word_later():
    text = torch.arange(50)
    inputs, targets = language.batch(text, 7, 5, torch.Generator().manual_seed(0))
    assert inputs.shape == (5, 7)
    assert targets.tolist() == (inputs + 1).flatten().tolist()
    # every start there is, the last included, and none beyond
    inputs, _ = language.batch(torch.arange(8), 500, 5, torch.Generator().manual_seed(0))
    assert set(inputs[0].tolist()) == {0, 1, 2}


def test_what_is_held_out_is_not_trained_on(monkeypatch):
    monkeypatch.setattr(language, "_library", lambda: tuple(map(str, range(4096 * 25))))
    monkeypatch.setattr(
        language, "indices", lambda found, vocabulary: torch.tensor([int(word) for word in found])
    )
    text = language.load(10)
    held_out = set(text.held_out.tolist())
    assert len(held_out) == 4096
    assert len(text.training) == 4096 * 24
    assert not held_out & set(text.training.tolist())


AT = [4, 12, 20, 40]


def numbers():
    """Made up, and every finding holds: unscaled fp16 follows, leaves, and rises in the end."""
    held_out = {
        "fp32": [6.0, 5.5, 5.0, 4.0],
        experiment.scaled(1): [6.1, 5.52, 5.1, 5.6],
        experiment.scaled(128): [6.0, 5.5, 5.01, 4.01],
        experiment.scaled(2**15): [6.0, 5.5, 4.99, 3.99],
    }
    runs = {
        precision: [
            {
                "at": AT,
                "held_out": [loss + seed * (0.1 if i < 3 else 0.05) for i, loss in enumerate(losses)],
                "mean_logit": [0.0, 1.0, 2.0, 9.0],
                "losses": losses,
                "skipped": 0,
            }
            for seed in range(3)
        ]
        for precision, losses in held_out.items()
    }
    for place, run in enumerate(runs[experiment.scaled(128)]):
        run["held_out"][-1] += 0.002 * place
    moment = {"logits": {"zero": 0.2, "lost": {"1": 0.5, "128": 0.02, "32768": 0.0}}}
    runs["fp32"][0]["shares"] = [{"step": step, **json.loads(json.dumps(moment))} for step in (0, 20, 39)]
    size = {"scales": [1, 128, 2**15], "steps": 40}
    return {"size": size, "floor": 2.0**-12, "margin": experiment.MARGIN, "runs": runs}


def shift(numbers, precision, at, by):
    for run, amount in zip(numbers["runs"][precision], by):
        run["held_out"][at] += amount


UNSCALED, SCALED, FAR = (experiment.scaled(scale) for scale in (1, 128, 2**15))

# What is done to the numbers, and the findings that no longer hold.
BREAKS = [
    (
        lambda n: shift(n, UNSCALED, -1, [-1.58] * 3),
        {"unscaled-falls-behind", "unscaled-leaves-late", "unscaled-diverges"},
    ),
    (lambda n: shift(n, UNSCALED, -1, [-0.5] * 3), {"unscaled-diverges"}),
    (lambda n: shift(n, UNSCALED, -1, [0.0, -0.45, 0.0]), {"unscaled-diverges"}),  # one seed of three
    (lambda n: shift(n, UNSCALED, 1, [0.05] * 3), {"unscaled-leaves-late"}),
    (lambda n: shift(n, SCALED, -1, [0.06] * 3), {"scaled-lies-on-fp32"}),
    (lambda n: shift(n, SCALED, -1, [-0.07] * 3), {"scaled-lies-on-fp32"}),
    (
        lambda n: shift(n, SCALED, -1, [0.1, -0.1, 0.0]),
        {"scaled-lies-on-fp32"},
    ),  # on the mean, and proves nothing
    (lambda n: shift(n, SCALED, -1, [0.0, math.nan, 0.0]), {"scaled-lies-on-fp32"}),
    (lambda n: shift(n, FAR, -1, [0.07] * 3), {"scaled-lies-on-fp32"}),
    (
        lambda n: n["runs"]["fp32"][0]["shares"][1]["logits"]["lost"].update({"1": 0.39}),
        {"gradients-vanish-unscaled"},
    ),
    (
        lambda n: n["runs"]["fp32"][0]["shares"][2]["logits"]["lost"].update({"128": 0.21}),
        {"gradients-vanish-unscaled"},
    ),
]


def fallen(numbers):
    return {finding.name for finding in experiment.findings(numbers) if not finding.holds}


def test_every_finding_can_hold():
    assert fallen(numbers()) == set()
    names = [finding.name for finding in experiment.findings(numbers())]
    assert len(names) == len(set(names)) == 5
    assert set(names) == set().union(*(broken for _, broken in BREAKS))


@pytest.mark.parametrize(("damage", "expected"), BREAKS)
def test_every_finding_can_fail(damage, expected):
    broken = numbers()
    damage(broken)
    assert fallen(broken) == expected


def test_fp32_that_rises_too_is_no_divergence_of_fp16():
    broken = numbers()
    for precision in broken["runs"]:
        shift(broken, precision, -1, [1.2] * 3)
    assert fallen(broken) == {"unscaled-diverges"}


def test_a_run_that_stopped_has_fallen_behind_and_diverged():
    broken = numbers()
    run = broken["runs"][UNSCALED][1]
    run["held_out"], run["mean_logit"] = run["held_out"][:2], run["mean_logit"][:2]
    assert fallen(broken) == set()
    assert math.isnan(differences(broken, UNSCALED)[1][-1])


def test_one_seed_proves_no_equivalence():
    broken = numbers()
    broken["runs"] = {precision: runs[:1] for precision, runs in broken["runs"].items()}
    assert {"scaled-lies-on-fp32", "unscaled-falls-behind"} <= fallen(broken)


def test_the_size_that_is_declared():
    assert experiment.QUICK.floor == 2.0**-12
    assert [in_figures(scale) for scale in experiment.FULL.scales] == ["1", "128", "2^15"]


@pytest.mark.heavy
def test_a_tiny_run_and_its_figure(monkeypatch):
    short = torch.randint(64, (2000,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(experiment, "load", lambda vocabulary: language.Text(short, short))
    size = experiment.Size(
        vocabulary=64, batch=8, context=4, embedding=4, hidden=6, steps=6, seeds=2, scales=(1, 128)
    )
    told = []
    outcome = experiment.run(Effort(True, lambda words, share: told.append((words, share))), size)
    assert [share for _, share in told] == [i / 6 for i in range(6)]
    runs = outcome.numbers["runs"]
    assert [len(one) for one in runs.values()] == [2, 2, 2]
    fp32, fp16 = runs["fp32"][0], runs[experiment.scaled(128)][0]
    assert fp32["losses"][0] == pytest.approx(fp16["losses"][0], rel=1e-3)  # the same weights and words
    assert fp32["losses"] != fp16["losses"]
    assert fp32["at"] == fp16["at"] == [1, 2, 3, 4, 5, 6]
    assert [moment["step"] for moment in fp32["shares"]] == [0, 2, 5]
    assert all(
        moment["logits"]["lost"]["1"] == 0 for moment in fp32["shares"]
    )  # 32 words a step: nothing vanishes
    drawn = figures.draw(experiment.EXPERIMENT, json.loads(json.dumps(outcome.numbers)))
    assert drawn["figure.png"].startswith(b"\x89PNG")


@pytest.mark.heavy
def test_the_standard_library_is_a_text():
    text = language.load(512)
    assert len(text.training) > 10 * len(text.held_out) > 100_000
    assert text.training.max() == 511
    assert 0.01 < (text.training == 0).float().mean() < 0.5


@pytest.mark.heavy
def test_the_gradient_of_improbable_words_vanishes_at_the_size_that_is_declared():
    vocabulary, tokens = experiment.QUICK.vocabulary, experiment.QUICK.batch * experiment.QUICK.context
    logits = torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(64), reduction="sum") / tokens
    (gradient,) = torch.autograd.grad(loss, logits)
    wrong = torch.ones_like(logits, dtype=torch.bool)
    wrong[torch.arange(64), torch.arange(64)] = False
    improbable = wrong & (logits.softmax(-1) < experiment.QUICK.floor * (1 - 1e-3))
    probable = wrong & (logits.softmax(-1) > experiment.QUICK.floor * (1 + 1e-3))
    half = gradient.half()
    assert (half[improbable] == 0).all()
    assert (half[probable] != 0).all()
    assert improbable.any()
    assert probable.any()


@pytest.mark.heavy
def test_the_figure_of_a_run_that_stopped():
    broken = numbers()
    broken["runs"][UNSCALED][1]["held_out"][2:] = [None, None]
    broken["runs"][UNSCALED][1]["mean_logit"][2:] = [None, None]
    assert figures.draw(experiment.EXPERIMENT, broken)["figure.svg"]
