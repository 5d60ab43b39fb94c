"""The verdict's words: what earns each, and how often each is wrong when the truth is known."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from mezzo.compare.runs import read_run
from mezzo.core import equivalence
from mezzo.core.comparison import Parity, final_count, final_loss, start_loss, tail_loss, window_losses
from mezzo.core.equivalence import paired_interval, pairs_needed, tost_power
from mezzo.core.errors import UsageError
from mezzo.core.records import RecordWriter, UpdateRecord
from mezzo.core.verdict import CONSTANT, Margins, RunResult, judge

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


@pytest.mark.parametrize(("count", "last"), [(0, 0), (4, 4), (20, 5), (51, 6), (1000, 100)])
def test_the_final_loss_is_the_mean_of_the_last_tenth_and_of_five_at_least(count: int, last: int) -> None:
    losses = np.arange(count, dtype=float)
    assert final_count(count) == last
    assert final_loss(losses) == np.mean(losses[-last:]) if count else math.isnan(final_loss(losses))


def test_start_tail_and_windows() -> None:
    losses = np.arange(1000, dtype=float)
    assert start_loss(losses) == np.mean(losses[:20])
    assert tail_loss(losses) == np.mean(losses[-20:])
    assert window_losses(losses).tolist() == [100 * i + 49.5 for i in range(10)]
    assert len(window_losses(losses[:20])) == 4


# The interval, the test and its power, against scipy and against simulation.


def test_the_interval_is_scipys() -> None:
    d = np.random.default_rng(0).normal(1.0, 2.0, 7)
    expected = stats.t.interval(0.90, 6, d.mean(), stats.sem(d))
    assert paired_interval(d) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="at least two differences, not 1"):
        paired_interval([1.0])


def within_one(differences: Any) -> Any:
    """Two one-sided tests: whether each row's 90 % interval is within a margin of 1."""
    low, high = paired_interval(differences)
    return (low > -1.0) & (high < 1.0)


def rate_is_at_most(count: int, draws: int, bound: float) -> bool:
    """Whether `count` of `draws` is compatible with a rate of `bound` or less (99.9 % one-sided binomial)."""
    return count <= stats.binom.ppf(0.999, draws, bound)


@pytest.mark.parametrize("pairs", [3, 5, 10])
@pytest.mark.parametrize("sd", [0.1, 0.5, 1.0, 3.0])
def test_equivalent_is_wrong_in_no_more_than_five_percent_at_the_margin(pairs: int, sd: float) -> None:
    draws = 100_000
    d = np.random.default_rng(pairs).normal(1.0, sd, (draws, pairs))  # the true harm is the margin itself: 1
    wrong = int(within_one(d).sum())
    assert rate_is_at_most(wrong, draws, 0.05), f"{wrong / draws:.2%}"
    if sd == 0.1:  # a fixed margin spends all of its five percent where the noise is small
        assert wrong / draws > 0.045


@pytest.mark.parametrize("pairs", [2, 3, 6, 12])
@pytest.mark.parametrize(("sd", "gap"), [(0.2, 0.0), (0.6, 0.0), (0.6, 0.5), (1.5, 0.0)])
def test_power_is_what_a_simulation_finds(pairs: int, sd: float, gap: float) -> None:
    d = np.random.default_rng(7).normal(gap, sd, (40_000, pairs))
    assert tost_power(sd, pairs, 1.0, gap) == pytest.approx(within_one(d).mean(), abs=0.012)


def test_power_without_noise_and_of_one_pair() -> None:
    assert (tost_power(0.0, 3, 1.0), tost_power(0.0, 3, 1.0, gap=1.0), tost_power(0.5, 1, 1.0)) == (1, 0, 0)


@pytest.mark.parametrize("sd", [0.01, 0.3, 1.0, 4.0])
def test_pairs_needed_is_the_fewest_with_that_power(sd: float) -> None:
    n = pairs_needed(sd, 1.0)
    assert tost_power(sd, n, 1.0) >= 0.8
    assert n == 3 or tost_power(sd, n - 1, 1.0) < 0.8
    assert pairs_needed(1000 * sd / 0.01, 1.0) is None


def test_a_gap_that_is_there_counts_as_noise_only_as_far_as_chance_goes() -> None:
    d = np.array([0.1, -0.1, 0.05, -0.05, 0.0])
    assert equivalence.null_deviation(d) == pytest.approx(np.sqrt(np.mean(d * d)))
    assert equivalence.null_deviation(d + 1.0) == pytest.approx(equivalence.null_deviation(d + 100.0))
    assert equivalence.null_deviation(d + 1.0) < 0.2


