"""The accumulation experiment: its sums against sums made another way, its predictions, its findings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mezzo.reproduce import accumulation, expected, figures
from mezzo.reproduce.experiment import Effort, Outcome
from mezzo.verify.folder import strict

NUMPY = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
LENGTHS = [16, 128, 256, 1024]
PRODUCTS = {form: accumulation.dot_products(1024, form) for form in NUMPY}
CASES = [(form, kind) for form in NUMPY for kind in PRODUCTS[form]]


def to(form: str, value: float) -> float:
    return float(np.float64(value).astype(NUMPY[form]))


def one_after_another(terms: list[float], form: str) -> float:
    total = 0.0
    for term in terms:
        total = to(form, total + term)
    return total


def as_a_tree(terms: list[float], form: str) -> float:
    if len(terms) == 1:
        return to(form, terms[0])
    half = len(terms) // 2
    return to(form, as_a_tree(terms[:half], form) + as_a_tree(terms[half:], form))


def in_blocks(terms: list[float], form: str) -> float:
    total = np.float32(0)
    for start in range(0, len(terms), 128):
        total += np.float32(one_after_another(terms[start : start + 128], form))
    return float(total)


def in_fp32(terms: list[float], form: str) -> float:
    total = np.float32(0)
    for term in terms:
        total += np.float32(term)
    return float(total)


BY_HAND: dict[str, Callable[[list[float], str], float]] = {
    "sequential": one_after_another,
    "pairwise": as_a_tree,
    "blocks": in_blocks,
    "fp32": in_fp32,
}


@pytest.mark.parametrize(("form", "kind"), CASES)
@pytest.mark.parametrize("order", BY_HAND)
def test_sums_are_those_made_one_number_at_a_time(order: str, form: str, kind: str) -> None:
    terms = PRODUCTS[form][kind][:, :2]
    seen = accumulation.ORDERS[order](terms, form, LENGTHS)
    for lane in range(terms.shape[1]):
        column = [float(term) for term in terms[:, lane]]
        by_hand = [BY_HAND[order](column[:length], form) for length in LENGTHS]
        assert [float(value) for value in seen[:, lane]] == by_hand


@pytest.mark.parametrize(("form", "kind"), CASES)
def test_products_are_exact_and_their_true_sum_is_fsum(form: str, kind: str) -> None:
    terms = PRODUCTS[form][kind]
    exact = accumulation.truth(terms, LENGTHS)
    for place, length in enumerate(LENGTHS):
        assert exact[place, 0] == pytest.approx(
            math.fsum(map(float, terms[:length, 0])), rel=1e-13, abs=1e-13
        )


@pytest.mark.parametrize("form", NUMPY)
def test_factors_have_no_more_digits_than_their_format(form: str) -> None:
    """A product of two numbers of p digits has 2p, so that FP32 and FP64 agree on it."""
    digits = 2 * (accumulation.formats.named(form).nmant + 1)
    for terms in PRODUCTS[form].values():
        mantissa, _ = np.frexp(terms.astype(np.float64))
        scaled = mantissa * 2.0**digits
        assert np.array_equal(scaled, np.round(scaled))
        assert len(np.unique(terms)) > 100 or np.ptp(terms) == 0


@pytest.mark.parametrize("form", NUMPY)
@pytest.mark.parametrize("term", [1.0, 2.0**-5, 2.0**3])
def test_where_a_sum_of_equal_terms_sticks(form: str, term: float) -> None:
    stuck = accumulation.stagnates_at(term, form)
    assert to(form, stuck + term) == stuck
    below = stuck - term
    assert to(form, below + term) == stuck
    assert stuck / term == {"fp16": 2048, "bf16": 256}[form]


def test_an_overflowed_sum_stays_infinite() -> None:
    terms = np.full((64, 1), 2048.0, np.float32)
    for order in ("sequential", "pairwise"):
        assert accumulation.ORDERS[order](terms, "fp16", [16, 32, 64])[:, 0].tolist() == [
            32768.0,
            math.inf,
            math.inf,
        ]
    assert accumulation.relative_error(np.array([[1.0], [math.inf], [math.nan]]), np.ones((3, 1))) == [
        0.0,
        math.inf,
        math.inf,
    ]


def test_sums_of_blocks_are_added_in_fp32() -> None:
    """2^24 + 1 is no FP32 number, and the tie goes down."""
    terms = np.zeros((256, 1), np.float32)
    terms[0], terms[128] = 2.0**24, 1.0
    assert accumulation.blocks(terms, "bf16", [128, 256])[:, 0].tolist() == [2.0**24, 2.0**24]
    terms[128] = 2.0
    assert accumulation.blocks(terms, "bf16", [128, 256])[:, 0].tolist() == [2.0**24, 2.0**24 + 2]


def test_a_variance_of_exact_sums_is_the_variance() -> None:
    x = np.random.default_rng(3).standard_normal((1000, 64)) + 2
    seen = accumulation.variance(x.sum(0)[None], (x**2).sum(0)[None], [1000], "fp64")
    assert seen[0] == pytest.approx(x.var(axis=0), rel=1e-12)
    rounded = accumulation.variance(x.sum(0)[None], (x**2).sum(0)[None], [1000], "fp16")
    for lane in range(64):
        mean, squares = (np.float16(total / 1000) for total in (x[:, lane].sum(), (x[:, lane] ** 2).sum()))
        assert float(rounded[0, lane]) == float(squares - np.float16(mean * mean))


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """One run of the quick size for all tests that need it."""
    told: list[float] = []
    found = accumulation.run(Effort(quick=True, report=lambda words, share: told.append(share)))
    assert told == sorted(told)
    assert told[-1] == 1.0
    return found


@pytest.mark.heavy
def test_quick_shows_what_is_listed(outcome: Outcome) -> None:
    listed = expected.read()["accumulation"]["quick"]
    assert {finding.name: listed.fate(finding) for finding in outcome.findings} == dict.fromkeys(
        listed.shown, "holds"
    )


def spoil(numbers: dict[str, Any], *path: Any, value: Any) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(numbers))
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


# a number that came out otherwise -> the findings that must then not hold
SPOILT = [
    (("equal_sums", "fp16", -1), 128.0, {"equal-terms-stick"}),
    (("equal_sums", "bf16", -1), 16.0, {"equal-terms-stick"}),
    (("largest_positive_sum", "fp16"), 257.0, {"positive-terms-stick"}),
    (("dot", "positive", "bf16", "sequential", -1), 0.2, {"positive-terms-stick"}),
    (("dot", "zero mean", "bf16", "fp32", 3), 5e-4, {"fp32-is-enough"}),
    (("dot", "zero mean", "fp16", "sequential", -1), 1e-3, {"zero-mean-drifts"}),
    (("dot", "positive", "fp16", "pairwise", 5), 0.01, {"order-mends-it"}),
    (("dot", "positive", "fp16", "blocks", -1), 0.01, {"order-mends-it"}),
    (("variance", "unit", "sequential", -1), 0.1, {"variance-sticks"}),
    (("variance", "unit", "fp32", -1), 2e-3, {"variance-sticks"}),
    (("overflowed_at", "large", "pairwise"), 512, {"variance-overflows"}),
    (("overflowed_at", "unit", "fp32"), 16, {"variance-overflows"}),
    (("variance", "offset", "sequential", 3), 0.001, {"variance-loses-digits"}),
    (("variance", "offset", "fp32", 3), 0.1, {"variance-loses-digits"}),
]


@pytest.mark.heavy
@pytest.mark.parametrize(("path", "value", "lost"), SPOILT, ids=lambda value: str(value)[:40])
def test_a_finding_falls_with_its_numbers(
    path: tuple[Any, ...], value: float, lost: set[str], outcome: Outcome
) -> None:
    findings = accumulation._findings(spoil(outcome.numbers, *path, value=value))
    assert {finding.name for finding in findings if not finding.holds} == lost


@pytest.mark.heavy
def test_the_figure_comes_from_the_numbers_alone(outcome: Outcome) -> None:
    written = json.loads(json.dumps(strict(outcome.numbers)))
    drawn = figures.draw(accumulation.EXPERIMENT, written)
    assert max(map(len, drawn.values())) <= 150_000
    text = spoil(written, "dot", "positive", "fp16", "sequential", value=[0.5] * len(written["lengths"]))
    assert figures.draw(accumulation.EXPERIMENT, text)["figure.svg"] != drawn["figure.svg"]


@pytest.mark.heavy
def test_sentences_are_plain_and_hold_numbers(outcome: Outcome) -> None:
    for finding in outcome.findings:
        assert finding.expected.endswith(".")
        assert finding.seen.endswith(".")
        assert any(letter.isdigit() for letter in finding.seen)
