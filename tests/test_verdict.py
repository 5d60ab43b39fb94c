"""The verdict's words: what earns each, and how often each is wrong when the truth is known."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from scipy import stats

from mezzo.core.comparison import Parity
from mezzo.core.curve import final_count, final_loss, start_loss, tail_loss, window_losses
from mezzo.core.equivalence import paired_interval, pairs_needed, tost, tost_power
from mezzo.core.errors import ScriptError, UsageError
from mezzo.core.verdict import Margins, RunResult, Verdict, judge

STEPS = 100
CLEAN = 1.0 + 1.5 * np.exp(-np.arange(STEPS) / 8)  # falls from 2.5 to 1: it learns 1.3 or so


def run(gap: float = 0.0, *, metric: float | None = None, moved: int = STEPS, skipped: int = 0) -> RunResult:
    return RunResult(CLEAN + gap, metric, moved, skipped)


def runs(*gaps: float, **others: float) -> dict[int, RunResult]:
    return {k: run(gap, **others) for k, gap in enumerate(gaps)}  # type: ignore[arg-type]


def edited(gap: float, where: slice, value: float) -> RunResult:
    losses = CLEAN + gap
    losses[where] = value
    return RunResult(losses, moved=STEPS)


SEEDS = runs(0.0, 0.03, -0.02)  # FP32 under three seeds; the margin is 0.005 x 1.003


# What the three numbers of a pair are: the curve, declared once.


@pytest.mark.parametrize(("count", "last"), [(1, 1), (4, 4), (5, 5), (20, 5), (50, 5), (51, 6), (1000, 100)])
def test_the_final_loss_is_the_mean_of_the_last_tenth_and_of_five_at_least(count: int, last: int) -> None:
    losses = np.arange(count, dtype=float)
    assert final_count(count) == last
    assert final_loss(losses) == np.mean(losses[-last:])


def test_start_tail_and_windows() -> None:
    losses = np.arange(1000, dtype=float)
    assert start_loss(losses) == np.mean(losses[:20])
    assert tail_loss(losses) == np.mean(losses[-20:])
    assert window_losses(losses).tolist() == [100 * i + 49.5 for i in range(10)]
    assert len(window_losses(losses[:20])) == 4
    assert window_losses(losses[:3]).tolist() == [1.0]
    assert math.isnan(final_loss([]))


# The interval, the test and its power, against scipy and against simulation.


def test_the_interval_is_scipys() -> None:
    d = np.random.default_rng(0).normal(1.0, 2.0, 7)
    low, high = paired_interval(d)
    expected = stats.t.interval(0.90, 6, d.mean(), stats.sem(d))
    assert (low, high) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="at least two differences, not 1"):
        paired_interval([1.0])


def rate_is_at_most(count: int, draws: int, bound: float) -> bool:
    """Whether `count` of `draws` is compatible with a rate of `bound` or less (99.9 % one-sided binomial)."""
    return count <= stats.binom.ppf(0.999, draws, bound)


@pytest.mark.parametrize("pairs", [3, 5, 10])
@pytest.mark.parametrize("sd", [0.1, 0.5, 1.0, 3.0])
def test_equivalent_is_wrong_in_no_more_than_five_percent_at_the_margin(pairs: int, sd: float) -> None:
    draws = 100_000
    d = np.random.default_rng(pairs).normal(1.0, sd, (draws, pairs))  # the true harm is the margin itself: 1
    wrong = int(tost(d, 1.0).sum())
    assert rate_is_at_most(wrong, draws, 0.05), f"{wrong / draws:.2%}"
    if sd == 0.1:  # a fixed margin spends all of its five percent where the noise is small
        assert wrong / draws > 0.045


@pytest.mark.parametrize("pairs", [3, 5])
def test_a_margin_taken_from_the_noise_would_not_hold(pairs: int) -> None:
    """Why the margin is an input: twice the FP32 seeds' sample deviation, say, and the same test often errs."""
    draws, rng = 50_000, np.random.default_rng(1)
    seeds = rng.normal(0.0, 1.0, (draws, pairs))
    d = rng.normal(2.0, 0.3, (draws, pairs))  # the true harm is twice the true deviation
    assert tost(d, 2.0 * seeds.std(axis=-1, ddof=1)).mean() > 0.2