@pytest.mark.parametrize("sd", [0.1, 0.38, 0.42, 0.6, 1.0])
@pytest.mark.parametrize("pairs", [3, 4, 6, 11])
def test_pairs_needed_agrees_with_the_printed_power(pairs: int, sd: float) -> None:
    """Pairs whose power reaches 80 % need no more of them; pairs whose power does not need more."""
    d = np.linspace(-1.0, 1.0, pairs)
    margin = 0.005 * 1.003
    gaps = margin * sd * d / d.std(ddof=1)
    base = runs(*np.linspace(0.0, 1e-4, pairs))
    part = judge(base, {k: run(1e-4 * k / (pairs - 1) + gaps[k]) for k in base}).loss
    assert (part.power >= equivalence.POWER) == (part.pairs_needed <= pairs)


# The words.

THREE, WIDE, TEN = (0.0, 0.03, -0.02), (0.0, 0.3, -0.2), tuple(0.01 * np.sin(np.arange(10)))
CLOSE = (0.0001, 0.0302, -0.0199)
NORMAL_SCORES = stats.norm.ppf((np.arange(10) + 0.5) / 10)
FAR_OUTSIDE = [gap + 0.015 * (k == 4) + 1e-4 * (k % 3) for k, gap in enumerate(TEN)]
LARGEST = [gap + 0.005 * 1.2 * NORMAL_SCORES[k] for k, gap in enumerate(TEN)]
RUINED = {**runs(0.0001, 0.0301), 2: edited(-0.02, slice(50, None), 2.4)}
DIVE = {**runs(0.0001, 0.0301), 2: edited(-0.02, slice(-3, None), 2.0)}
SPIKES = {k: edited(gap, slice(60, 70), 1.8 + gap) for k, gap in enumerate(CLOSE)}
NAN = {**runs(0.0, 0.03), 2: edited(0, slice(50, None), math.nan)}
INF = {0: edited(0, slice(50, 51), math.inf)}
UNMOVED, EMPTY = {0: RunResult(CLEAN, moved=0, skipped=STEPS)}, {0: RunResult(np.array([]))}
HARM, UNSURE = "harm is established", "harm is not established"
FEW = "that one or two pairs need"
ULP = "one ulp in the initial weights"

EQ, CON, INC, DIV = Parity
INSIDE, LARGE = "lies within the margin", "too large to tell"

# Gaps of FP32's runs; gaps of the candidate's, or its runs; gap of the twin; the word; what its sentence must say.
ROWS: dict[str, tuple[Any, Any, float | None, Parity, str]] = {
    "far inside the margin": (THREE, CLOSE, 1e-4, EQ, INSIDE),
    "far beyond margin and noise": (THREE, (0.05, 0.081, 0.029), 1e-4, DIV, HARM),
    "as far on the better side": (THREE, (-0.05, -0.021, -0.069), 1e-4, CON, "the better side of FP32"),
    "tight, but one ulp does as much": (THREE, (0.011, 0.041, -0.009), 0.02, INC, f"{ULP} changes FP32"),
    "some spread, and one ulp does as much": (THREE, (0.006, 0.042, -0.013), 0.02, CON, f"effect of {ULP}"),
    "harm within the spread between seeds": (WIDE, (0.01, 0.317, -0.193), 1e-4, INC, UNSURE),
    "harm beyond the margin in every pair": (WIDE, (0.012, 0.3122, -0.1881), 1e-4, DIV, HARM),
    "two pairs beyond the margin": ((0.0, 0.3), (0.012, 0.3121), 1e-4, INC, "two pairs are too few"),
    "one of ten far outside": (TEN, FAR_OUTSIDE, 1e-4, CON, "the harm of one pair (0.0151) lies far outside"),
    "the worst of ten is one of its kind": (TEN, LARGEST, 1e-4, EQ, INSIDE),
    "within the pairs' spread": (THREE, (0.04, 0.03, -0.02), 1e-3, CON, "its interval contains zero"),
    "not by enough": ((0.0, 0.001, -0.001), (0.006, 0.009, 0.0045), 1e-4, INC, UNSURE),
    "noise that swamps everything": ((0.0, 0.5, -0.4), (0.3, 0.2, -0.1), 0.3, INC, LARGE),
    "one pair, inside the margin": ((0.0,), (0.001,), 0.001, CON, "within the margin"),
    "one pair, inside the twin's noise": ((0.0,), (0.015,), 0.01, CON, "one ulp"),
    "one pair, six margins": ((0.0,), (0.03,), 0.001, INC, UNSURE),
    "one pair, twenty margins": ((0.0,), (0.1,), 0.001, DIV, FEW),
    "one pair, but the twin does as much": ((0.0,), (0.1,), 0.06, INC, LARGE),
    "one pair without a twin": ((0.0,), (0.03,), None, INC, "no noise was measured"),
    "two pairs, twenty margins each": ((0.0, 0.001), (0.1, 0.11), 0.001, DIV, FEW),
    "two pairs, harm in one only": ((0.0, 0.001), (0.2, 0.0), 0.001, INC, UNSURE),
    "one run of three ruined": (THREE, RUINED, 1e-4, DIV, "With seed 2 its loss in the last tenth"),
    "a dive in the last three steps": (THREE, DIVE, 1e-4, DIV, "With seed 2 its loss in the very end"),
    "a spike that is over at the end": (THREE, SPIKES, 1e-4, CON, "Between 60 and 70 % of the run"),
    "NaN from the middle on": (THREE, NAN, None, DIV, "its loss is nan from step 50"),
    "an infinite loss, not skipped": ((0.0,), INF, None, DIV, "its loss is inf from step 50"),
    "no step moved": ((0.0,), UNMOVED, None, DIV, "no optimizer step changed the weights"),
    "no loss at all": ((0.0,), EMPTY, None, DIV, "recorded no loss"),
}


