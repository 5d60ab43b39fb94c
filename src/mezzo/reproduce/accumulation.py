"""FP32 against 16-bit accumulation: in a long dot product, and in a normalisation's variance.

Micikevicius et al. 2017, section 3.3: products of 16-bit numbers are added in FP32, and the result is rounded once, as
it is stored; large reductions (the statistics of a normalisation, softmax) are done in FP32 as well. Here is what
happens otherwise. Every 16-bit accumulator is emulated exactly: a product of two 16-bit numbers is exact in FP32, it is
added to the accumulator in FP64, and the sum is rounded once to the accumulator's format, as a fused multiply-add does.

    one after another   acc = round16(acc + a[i] * b[i])
    pairwise            neighbours are added, then neighbours of sums, as a tree
    blocks              one after another in 16 bits, 128 at a time; the blocks' sums are added in FP32
    fp32                one after another in FP32

What it leaves out: tensor cores, which add a handful of products at a time to more bits than 16, in an order
of their own; they lie between "blocks" and "fp32".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mezzo.core import formats
from mezzo.reproduce.accumulation_figure import draw
from mezzo.reproduce.experiment import Effort, Experiment, Finding, Outcome

Values = NDArray[Any]

FORMATS = ("fp16", "bf16")
BLOCK = 128
EQUAL_TERM = 2.0**-5
LARGEST_FACTOR = 2.0**-3  # keeps the sum of a million positive terms under 65504
DRAWS = 8
QUICK, FULL = 14, 20  # log2 of the longest sum


@dataclass(frozen=True)
class Activations:
    """What a normalisation sees: normally distributed, a mean and a deviation."""

    mean: float
    deviation: float


ACTIVATIONS = {
    "unit": Activations(0.0, 1.0),
    "offset": Activations(8.0, 1.0),
    "large": Activations(0.0, 16.0),
}


def stagnates_at(term: float, form: str) -> float:
    """The sum that a positive term can no longer move: half the gap to the next number is then the term.

    For a power of two that is ``2**(nmant + 1) * term``, 2^11 times the term in fp16 and 2^8 in bf16: the
    tie goes to the even neighbour, which is the sum itself.
    """
    return math.ldexp(term, formats.named(form).nmant + 1)


def sequential(terms: Values, form: str, lengths: list[int]) -> Values:
    """``acc = round(acc + terms[i], form)``, at each of the lengths: [n, lanes] -> [lengths, lanes].

    Args:
        terms: exact in float64; each column is a sum of its own.
        form: the accumulator's format; sums beyond its largest number are infinite from there on.
        lengths: in rising order, up to n.
    """
    accumulator = np.zeros(terms.shape[1:])
    at, wanted = [], set(lengths)
    for count, term in enumerate(terms, 1):
        accumulator = formats.round(accumulator + term, form)
        if count in wanted:
            at.append(accumulator)
    return np.stack(at)


def pairwise(terms: Values, form: str, lengths: list[int]) -> Values:
    """The tree of sums of neighbours, each rounded; the lengths are powers of two."""
    level = formats.round(terms.astype(np.float64), form)
    first = {1: level[0]}
    while len(level) > 1:
        level = formats.round(level[0::2] + level[1::2], form)
        first[len(terms) // len(level)] = level[0]
    return np.stack([first[length] for length in lengths])


def blocks(terms: Values, form: str, lengths: list[int]) -> Values:
    """Blocks of `BLOCK` terms one after another in 16 bits, and the blocks' sums one after another in FP32."""
    short = [length for length in lengths if length <= BLOCK]
    rows = min(BLOCK, len(terms))
    split = terms.reshape(-1, rows, *terms.shape[1:]).swapaxes(0, 1)  # [BLOCK, blocks, lanes]
    ends = sequential(split, form, [*short, *([rows] if rows not in short else [])])
    sums = np.cumsum(ends[-1], axis=0, dtype=np.float32)  # [blocks, lanes]
    within = [ends[i, 0] for i in range(len(short))]
    return np.stack([*within, *(sums[length // BLOCK - 1] for length in lengths[len(short) :])])


def in_fp32(terms: Values, form: str, lengths: list[int]) -> Values:
    """One after another in FP32, whatever the format of the factors."""
    sums: Values = np.cumsum(terms, axis=0, dtype=np.float32)[[length - 1 for length in lengths]]
    return sums


ORDERS: dict[str, Callable[[Values, str, list[int]], Values]] = {
    "sequential": sequential,
    "pairwise": pairwise,
    "blocks": blocks,
    "fp32": in_fp32,
}


def truth(terms: Values, lengths: list[int]) -> Values:
    """The sums in FP64."""
    sums: Values = np.cumsum(terms, axis=0, dtype=np.float64)[[length - 1 for length in lengths]]
    return sums


def relative_error(sums: Values, exact: Values) -> list[float]:
    """Root mean square over the lanes of what is wrong, over that of what is right; a length each."""
    wrong = np.where(np.isfinite(sums), sums, math.inf) - exact  # infinity minus infinity is no less wrong
    error = np.sqrt(np.mean(wrong**2, axis=1) / np.mean(exact**2, axis=1))
    return [float(value) for value in error]


def dot_products(n: int, form: str) -> dict[str, Values]:
    """The products of 16-bit factors, exactly, for each kind of input: name -> float32 [n, lanes]."""
    random = np.random.default_rng(0)

    def product(draw: Callable[[], Values], largest: float) -> Values:
        a, b = (formats.round(draw(), form) for _ in range(2))
        exact: Values = (a * b * largest).astype(np.float32)  # at most 22 digits: nothing is lost
        return exact

    return {
        "equal": np.full((n, 1), EQUAL_TERM, np.float32),
        "positive": product(lambda: random.random((n, DRAWS)), LARGEST_FACTOR),
        "zero mean": product(lambda: random.standard_normal((n, DRAWS)), 1.0),
    }


def activations(n: int) -> dict[str, Values]:
    """fp16 activations of one channel, for each of `ACTIVATIONS`: name -> float32 [n, lanes]."""
    random = np.random.default_rng(1)
    return {
        name: formats.round(kind.mean + kind.deviation * random.standard_normal((n, DRAWS)), "fp16").astype(
            np.float32
        )
        for name, kind in ACTIVATIONS.items()
    }


def variance(sum_: Values, sum_of_squares: Values, lengths: list[int], form: str) -> Values:
    """``E[x^2] - E[x]^2`` from two sums, each step rounded to the format: [lengths, lanes]."""
    count = np.array(lengths, float)[:, None]
    with np.errstate(invalid="ignore"):
        mean = formats.round(sum_.astype(np.float64) / count, form)
        mean_of_squares = formats.round(sum_of_squares.astype(np.float64) / count, form)
        found: Values = formats.round(mean_of_squares - formats.round(mean * mean, form), form)
    return found


def run(effort: Effort) -> Outcome:
    """Add up; compare with FP64; say where each accumulator failed and where it should have."""
    top = QUICK if effort.quick else FULL
    lengths = [1 << k for k in range(4, top + 1)]
    n = lengths[-1]
    numbers: dict[str, Any] = {
        "lengths": lengths, "block": BLOCK, "equal_term": EQUAL_TERM, "draws": DRAWS,
        "largest_positive_term": LARGEST_FACTOR,
        "stagnates_at": {form: stagnates_at(EQUAL_TERM, form) for form in FORMATS},
        "positive_stagnates_below": {form: stagnates_at(LARGEST_FACTOR, form) for form in FORMATS},
    }  # fmt: skip
    numbers["equal_sums"], numbers["largest_positive_sum"], numbers["dot"] = {}, {}, {}
    for i, form in enumerate(FORMATS):
        effort.report(f"dot products of {n} terms in {form}", 0.3 * i)
        _dot(numbers, dot_products(n, form), form, lengths)
    effort.report(f"variances of {n} activations in fp16", 0.6)
    numbers["activations"] = {k: [a.mean, a.deviation] for k, a in ACTIVATIONS.items()}
    numbers["overflow_length"] = {
        name: formats.named("fp16").max / (kind.mean**2 + kind.deviation**2)
        for name, kind in ACTIVATIONS.items()
    }
    numbers["variance"] = _variances(activations(n), lengths)
    numbers["overflowed_at"] = {
        name: {order: _first_infinite(errors, lengths) for order, errors in orders.items()}
        for name, orders in numbers["variance"].items()
    }
    effort.report("done", 1.0)
    return Outcome(_findings(numbers), numbers)


def _dot(numbers: dict[str, Any], products: dict[str, Values], form: str, lengths: list[int]) -> None:
    lanes = np.cumsum([0, *(terms.shape[1] for terms in products.values())])
    together = np.concatenate(list(products.values()), axis=1)  # one loop for all: it is the loop that costs
    exact = truth(together, lengths)
    for order, add in ORDERS.items():
        sums = add(together, form, lengths)
        for place, kind in enumerate(products):
            mine = slice(lanes[place], lanes[place + 1])
            error = relative_error(sums[:, mine], exact[:, mine])
            numbers["dot"].setdefault(kind, {}).setdefault(form, {})[order] = error
            if order == "sequential" and kind == "equal":
                numbers["equal_sums"][form] = [float(value) for value in sums[:, mine][:, 0]]
            if order == "sequential" and kind == "positive":
                numbers["largest_positive_sum"][form] = float(sums[-1, mine].max())
                numbers["true_positive_sum"] = float(exact[-1, mine].mean())


def _variances(channels: dict[str, Values], lengths: list[int]) -> dict[str, dict[str, list[float]]]:
    """Relative errors of each channel's variance, by order of addition; infinite where a sum overflowed."""
    found: dict[str, dict[str, list[float]]] = {}
    x = np.concatenate(list(channels.values()), axis=1)
    count = np.array(lengths, float)[:, None]
    exact = truth(x.astype(np.float64) ** 2, lengths) / count - (truth(x, lengths) / count) ** 2
    for order, form in (("sequential", "fp16"), ("pairwise", "fp16"), ("fp32", "fp32")):
        both = np.concatenate([x, x.astype(np.float64) ** 2], axis=1)
        sums = ORDERS[order](both, form, lengths)
        seen = variance(sums[:, : x.shape[1]], sums[:, x.shape[1] :], lengths, form)
        for place, name in enumerate(channels):
            mine = slice(place * DRAWS, (place + 1) * DRAWS)
            found.setdefault(name, {})[order] = relative_error(seen[:, mine], exact[:, mine])
    return found


def _first_infinite(errors: list[float], lengths: list[int]) -> int | None:
    return next((length for length, error in zip(lengths, errors) if math.isinf(error)), None)


def _findings(numbers: dict[str, Any]) -> tuple[Finding, ...]:
    lengths: list[int] = numbers["lengths"]
    n = lengths[-1]
    half_ulp = {form: formats.named(form).eps / 2 for form in FORMATS}
    dot, stuck, bound = numbers["dot"], numbers["equal_sums"], numbers["positive_stagnates_below"]
    predicted = numbers["stagnates_at"]
    positive = {form: dot["positive"][form] for form in FORMATS}
    largest = numbers["largest_positive_sum"]
    fp32 = max(max(kind[form]["fp32"]) for kind in dot.values() for form in FORMATS)
    tree = {form: max(positive[form]["pairwise"]) for form in FORMATS}
    mixed = positive["fp16"]["blocks"]
    slope = float(np.polyfit(np.log2(lengths), np.log2(dot["zero mean"]["fp16"]["sequential"]), 1)[0])
    drift = dot["zero mean"]["fp16"]["sequential"][-1]
    var, overflowed = numbers["variance"], numbers["overflowed_at"]
    limit = numbers["overflow_length"]
    # A sum of n squares is past 65504 at the first of our lengths that is, give or take what the draw brings.
    should = {name: next((k for k in lengths if k > at), None) for name, at in limit.items()}
    return (
        Finding(
            "equal-terms-stick",
            f"Terms of {EQUAL_TERM:g}, added one after another, no longer move a sum of 2^11 terms in fp16 "
            f"({predicted['fp16']:g}), of 2^8 in bf16 ({predicted['bf16']:g}).",
            f"After {n:,} terms, which make {n * EQUAL_TERM:,g}, the sum is {stuck['fp16'][-1]:g} in fp16 and "
            f"{stuck['bf16'][-1]:g} in bf16.",
            all(stuck[form][-1] == predicted[form] for form in FORMATS),
        ),
        Finding(
            "positive-terms-stick",
            f"Positive terms up to {LARGEST_FACTOR:g} bring no sum past 2^11 times the largest in fp16 "
            f"({bound['fp16']:g}), nor past 2^8 times in bf16 ({bound['bf16']:g}).",
            f"{n:,} terms make {numbers['true_positive_sum']:,.0f}; the largest sum is {largest['fp16']:g} in fp16 "
            f"({positive['fp16']['sequential'][-1]:.0%} wrong) and {largest['bf16']:g} in bf16 "
            f"({positive['bf16']['sequential'][-1]:.0%} wrong).",
            all(largest[form] <= bound[form] and positive[form]["sequential"][-1] > 0.3 for form in FORMATS),
        ),
        Finding(
            "fp32-is-enough",
            "With an FP32 accumulator a dot product of 16-bit factors is right to less than half a unit in the last "
            f"place of fp16 ({half_ulp['fp16']:.1e}), however long it is.",
            f"The largest error of all kinds of input and all lengths up to {n:,} is {fp32:.1e}.",
            fp32 < half_ulp["fp16"],
        ),
        Finding(
            "zero-mean-drifts",
            "Sums of terms with mean zero do not stick in fp16, but their error grows as the square root of their "
            "length.",
            f"It grows as the length to the power {slope:.2f}, to {drift:.1%} at {n:,} terms: "
            f"{drift / half_ulp['fp16']:.0f} times what rounding the result once may cost.",
            0.3 < slope < 0.7 and drift > 4 * half_ulp["fp16"],
        ),
        Finding(
            "order-mends-it",
            "What sticks is the order and not the format alone: neighbours added as a tree keep all 16-bit formats "
            "within a few roundings, where no sum overflows; so do short blocks whose sums are added in FP32.",
            f"At any length a tree is at most {tree['fp16'] / half_ulp['fp16']:.1f} half-units wrong in fp16 and "
            f"{tree['bf16'] / half_ulp['bf16']:.1f} in bf16, and blocks of {BLOCK} in fp16 "
            f"{max(mixed) / half_ulp['fp16']:.1f}.",
            all(tree[form] < 4 * half_ulp[form] for form in FORMATS) and max(mixed) < 4 * half_ulp["fp16"],
        ),
        Finding(
            "variance-sticks",
            "A variance whose sums are added one after another in fp16 falls short once a channel has more than 2^11 "
            "values; in FP32 it keeps three digits.",
            f"At {n:,} values of N(0, 1) it is {var['unit']['sequential'][-1]:.0%} wrong in fp16 and "
            f"{var['unit']['fp32'][-1]:.1e} in FP32.",
            var["unit"]["sequential"][-1] > 0.3 and max(var["unit"]["fp32"]) < 1e-3,
        ),
        Finding(
            "variance-overflows",
            "Squares of fp16 activations overflow in any order of addition, once values times their mean square pass "
            f"65504: at about {limit['large']:.0f} values of N(0, 16^2).",
            f"The variance is infinite from {overflowed['large']['pairwise']} values on (N(0, 16^2)) and from "
            f"{overflowed['offset']['pairwise']:,} (N(8, 1), where {limit['offset']:.0f} is the limit).",
            all(overflowed[name]["pairwise"] == should[name] for name in ("large", "offset"))
            and all(at["fp32"] is None for at in overflowed.values()),
        ),
        Finding(
            "variance-loses-digits",
            "Where the mean is large beside the deviation, E[x^2] - E[x]^2 loses its digits in fp16 even in a short "
            "sum.",
            f"Of {BLOCK} values of N(8, 1) the variance is {var['offset']['sequential'][lengths.index(BLOCK)]:.0%} "
            f"wrong in fp16 and {var['offset']['fp32'][lengths.index(BLOCK)]:.1e} in FP32.",
            var["offset"]["sequential"][lengths.index(BLOCK)] > 0.02 and max(var["offset"]["fp32"]) < 0.02,
        ),
    )


EXPERIMENT = Experiment(
    name="accumulation",
    title="FP32 against 16-bit accumulation: dot products and a normalisation's variance",
    source="Micikevicius et al. 2017, section 3.3",
    run=run,
    draw=draw,
)