@pytest.mark.parametrize("pairs", [2, 3, 6, 12])
@pytest.mark.parametrize(("sd", "gap"), [(0.2, 0.0), (0.6, 0.0), (0.6, 0.5), (1.5, 0.0)])
def test_power_is_what_a_simulation_finds(pairs: int, sd: float, gap: float) -> None:
    d = np.random.default_rng(7).normal(gap, sd, (40_000, pairs))
    assert tost_power(sd, pairs, 1.0, gap) == pytest.approx(tost(d, 1.0).mean(), abs=0.012)


def test_power_grows_with_pairs_and_shrinks_with_noise_and_gap() -> None:
    by_pairs = [tost_power(0.5, n, 1.0) for n in range(2, 30)]
    by_noise = [tost_power(sd, 5, 1.0) for sd in np.linspace(0.05, 3.0, 30)]
    by_gap = [tost_power(0.5, 5, 1.0, gap) for gap in np.linspace(0.0, 2.0, 30)]
    assert by_pairs == sorted(by_pairs)
    assert by_noise == sorted(by_noise, reverse=True)
    assert by_gap == sorted(by_gap, reverse=True)
    assert tost_power(0.0, 3, 1.0) == 1.0
    assert tost_power(0.0, 3, 1.0, gap=1.0) == 0.0
    assert tost_power(0.5, 1, 1.0) == 0.0


@pytest.mark.parametrize("sd", [0.01, 0.3, 1.0, 4.0])
def test_pairs_needed_is_the_fewest_with_that_power(sd: float) -> None:
    n = pairs_needed(sd, 1.0)
    assert n is not None
    assert tost_power(sd, n, 1.0) >= 0.8
    assert n == 3 or tost_power(sd, n - 1, 1.0) < 0.8


def test_pairs_needed_gives_up_aloud() -> None:
    assert pairs_needed(1000.0, 1.0) is None


# The words. Each row: FP32, candidate, twins, the word, and what its sentence must say.