def phased(*gaps: float, levels: tuple[float, ...] = (0.0, 0.03, -0.02)) -> dict[int, RunResult]:
    """Runs of several phases in a row, each with a gap and the same curve."""
    ends = tuple(STEPS * (n + 1) for n in range(len(gaps) - 1))
    return {
        k: RunResult(
            np.concatenate([CLEAN + level + gap for gap in gaps]), moved=STEPS * len(gaps), ends=ends
        )
        for k, level in enumerate(levels)
    }


@pytest.mark.parametrize("levels", [(0.0,), (0.0, 0.03, -0.02)])
def test_an_earlier_phase_that_ended_worse_forbids_harmless(levels: tuple[float, ...]) -> None:
    """As of two models, trained one after the other: the end of the run is that of the second."""
    base, twin = phased(0.0, 0.0, levels=levels), phased(1e-4, -1e-4, levels=(0.0,))
    found = judge(base, phased(0.4, 1e-4, levels=levels), twin)
    assert found.parity is Parity.INCONCLUSIVE, found.reason
    assert "Phase 1 of 2 ended worse, with loss 1.4" in found.cause
    same = judge(base, phased(1e-4, 1e-4, levels=levels), twin)
    assert same.parity is (Parity.EQUIVALENT if len(levels) == 3 else Parity.CONSISTENT), same.reason
    assert judge(base, phased(0.0, 0.4, levels=levels), twin).parity is Parity.DIVERGENT
    short = {k: replace(run, ends=(2 * STEPS - 3,)) for k, run in base.items()}
    assert [len(run.phases) for run in short.values()] == [1] * len(levels)  # three losses are no phase


def test_a_loss_that_never_changes_tells_nothing() -> None:
    flat = {k: RunResult(np.ones(STEPS), moved=STEPS) for k in range(3)}
    found = judge(flat, flat, {})
    assert (found.parity, found.cause) == (Parity.INCONCLUSIVE, CONSTANT)
    worse = {k: replace(run, losses=run.losses + 1) for k, run in flat.items()}
    assert judge(flat, worse, {}).parity is Parity.DIVERGENT
    measured = {k: replace(run, metric=98.0) for k, run in flat.items()}
    assert judge(measured, measured, {}).cause == ""


def test_harm_that_was_over_at_the_end_is_told() -> None:
    found = judge(runs(*THREE), SPIKES, {0: run(1e-4)})
    assert found.departed.endswith("more than the margin, though not at the end")
    assert found.departed in found.reason
    assert judge(runs(*THREE), runs(*CLOSE), {0: run(1e-4)}).departed == ""


@pytest.mark.parametrize("row", ROWS)
def test_each_word_is_earned(row: str) -> None:
    fp32, candidate, twin, word, says = ROWS[row]
    candidate = candidate if isinstance(candidate, dict) else runs(*candidate)
    verdict = judge(runs(*fp32), candidate, {} if twin is None else {0: run(twin)})
    assert verdict.parity is word, verdict.reason
    assert says in verdict.reason


