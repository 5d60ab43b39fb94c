"""Step times from records, and the speed ratio with an interval that holds what it promises."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mezzo.compare.measure import Phases, Speed, speed, step_times
from mezzo.core.records import UpdateRecord


def updates(at: Sequence[float], observed: Sequence[int] = (), optimizer: int = 0) -> list[UpdateRecord]:
    return [UpdateRecord(i, optimizer, True, False, 1.0, t, observed=i in observed) for i, t in enumerate(at)]


@pytest.mark.parametrize(
    ("count", "observed", "left"),
    [
        (1, (), []),
        (6, (), []),
        (7, (), [5]),  # six intervals; the first five are warm-up
        (11, (), [5, 6, 7, 8, 9]),
        (11, (8,), [5, 6, 9]),  # the interval that ends at the observed update, and the one that begins there
        (11, (1, 2), [5, 6, 7, 8, 9]),
        (200, (), list(range(10, 199))),  # five percent
    ],
)
def test_which_steps_are_timed(count: int, observed: tuple[int, ...], left: list[int]) -> None:
    at = np.cumsum(np.arange(count, dtype=float))  # interval i lasts i + 1 seconds
    assert step_times(updates(at, observed)).tolist() == [i + 1 for i in left]


@pytest.mark.parametrize(
    ("optimizers", "steps", "ends"),
    [
        ([], 0, {}),
        ([0] * 5, 5, {0: 4}),
        ([0] * 4 + [1] * 3, 7, {0: 3, 1: 6}),  # a second optimizer takes over
        ([0, 1] * 3, 3, {0: 4}),  # a GAN's
        ([0, 0, 0, 1] * 2, 6, {0: 6}),
        ([0, 1] * 3 + [2, 3] * 2, 5, {0: 4, 2: 8}),  # of a second GAN
    ],
)
def test_steps_and_phases(optimizers: list[int], steps: int, ends: dict[int, int]) -> None:
    found = Phases(optimizers)
    assert (found.steps, found.leaders) == (steps, ends)


def times(rng: np.random.Generator, seconds: float, count: int = 60, spread: float = 0.05) -> np.ndarray:
    return seconds * np.exp(spread * rng.standard_normal(count))


def test_the_ratio_is_fp32s_time_over_the_candidates() -> None:
    rng = np.random.default_rng(0)
    found = speed([(times(rng, 0.30), times(rng, 0.15)) for _ in range(3)])
    assert found.speedup == pytest.approx(2.0, rel=0.03)
    assert found.interval[0] < found.speedup < found.interval[1]
    assert (found.word, found.steps) == ("faster", 180)


def test_pairs_that_agree_are_no_more_certain_than_fp32s_own_runs() -> None:
    rng = np.random.default_rng(0)
    pairs = [(times(rng, 0.20), times(rng, 0.02)) for _ in range(2)]
    assert speed(pairs, [times(rng, 0.20)]).word == "faster"
    noisy = speed(pairs, [times(rng, 0.02)])  # a machine whose speed changed in between
    assert noisy.word == "not told apart"
    assert noisy.interval[0] < 1 < noisy.interval[1]


def test_one_pair_is_as_uncertain_as_fp32s_own_runs_differ() -> None:
    rng = np.random.default_rng(0)
    pair = [(times(rng, 0.30), times(rng, 0.15))]
    told = [speed(pair, [times(rng, twin)]) for twin in (0.30, 0.27)]
    assert [one and one.word for one in told] == ["faster", "not told apart"]


def test_long_steps_do_not_move_it_and_the_same_times_give_the_same_interval() -> None:
    fp32, ours = np.full(50, 0.2), np.full(50, 0.1)
    ours[::10] = 9.0  # a validation pass now and then
    found = speed([(fp32, ours)] * 3)
    assert found.speedup == pytest.approx(2.0)
    assert speed([(fp32, ours)] * 3) == found


def test_what_is_said_of_an_interval_and_of_too_few_steps() -> None:
    intervals = {"faster": (1.01, 1.2), "not told apart": (0.99, 1.2), "slower": (0.8, 0.99)}
    assert all(Speed(1.1, interval, 100).word == word for word, interval in intervals.items())
    assert speed([]) is None
    assert speed([(np.ones(4), np.ones(100))]) is None
    assert speed([(np.zeros(10), np.ones(10))]) is None


@pytest.mark.heavy
@pytest.mark.parametrize("pairs", [2, 5])
def test_the_interval_holds_the_truth_though_runs_differ(pairs: int) -> None:
    """Runs differ in speed (a machine drifts): 95 % intervals from few pairs must still hold."""
    rng = np.random.default_rng(pairs)
    draws, held, wide = 100, 0, []
    for _ in range(draws):
        own = np.exp(0.02 * rng.standard_normal((pairs, 2)))
        made = [(times(rng, 0.3 * a, 20, 0.005), times(rng, 0.2 * b, 20, 0.005)) for a, b in own]
        found = speed(made)
        held += found.interval[0] <= 1.5 <= found.interval[1]
        wide.append(found.interval[1] / found.interval[0])
    assert held / draws >= 0.88  # 0.95 less three binomial deviations
    if pairs == 5:
        assert np.median(wide) < 1.15  # and it is no empty promise