ROWS: list[
    tuple[str, Mapping[int, RunResult], Mapping[int, RunResult], Mapping[int, RunResult], Parity, str]
] = [
    (
        "three pairs, differences far inside the margin",
        SEEDS,
        runs(0.0001, 0.0302, -0.0199),
        {0: run(0.0001)},
        Parity.EQUIVALENT,
        "lies within the margin",
    ),
    (
        "three pairs, harm far beyond margin and noise",
        SEEDS,
        runs(0.05, 0.081, 0.029),
        {0: run(0.0001)},
        Parity.DIVERGENT,
        "harm is established",
    ),
    (
        "the same size on the better side",
        SEEDS,
        runs(-0.05, -0.021, -0.069),
        {0: run(0.0001)},
        Parity.CONSISTENT,
        "on the better side of FP32",
    ),
    (
        "a tight gap that one ulp makes as well",
        SEEDS,
        runs(0.011, 0.041, -0.009),
        {0: run(0.02)},
        Parity.CONSISTENT,
        "within what one ulp in the initial weights does to FP32",
    ),
    (
        "gap beyond the margin, not beyond the pairs' spread",
        SEEDS,
        runs(0.04, 0.03, -0.02),
        {0: run(0.001)},
        Parity.CONSISTENT,
        "its interval holds zero",
    ),
    (
        "gap beyond everything but not by enough",
        runs(0.0, 0.001, -0.001),
        runs(0.006, 0.009, 0.0045),
        {0: run(0.0001)},
        Parity.INCONCLUSIVE,
        "beyond the margin and beyond the noise, yet not established",
    ),
    (
        "noise that swamps everything",
        runs(0.0, 0.5, -0.4),
        runs(0.3, 0.2, -0.1),
        {0: run(0.3)},
        Parity.INCONCLUSIVE,
        "the noise is too large to tell",
    ),
    (
        "one pair, inside the margin",
        runs(0.0),
        runs(0.001),
        {0: run(0.001)},
        Parity.CONSISTENT,
        "within the margin",
    ),
    (
        "one pair, inside the twin's noise",
        runs(0.0),
        runs(0.015),
        {0: run(0.01)},
        Parity.CONSISTENT,
        "one ulp",
    ),
    (
        "one pair, six margins: too few to say",
        runs(0.0),
        runs(0.03),
        {0: run(0.001)},
        Parity.INCONCLUSIVE,
        "yet not established",
    ),
    (
        "one pair, twenty margins",
        runs(0.0),
        runs(0.1),
        {0: run(0.001)},
        Parity.DIVERGENT,
        "harm is established",
    ),
    (
        "one pair, twenty margins, but the twin does as much",
        runs(0.0),
        runs(0.1),
        {0: run(0.06)},
        Parity.INCONCLUSIVE,
        "too large to tell",
    ),
    ("one pair without a twin", runs(0.0), runs(0.03), {}, Parity.INCONCLUSIVE, "no noise was measured"),
    (
        "two pairs, twenty margins each",
        runs(0.0, 0.001),
        runs(0.1, 0.11),
        {0: run(0.001)},
        Parity.DIVERGENT,
        "harm is established",
    ),
    (
        "two pairs, harm in one only",
        runs(0.0, 0.001),
        runs(0.2, 0.0),
        {0: run(0.001)},
        Parity.INCONCLUSIVE,
        "yet not established",
    ),
    (
        "one run of three ruined: a t interval would call it noise",
        SEEDS,
        {**runs(0.0001, 0.0301), 2: edited(-0.02, slice(50, None), 2.4)},
        {0: run(0.0001)},
        Parity.DIVERGENT,
        "With seed 2 its loss in the last tenth",
    ),
    (
        "a dive in the last three steps",
        SEEDS,
        {**runs(0.0001, 0.0301), 2: edited(-0.02, slice(-3, None), 2.0)},
        {0: run(0.0001)},
        Parity.DIVERGENT,
        "With seed 2 its loss in the very end",
    ),
    (
        "a spike on the way that is over at the end",
        SEEDS,
        {k: edited(gap, slice(60, 70), 1.8 + gap) for k, gap in enumerate((0.0001, 0.0301, -0.0199))},
        {0: run(0.0001)},
        Parity.CONSISTENT,
        "between 60% and 70% of the run",
    ),
    (
        "NaN from the middle on",
        SEEDS,
        {**runs(0.0, 0.03), 2: edited(0, slice(50, None), math.nan)},
        {},
        Parity.DIVERGENT,
        "its loss is nan from step 50",
    ),
    (
        "one infinite loss whose step was not skipped",
        runs(0.0),
        {0: edited(0, slice(50, 51), math.inf)},
        {},
        Parity.DIVERGENT,
        "its loss is inf from step 50",
    ),
    (
        "no step moved",
        runs(0.0),
        {0: RunResult(CLEAN, moved=0, skipped=STEPS)},
        {},
        Parity.DIVERGENT,
        "no optimizer step moved",
    ),
    ("no loss at all", runs(0.0), {0: RunResult(np.array([]))}, {}, Parity.DIVERGENT, "recorded no loss"),
]


@pytest.mark.parametrize(
    ("baseline", "candidate", "twins", "word", "says"),
    [row[1:] for row in ROWS],
    ids=[row[0] for row in ROWS],
)
def test_each_word_is_earned(
    baseline: Mapping[int, RunResult],
    candidate: Mapping[int, RunResult],
    twins: Mapping[int, RunResult],
    word: Parity,
    says: str,
) -> None:
    verdict = judge(baseline, candidate, twins)
    assert verdict.parity is word, verdict.reason
    assert says in verdict.reason