@pytest.mark.parametrize(("share", "word"), [(0.04, INC), (0.06, DIV)])
def test_one_pair_shows_no_harm_below_five_percent_of_what_fp32_learned(share: float, word: Parity) -> None:
    steep = np.geomspace(2.0, 0.04, STEPS)  # it ends far below its start: margins of the final loss are tiny
    learned = steep[:3].mean() - steep[-10:].mean()
    one, other = (RunResult(steep + gap, moved=STEPS) for gap in (share * learned, 1e-6))
    verdict = judge({0: RunResult(steep, moved=STEPS)}, {0: one}, {0: other})
    assert verdict.loss.gap > 100 * verdict.loss.margin
    assert verdict.parity is word, verdict.reason


def test_an_infinite_loss_whose_step_was_skipped_is_a_note() -> None:
    losses = CLEAN.copy()
    losses[3] = math.inf
    verdict = judge(runs(0.0), {0: RunResult(losses, moved=STEPS - 1, skipped=1)}, {0: run(0.001)})
    assert verdict.parity is CON
    assert verdict.notes == ("seed 0: 1 losses were NaN or infinite; their steps were skipped.",)


def with_metrics(values: list[float], gaps: tuple[float, ...] = THREE) -> dict[int, RunResult]:
    return {k: run(gap, metric=value) for k, (gap, value) in enumerate(zip(gaps, values))}


BASE = with_metrics([98.0, 98.4, 97.8])


LOWER = Margins(metric_higher=False)


def test_a_gap_that_is_only_the_differences_own_rounding_is_zero() -> None:
    found = judge(BASE, with_metrics([98.1, 98.6, 97.5])).metric
    assert found is not None
    assert (found.gap, math.copysign(1.0, found.gap)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("metrics", "margins", "word"),
    [
        ([98.0, 98.41, 97.8], Margins(), EQ),
        ([95.0, 95.5, 94.7], Margins(), DIV),
        ([101.0, 101.5, 100.7], LOWER, DIV),
        ([97.0, 97.5, 96.8], Margins(metric=0.05, metric_relative=True), EQ),
        ([98.4, 97.6, 98.4], Margins(), CON),
        # gaps of -1.85 +- 0.88: the 90 % interval is -3.34 to -0.36, the 95 % one holds zero
        ([98.0 - 2.734, 98.4 - 1.85, 97.8 - 0.966], Margins(), DIV),
        ([98.0 + 2.734, 98.4 + 1.85, 97.8 + 0.966], LOWER, DIV),
    ],
)
def test_parity_needs_the_metric_too(metrics: list[float], margins: Margins, word: Parity) -> None:
    verdict = judge(BASE, with_metrics(metrics, CLOSE), {0: run(0.0001, metric=98.1)}, margins)
    assert verdict.loss.parity is EQ
    assert verdict.parity is word, verdict.reason
    assert "Metric" in verdict.reason


def test_equal_fp32_runs_count_as_one() -> None:
    verdict = judge(runs(0.0, 0.0, 0.0), runs(0.0001, 0.0001, 0.0001), {0: run(0.001)})
    assert verdict.pairs == 1
    assert verdict.parity is CON  # one pair never earns more
    assert "3 seeds gave 1 distinct FP32 run:" in verdict.notes[0]
    assert "pairs can prove" not in verdict.reason
    assert [k for k, *_ in verdict.differences] == [0, 1, 2]


def test_a_twin_that_equals_its_run_measures_nothing() -> None:
    verdict = judge(runs(0.0), runs(0.03), runs(0.0))
    assert verdict.loss.ulp_noise is None


def test_every_number_is_there() -> None:
    verdict = judge(SEEDS, runs(0.004, 0.03, -0.02), {0: run(0.002)})
    part = verdict.loss
    d = np.array([0.004, 0.0, 0.0])
    low, high = paired_interval(d)
    base = float(np.mean([final_loss(r.losses) for r in SEEDS.values()]))
    assert verdict.pairs == 3
    assert part.gap == pytest.approx(d.mean())
    assert part.interval == pytest.approx((float(low), float(high)))
    assert part.margin == pytest.approx(0.005 * base)
    assert part.ulp_noise == pytest.approx(2 * 0.002)
    assert part.seed_noise == pytest.approx(2 * math.sqrt(2) * np.std([0.0, 0.03, -0.02], ddof=1))
    noise = float(np.sqrt(np.mean(d * d)))
    assert part.power == pytest.approx(equivalence.estimated_power(noise, 3, part.margin))
    assert part.pairs_needed == pairs_needed(noise, part.margin)
    assert f"about {part.pairs_needed} pairs would prove equivalence" in verdict.reason
    assert [row[1] for row in verdict.differences] == pytest.approx(d.tolist())