def test_an_infinite_loss_whose_step_was_skipped_is_a_note() -> None:
    losses = CLEAN.copy()
    losses[3] = math.inf
    verdict = judge(runs(0.0), {0: RunResult(losses, moved=STEPS - 1, skipped=1)}, {0: run(0.001)})
    assert verdict.parity is Parity.CONSISTENT
    assert verdict.notes == ("seed 0: 1 losses were not finite; their steps were skipped.",)


def with_metrics(values: list[float], gaps: tuple[float, ...] = (0.0, 0.03, -0.02)) -> dict[int, RunResult]:
    return {k: run(gap, metric=value) for k, (gap, value) in enumerate(zip(gaps, values))}


BASE = with_metrics([98.0, 98.4, 97.8])
CLOSE = (0.0001, 0.0302, -0.0199)


@pytest.mark.parametrize(
    ("metrics", "margins", "word"),
    [
        ([98.0, 98.41, 97.8], Margins(), Parity.EQUIVALENT),
        ([95.0, 95.5, 94.7], Margins(), Parity.DIVERGENT),
        ([101.0, 101.5, 100.7], Margins(), Parity.CONSISTENT),
        ([101.0, 101.5, 100.7], Margins(metric_higher=False), Parity.DIVERGENT),
        ([95.0, 95.5, 94.7], Margins(metric_higher=False), Parity.CONSISTENT),
        ([97.0, 97.5, 96.8], Margins(metric=0.05, metric_relative=True), Parity.EQUIVALENT),
        ([98.4, 97.6, 98.4], Margins(), Parity.CONSISTENT),
    ],
)
def test_parity_needs_the_metric_too(metrics: list[float], margins: Margins, word: Parity) -> None:
    verdict = judge(BASE, with_metrics(metrics, CLOSE), {0: run(0.0001, metric=98.1)}, margins)
    assert verdict.loss is not None
    assert verdict.loss.parity is Parity.EQUIVALENT
    assert verdict.parity is word, verdict.reason
    assert "Metric" in verdict.reason


def test_a_metric_that_a_run_lacks_is_not_judged() -> None:
    candidate = with_metrics([98.0, 98.4, 97.8], CLOSE)
    verdict = judge(BASE, {**candidate, 2: run(-0.0199)})
    assert verdict.metric is None


def test_equal_fp32_runs_count_as_one() -> None:
    verdict = judge(runs(0.0, 0.0, 0.0), runs(0.0001, 0.0001, 0.0001), {0: run(0.001)})
    assert verdict.pairs == 1
    assert verdict.parity is Parity.CONSISTENT  # one pair never earns more
    assert "3 seeds gave 1 distinct FP32 run:" in verdict.notes[0]
    assert [k for k, *_ in verdict.differences] == [0, 1, 2]


def test_a_twin_that_equals_its_run_measures_nothing() -> None:
    verdict = judge(runs(0.0), runs(0.03), runs(0.0))
    assert verdict.loss is not None
    assert verdict.loss.twin_noise is None


def test_every_number_is_there() -> None:
    verdict = judge(SEEDS, runs(0.004, 0.03, -0.02), {0: run(0.002)})
    part = verdict.loss
    assert part is not None
    d = np.array([0.004, 0.0, 0.0])
    low, high = paired_interval(d)
    base = float(np.mean([final_loss(r.losses) for r in SEEDS.values()]))
    assert verdict.pairs == 3
    assert part.gap == pytest.approx(d.mean())
    assert part.interval == pytest.approx((float(low), float(high)))
    assert part.margin == pytest.approx(0.005 * base)
    assert part.twin_noise == pytest.approx(2 * 0.002)
    assert part.seed_noise == pytest.approx(2 * math.sqrt(2) * np.std([0.0, 0.03, -0.02], ddof=1))
    assert part.power == pytest.approx(tost_power(d.std(ddof=1), 3, part.margin))
    assert part.pairs_needed == pairs_needed(d.std(ddof=1), part.margin)
    assert f"If there is no gap, about {part.pairs_needed} pairs would prove it" in verdict.reason
    assert [row[1] for row in verdict.differences] == pytest.approx(d.tolist())