def test_fewer_than_three_pairs_plan_nothing() -> None:
    """Their noise is not that of a pair's difference: a number from it would be contradicted by the next pair."""
    verdict = judge(runs(0.0, 0.0001), runs(0.004, 0.03), {0: run(0.002)})
    assert (verdict.loss.power, verdict.loss.pairs_needed) == (None, None)
    assert "3 or more pairs can prove equivalence." in verdict.reason


def test_runs_without_a_shared_seed_cannot_be_judged() -> None:
    with pytest.raises(UsageError, match="share no seed"):
        judge(runs(0.0), {5: run()})


# Runs of another length than FP32's. Each row: losses and updates of FP32 under three seeds and of its twin, those of
# the candidate, the word, and what its sentence must say. The ends of all curves are the same.


def counted(
    losses: int, moved: int | None = None, skipped: int = 0, reruns: int = 0, gap: float = 0.0
) -> RunResult:
    steps = np.arange(losses)
    curve = 1.0 + gap + 1.5 * np.exp(-steps / 4) + 1e-5 * np.sin(steps)
    return RunResult(curve, None, moved, skipped, **({"reruns": reruns} if reruns else {}))


def lengths(*runs: tuple[int, ...], gap: float = 0.0) -> dict[int, RunResult]:
    """Runs of so many losses (and updates, skipped ones and reruns) each; one alone stands for three of its kind."""
    three = runs * 3 if len(runs) == 1 else runs
    return {k: counted(*one, gap=gap + 0.01 * k) for k, one in enumerate(three)}  # type: ignore[arg-type]


FIXED, TWO_HUNDRED = lengths((200, 200)), counted(200, 200)
VARIES = lengths((180, 180), (200, 200), (190, 190))  # early stopping by a validation loss
LBFGS = lengths((220, 20), (200, 20), (210, 20))
LENGTHS: dict[str, tuple[dict[int, RunResult], RunResult, dict[int, RunResult], Parity, str]] = {
    "equal": (FIXED, TWO_HUNDRED, FIXED, EQ, ""),
    "all stopped at 80": (FIXED, TWO_HUNDRED, lengths((80, 80)), DIV,
                          "80 losses and 80 updates with seed 0; FP32 recorded 200 losses and 200 updates"),
    "one of three stopped at 80": (FIXED, TWO_HUNDRED, lengths((200, 200), (200, 200), (80, 80)), DIV,
                                   "80 losses and 80 updates with seed 2"),
    "no optimizer seen": (lengths((200,)), counted(200), lengths((80,), (200,), (200,)), DIV,
                          "recorded 80 losses with seed 0; FP32 recorded 200 losses"),
    "stopped within the last tenth": (FIXED, TWO_HUNDRED, lengths((195, 195)), INC, "195 losses"),
    "skipped steps count as updates": (FIXED, TWO_HUNDRED, lengths((200, 190, 10)), EQ, ""),
    "more than its skips explain": (FIXED, TWO_HUNDRED, lengths((210, 205, 5)), INC, "210 losses"),
    "a closure run again at a smaller scale": (FIXED, TWO_HUNDRED, lengths((213, 200, 0, 13)), EQ, ""),
    "a skipped closure of several losses": (lengths((200, 20)), counted(200, 20), lengths((182, 18, 2)), EQ, ""),
    "a line search that varies in FP32 too":
        (LBFGS, counted(215, 20), lengths((205, 20), (215, 20), (190, 20)), EQ, ""),
    "a line search that gives up": (LBFGS, counted(215, 20), lengths((40, 20)), INC, "40 losses and 20 updates"),
    "early stopping, as FP32's own runs vary":
        (VARIES, TWO_HUNDRED, lengths((170, 170), (210, 210), (200, 200)), EQ, ""),
    "early stopping, a little too soon":
        (VARIES, TWO_HUNDRED, lengths((155, 155), (200, 200), (190, 190)), INC, "155 losses"),
    "harm stays harm": (FIXED, TWO_HUNDRED, lengths((199, 199), gap=0.05), DIV, "harm is established"),
}  # fmt: skip