@pytest.mark.parametrize("shifts", [(0.004,), (0.004, 0.03)])
def test_fewer_than_three_pairs_plan_nothing(shifts: tuple[float, ...]) -> None:
    """Their noise is not that of a pair's difference: a number from it would be contradicted by the next pair."""
    verdict = judge(runs(*[0.0] * len(shifts)), runs(*shifts), {0: run(0.002)})
    part = verdict.loss
    assert part is not None
    assert (part.power, part.pairs_needed) == (None, None)
    assert "3 or more pairs can prove it." in verdict.reason
    assert "80 % power" not in verdict.reason


@pytest.mark.parametrize(
    ("baseline", "candidate", "error", "says"),
    [
        ({0: RunResult(np.array([]))}, runs(0.0), ScriptError, "never called backward"),
        ({0: edited(0, slice(7, 8), math.nan)}, runs(0.0), ScriptError, "a loss of nan at step 7"),
        (runs(0.0), {5: run()}, UsageError, "share no seed"),
    ],
)
def test_what_cannot_be_judged(
    baseline: Mapping[int, RunResult], candidate: Mapping[int, RunResult], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        judge(baseline, candidate)


@pytest.mark.parametrize("value", [0.0, -0.1, math.nan, math.inf])
def test_a_margin_is_a_positive_number(value: float) -> None:
    with pytest.raises(UsageError, match="give a number above 0"):
        Margins(loss=value)


# How often the words are wrong, for runs whose truth is known.


def draw(
    rng: np.random.Generator, pairs: int, noise: float, harm: float, metric_noise: float | None
) -> Verdict:
    """Runs as chaos makes them: a seed's level, shared by its pair, and each run's own noise by windows."""

    def one(level: float, gap: float) -> RunResult:
        own = np.repeat(rng.standard_normal(10), STEPS // 10) * noise
        metric = None if metric_noise is None else 98.0 + metric_noise * rng.standard_normal()
        return RunResult(CLEAN + level + gap + own, metric, STEPS)

    levels = 0.02 * rng.standard_normal(pairs)
    baseline = {k: one(level, 0.0) for k, level in enumerate(levels)}
    candidate = {k: one(level, harm) for k, level in enumerate(levels)}
    return judge(baseline, candidate, {0: one(levels[0], 0.0)})


@pytest.mark.heavy
@pytest.mark.parametrize("metric_noise", [None, 2.0])
@pytest.mark.parametrize("pairs", [1, 2, 3, 6])
def test_no_harm_is_called_divergent_in_at_most_five_percent(pairs: int, metric_noise: float | None) -> None:
    rng = np.random.default_rng(pairs)
    for noise in (0.003, 0.05, 0.3):  # margin 0.005: from below it to sixty times it
        draws = 200
        wrong = sum(
            draw(rng, pairs, noise, 0.0, metric_noise).parity is Parity.DIVERGENT for _ in range(draws)
        )
        assert rate_is_at_most(wrong, draws, 0.05), f"noise {noise}: {wrong / draws:.2%}"


@pytest.mark.heavy
def test_harm_at_the_margin_is_called_equivalent_in_at_most_five_percent() -> None:
    rng = np.random.default_rng(0)
    for noise in (0.0003, 0.002):
        draws = 1000
        wrong = sum(draw(rng, 3, noise, 0.0051, None).parity is Parity.EQUIVALENT for _ in range(draws))
        assert rate_is_at_most(wrong, draws, 0.05), f"noise {noise}: {wrong / draws:.2%}"


@pytest.mark.heavy
def test_a_large_harm_is_found() -> None:
    rng = np.random.default_rng(0)
    found = [
        draw(rng, 3, 0.003, harm, None).parity is Parity.DIVERGENT for harm in (0.03,) for _ in range(300)
    ]
    assert np.mean(found) > 0.8