@pytest.mark.parametrize("row", LENGTHS)
def test_a_run_of_another_length(row: str) -> None:
    baseline, twin, candidate, word, says = LENGTHS[row]
    verdict = judge(baseline, candidate, {0: twin})
    assert verdict.parity is word, verdict.reason
    assert says in verdict.reason
    if word is EQ:
        assert "recorded" not in verdict.reason


def test_closures_that_were_run_again_are_counted_from_the_records(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "fp16-0.jsonl")
    reasons = "closure run again 12 times at a smaller loss scale", "", "a gradient was not finite"
    for i, reason in enumerate(reasons):
        writer.write(UpdateRecord(i, 0, i != 2, i == 2, 16.0, 0.1 * i, reason))
    writer.close()
    result = read_run(tmp_path, "fp16-0").result()
    assert (result.updates, result.skipped, result.reruns) == (3, 1, 12)


def test_a_metric_that_only_fp32_printed_forbids_parity() -> None:
    candidate = with_metrics([98.0, 98.4, 97.8], CLOSE)
    verdict = judge(BASE, {**candidate, 2: run(-0.0199)})
    assert verdict.metric is None
    assert verdict.parity is Parity.INCONCLUSIVE
    assert "no metric with seed 2" in verdict.reason


def test_equivalent_names_the_failures_that_it_cannot_exclude() -> None:
    gaps = 0.01 * np.sin(np.arange(5))
    verdict = judge(runs(*gaps), runs(*(gaps + 1e-5 * np.arange(5))))
    assert verdict.parity is Parity.EQUIVALENT
    assert any("fewer than 45 %" in note for note in verdict.notes), verdict.notes
    assert (1.0 - equivalence.failure_rate_bound(10)) ** 10 == pytest.approx(0.05)


# How often the words are wrong, for runs whose truth is known.


@pytest.mark.heavy
@pytest.mark.parametrize("pairs", [1, 2])  # three and more: the simulation below
def test_no_harm_is_called_divergent_in_at_most_five_percent(pairs: int) -> None:
    """Runs as chaos makes them: a seed's level, shared by its pair, and each run's own noise by windows."""
    rng, draws = np.random.default_rng(pairs), 200

    def one(level: float, noise: float) -> RunResult:
        own = np.repeat(rng.standard_normal(10), STEPS // 10) * noise
        return RunResult(CLEAN + level + own, 98.0 + 2.0 * rng.standard_normal(), STEPS)

    for noise in (0.003, 0.05, 0.3):  # margin 0.005: from below it to sixty times it
        wrong = 0
        for _ in range(draws):
            levels = dict(enumerate(0.02 * rng.standard_normal(pairs)))
            fp32, ours = ({k: one(level, noise) for k, level in levels.items()} for _ in range(2))
            wrong += judge(fp32, ours, {0: one(levels[0], noise)}).parity is Parity.DIVERGENT
        assert rate_is_at_most(wrong, draws, 0.05), f"noise {noise}: {wrong / draws:.2%}"


# Bars of the verdict's errors, and the skewed noise that no test of few pairs holds them under (docs/compare.md).
BARS = [
    ("false_equivalent", ("normal", "t3", "t2", "mixture", "-lognormal"), 0.06),
    ("false_equivalent", ("lognormal",), 0.26),
    ("false_divergent", ("normal", "t3", "t2", "mixture", "lognormal"), 0.05),
    ("false_divergent", ("-lognormal",), 0.12),
    ("false_divergent_no_twin", ("normal",), 0.05),
    ("false_divergent_with_metric", ("normal",), 0.06),
]


@pytest.mark.heavy
@pytest.mark.parametrize("trials", [100, pytest.param(400, marks=pytest.mark.nightly)])
def test_simulated_errors_stay_under_their_bars(trials: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, since one simulation gives all rates. The printed power and early ends are simulated too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    simulated = importlib.import_module("verdict_simulation").simulate(trials=trials, seed=1)
    over = [
        f"{error}, {name}, {sd} margins, {pairs} pairs: {rate:.1%}"
        for error, names, bar in BARS
        for name in names
        for sd, by_pairs in simulated[error][name].items()
        for pairs, rate in by_pairs.items()
        if not rate_is_at_most(round(rate * trials), trials, bar)
    ]
    assert over == []
    for pairs, by_sd in simulated["power_error"].items():
        for sd, one in by_sd.items():
            error = 0.5 / np.sqrt(trials // 3)  # of a mean of values between 0 and 1, at most
            assert abs(one["error"]) < 0.03 + 3 * error, (pairs, sd, one)
    assert set(simulated["early_end"].values()) == {0.0}
