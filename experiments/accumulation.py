"""FP32 against 16-bit accumulation: in a long dot product, and in the variance of a normalization layer.

Micikevicius et al. 2017, section 3.3: products of 16-bit numbers are added in FP32, and the result is rounded once,
when it is stored; large reductions (the statistics of a normalization, softmax) are done in FP32 as well. This script
shows what happens otherwise. Every 16-bit accumulator is emulated exactly: a product of two 16-bit numbers is exact
in FP32, it is added to the accumulator in FP64, and the sum is rounded once to the accumulator's format, as a fused
multiply-add does.

    sequential  acc = round16(acc + a[i] * b[i])
    pairwise    neighbors are added, then neighbors of sums, as a tree
    blocks      sequential in 16 bits, 128 at a time; the sums of the blocks are added in FP32
    fp32        sequential in FP32

What it leaves out: tensor cores, which add a few products at a time with more bits than 16, in an unspecified order;
they lie between "blocks" and "fp32".
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

import figures
from common import Finding, Numbers, main, progress
from mezzo.core import formats

Values = NDArray[Any]

FORMATS = ("fp16", "bf16")
BLOCK = 128
EQUAL_TERM = 2.0**-5
LARGEST_FACTOR = 2.0**-3  # keeps the sum of a million positive terms under 65504
DRAWS = 8
QUICK, FULL = 14, 20  # log2 of the longest sum
ACTIVATIONS = {"unit": (0.0, 1.0), "offset": (8.0, 1.0), "large": (0.0, 16.0)}  # mean, standard deviation


def stagnates_at(term: float, form: str) -> float:
    """The sum that a positive term can no longer move: half the gap to the next number is then the term.

    For a power of two that is ``2**(nmant + 1) * term``, 2^11 times the term in fp16 and 2^8 in bf16: the tie goes to
    the even neighbor, which is the sum itself.
    """
    return math.ldexp(term, formats.named(form).nmant + 1)


def sequential(terms: Values, form: str, lengths: list[int]) -> Values:
    """``acc = round(acc + terms[i], form)``, at each of the lengths: [n, lanes] -> [lengths, lanes].

    The terms are exact in float64; each column is a separate sum. Sums beyond the largest number stay infinite.
    """
    accumulator = np.zeros(terms.shape[1:])
    at, wanted = [], set(lengths)
    for count, term in enumerate(terms, 1):
        accumulator = formats.round(accumulator + term, form)
        if count in wanted:
            at.append(accumulator)
    return np.stack(at)


def pairwise(terms: Values, form: str, lengths: list[int]) -> Values:
    """The tree of sums of neighbors, each rounded; the lengths are powers of two."""
    level = formats.round(terms.astype(np.float64), form)
    first = {1: level[0]}
    while len(level) > 1:
        level = formats.round(level[0::2] + level[1::2], form)
        first[len(terms) // len(level)] = level[0]
    return np.stack([first[length] for length in lengths])


def blocks(terms: Values, form: str, lengths: list[int]) -> Values:
    """`BLOCK` terms sequentially in 16 bits, and the sums of the blocks sequentially in FP32."""
    short = [length for length in lengths if length < BLOCK]
    split = terms.reshape(-1, BLOCK, *terms.shape[1:]).swapaxes(0, 1)  # [BLOCK, blocks, lanes]
    ends = sequential(split, form, [*short, BLOCK])
    sums = np.cumsum(ends[-1], axis=0, dtype=np.float32)  # [blocks, lanes]
    long = [sums[length // BLOCK - 1] for length in lengths if length >= BLOCK]
    return np.stack([*(end[0] for end in ends[:-1]), *long])


def in_fp32(terms: Values, form: str, lengths: list[int]) -> Values:
    """Sequentially in FP32, whatever the format of the factors."""
    return at_lengths(terms, lengths, np.float32)


def at_lengths(terms: Values, lengths: list[int], dtype: Any = np.float64) -> Values:
    """The sums of the first terms; in FP64, the truth."""
    sums: Values = np.cumsum(terms, axis=0, dtype=dtype)[[length - 1 for length in lengths]]
    return sums


ORDERS: dict[str, Callable[[Values, str, list[int]], Values]] = {
    "sequential": sequential,
    "pairwise": pairwise,
    "blocks": blocks,
    "fp32": in_fp32,
}


def relative_error(sums: Values, exact: Values) -> list[float]:
    """Root mean square of the error over the lanes, over that of the exact sums; one value per length."""
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


def variance(sum_: Values, sum_of_squares: Values, lengths: list[int], form: str) -> Values:
    """``E[x^2] - E[x]^2`` from two sums, each step rounded to the format: [lengths, lanes]."""
    count = np.array(lengths, float)[:, None]
    with np.errstate(invalid="ignore"):
        mean = formats.round(sum_.astype(np.float64) / count, form)
        mean_of_squares = formats.round(sum_of_squares.astype(np.float64) / count, form)
        found: Values = formats.round(mean_of_squares - formats.round(mean * mean, form), form)
    return found


def run(full: bool) -> tuple[list[Finding], Numbers]:
    """Add up; compare with FP64; say where each accumulator failed and where it should have."""
    lengths = [1 << k for k in range(4, (FULL if full else QUICK) + 1)]
    numbers: Numbers = {"lengths": lengths, "dot": {}, "equal_sums": {}, "largest_positive_sum": {}}
    for form in FORMATS:
        progress(f"dot products of {lengths[-1]} terms in {form}")
        _dot(numbers, form, lengths)
    progress(f"variances of {lengths[-1]} activations in fp16")
    numbers["variance"] = _variances(lengths)
    return findings(numbers), numbers


def _dot(numbers: Numbers, form: str, lengths: list[int]) -> None:
    products = dot_products(lengths[-1], form)
    lanes = np.cumsum([0, *(terms.shape[1] for terms in products.values())])
    together = np.concatenate(list(products.values()), axis=1)  # one loop for all: the loop is what costs
    exact = at_lengths(together, lengths)
    for order, add in ORDERS.items():
        sums = add(together, form, lengths)
        for place, kind in enumerate(products):
            mine = slice(lanes[place], lanes[place + 1])
            error = relative_error(sums[:, mine], exact[:, mine])
            numbers["dot"].setdefault(kind, {}).setdefault(form, {})[order] = error
            if order == "sequential" and kind == "equal":
                numbers["equal_sums"][form] = sums[:, mine][:, 0].tolist()
            if order == "sequential" and kind == "positive":
                numbers["largest_positive_sum"][form] = float(sums[-1, mine].max())
                numbers["true_positive_sum"] = float(exact[-1, mine].mean())


def _variances(lengths: list[int]) -> dict[str, dict[str, list[float]]]:
    """Relative errors of the variance of each kind of fp16 activations; infinite where a sum overflowed."""
    random = np.random.default_rng(1)
    n, count = lengths[-1], np.array(lengths, float)[:, None]
    drawn = [
        mean + deviation * random.standard_normal((n, DRAWS)) for mean, deviation in ACTIVATIONS.values()
    ]
    x = formats.round(np.concatenate(drawn, axis=1), "fp16")
    both = np.concatenate([x, x**2], axis=1)
    width = x.shape[1]
    exact = at_lengths(x**2, lengths) / count - (at_lengths(x, lengths) / count) ** 2
    found: dict[str, dict[str, list[float]]] = {name: {} for name in ACTIVATIONS}
    for order, form in (("sequential", "fp16"), ("pairwise", "fp16"), ("fp32", "fp32")):
        sums = ORDERS[order](both, form, lengths)
        seen = variance(sums[:, :width], sums[:, width:], lengths, form)
        for place, name in enumerate(ACTIVATIONS):
            mine = slice(place * DRAWS, (place + 1) * DRAWS)
            found[name][order] = relative_error(seen[:, mine], exact[:, mine])
    return found


def findings(numbers: Numbers) -> list[Finding]:
    """Compare the sums with what arithmetic predicts."""
    lengths: list[int] = numbers["lengths"]
    n = lengths[-1]
    half_ulp = {form: formats.named(form).eps / 2 for form in FORMATS}
    dot, stuck, largest = numbers["dot"], numbers["equal_sums"], numbers["largest_positive_sum"]
    predicted = {form: stagnates_at(EQUAL_TERM, form) for form in FORMATS}
    bound = {form: stagnates_at(LARGEST_FACTOR, form) for form in FORMATS}
    positive = {form: dot["positive"][form] for form in FORMATS}
    fp32 = max(max(kind[form]["fp32"]) for kind in dot.values() for form in FORMATS)
    tree = {form: max(positive[form]["pairwise"]) for form in FORMATS}
    mixed = max(positive["fp16"]["blocks"])
    drift = dot["zero mean"]["fp16"]["sequential"]
    slope = float(np.polyfit(np.log2(lengths), np.log2(drift), 1)[0])
    # A sum of n squares overflows at the first of our lengths past the limit, give or take what the draw brings.
    limit = {name: formats.named("fp16").max / (m**2 + d**2) for name, (m, d) in ACTIVATIONS.items()}
    should = {name: next((k for k in lengths if k > at), None) for name, at in limit.items()}
    var = numbers["variance"]
    overflowed = {
        name: {
            order: next((k for k, e in zip(lengths, errors) if math.isinf(e)), None)
            for order, errors in one.items()
        }
        for name, one in var.items()
    }
    unit, offset = var["unit"], var["offset"]
    short = lengths.index(BLOCK)
    return [
        Finding(
            "equal-terms-stick",
            f"A sum of terms of {EQUAL_TERM:g}, added one after another, stops growing at 2^11 terms in fp16 "
            f"({predicted['fp16']:g}) and at 2^8 terms in bf16 ({predicted['bf16']:g}).",
            f"After {n:,} terms, whose exact sum is {n * EQUAL_TERM:,g}, the sum is {stuck['fp16'][-1]:g} in fp16 and "
            f"{stuck['bf16'][-1]:g} in bf16.",
            all(stuck[form][-1] == predicted[form] for form in FORMATS),
        ),
        Finding(
            "positive-terms-stick",
            f"Sums of positive terms up to {LARGEST_FACTOR:g} reach at most 2^11 times the largest term in fp16 "
            f"({bound['fp16']:g}), and 2^8 times in bf16 ({bound['bf16']:g}).",
            f"The exact sum of {n:,} terms is {numbers['true_positive_sum']:,.0f}; the largest is {largest['fp16']:g} "
            f"in fp16 ({positive['fp16']['sequential'][-1]:.0%} wrong) and {largest['bf16']:g} in bf16 "
            f"({positive['bf16']['sequential'][-1]:.0%} wrong).",
            all(largest[form] <= bound[form] and positive[form]["sequential"][-1] > 0.3 for form in FORMATS),
        ),
        Finding(
            "fp32-is-enough",
            "With an FP32 accumulator, the error of a dot product of 16-bit factors stays below half a unit in the "
            f"last place of fp16 ({half_ulp['fp16']:.1e}), at any length.",
            f"The largest error of all kinds of input and all lengths up to {n:,} is {fp32:.1e}.",
            fp32 < half_ulp["fp16"],
        ),
        Finding(
            "zero-mean-drifts",
            "Sums of terms with mean zero do not stick in fp16, but their error grows as the square root of their "
            "length.",
            f"It grows as the length to the power {slope:.2f}, to {drift[-1]:.1%} at {n:,} terms: "
            f"{drift[-1] / half_ulp['fp16']:.0f} times the largest error of rounding the result once.",
            0.3 < slope < 0.7 and drift[-1] > 4 * half_ulp["fp16"],
        ),
        Finding(
            "order-fixes-it",
            "Not only the format matters, but also the order: adding neighbors as a tree keeps the error in both "
            "formats within a few roundings, if no sum overflows; so do short blocks whose sums are added in FP32.",
            f"At any length, the error of a tree is at most {tree['fp16'] / half_ulp['fp16']:.1f} half-units in fp16 "
            f"and {tree['bf16'] / half_ulp['bf16']:.1f} in bf16; that of blocks of {BLOCK} in fp16 is "
            f"{mixed / half_ulp['fp16']:.1f}.",
            all(tree[form] < 4 * half_ulp[form] for form in FORMATS) and mixed < 4 * half_ulp["fp16"],
        ),
        Finding(
            "variance-sticks",
            "A variance whose sums are added one after another in fp16 is too small once a channel has more than 2^11 "
            "values; in FP32 it keeps three digits.",
            f"At {n:,} values of N(0, 1) it is {unit['sequential'][-1]:.0%} wrong in fp16 and "
            f"{unit['fp32'][-1]:.1e} in FP32.",
            unit["sequential"][-1] > 0.3 and max(unit["fp32"]) < 1e-3,
        ),
        Finding(
            "variance-overflows",
            "Sums of squares of fp16 activations overflow in any order of addition, once the number of values times "
            f"their mean square exceeds 65504: at about {limit['large']:.0f} values of N(0, 16^2).",
            f"The variance is infinite from {overflowed['large']['pairwise']} values on (N(0, 16^2)) and from "
            f"{overflowed['offset']['pairwise']:,} (N(8, 1), where {limit['offset']:.0f} is the limit).",
            all(overflowed[name]["pairwise"] == should[name] for name in ("large", "offset"))
            and all(at["fp32"] is None for at in overflowed.values()),
        ),
        Finding(
            "variance-loses-digits",
            "If the mean is large compared to the deviation, E[x^2] - E[x]^2 loses its digits in fp16 even in a short "
            "sum.",
            f"Of {BLOCK} values of N(8, 1) the variance is {offset['sequential'][short]:.0%} wrong in fp16 and "
            f"{offset['fp32'][short]:.1e} in FP32.",
            offset["sequential"][short] > 0.02 and max(offset["fp32"]) < 0.02,
        ),
    ]


def draw(numbers: Numbers, figure: Figure) -> None:
    """Four panels: a sum that sticks, errors of positive and of zero-mean terms, the error of a variance."""
    axes = figure.subplots(2, 2)
    lengths = numbers["lengths"]
    for one in axes.flat:
        one.set_xscale("log", base=2)
    _draw_sums(axes[0, 0], numbers)
    _draw_errors(axes[0, 1], numbers["dot"]["positive"], lengths, "positive factors")
    _draw_errors(axes[1, 0], numbers["dot"]["zero mean"], lengths, "factors of mean zero")
    _draw_variance(axes[1, 1], numbers["variance"], lengths)


def _draw_sums(axes: Axes, numbers: Numbers) -> None:
    lengths = numbers["lengths"]
    axes.set_yscale("log", base=2)
    axes.set(title=f"Sum of equal terms of {EQUAL_TERM:g}", xlabel="terms", ylabel="sum")
    axes.plot(lengths, [EQUAL_TERM * length for length in lengths], color=figures.FP32, label="FP32")
    for form, colour in (("fp16", figures.FP16), ("bf16", figures.BF16)):
        axes.plot(lengths, numbers["equal_sums"][form], "o-", color=colour, markersize=3.5, label=form)
        predicted = stagnates_at(EQUAL_TERM, form)
        axes.axhline(predicted, color=colour, linestyle=":", linewidth=1, label=f"{form}, predicted")
    axes.legend()


def _draw_errors(axes: Axes, kind: dict[str, Any], lengths: list[int], factors: str) -> None:
    axes.set(title=f"Dot product of {factors}: error", xlabel="terms", ylabel="relative error of the sum")
    axes.set_yscale("log")
    for form, colour in (("fp16", figures.FP16), ("bf16", figures.BF16)):
        for order, line in (("sequential", "-"), ("blocks", "--"), ("pairwise", ":")):
            axes.plot(lengths, kind[form][order], line, color=colour, label=f"{form}, {order}")
    axes.plot(lengths, kind["fp16"]["fp32"], color=figures.FP32, label="FP32")
    axes.set_ylim(bottom=1e-11)
    axes.legend(ncols=2, loc="lower right")


def _draw_variance(axes: Axes, variance: dict[str, Any], lengths: list[int]) -> None:
    axes.set_yscale("log")
    axes.set(title="Variance in fp16: error (×: overflow)", xlabel="values in the channel")
    axes.set_ylabel("relative error")
    for name, order, line, colour, label in (
        ("unit", "sequential", "-", figures.FP16, "N(0, 1)"),
        ("unit", "pairwise", ":", figures.FP16, "N(0, 1), pairwise"),
        ("offset", "pairwise", ":", figures.BF16_SAFE, "N(8, 1), pairwise"),
        ("large", "pairwise", ":", figures.FP16_SAFE, "N(0, 16²), pairwise"),
        ("unit", "fp32", "-", figures.FP32, "FP32, N(0, 1)"),
    ):
        errors = [error for error in variance[name][order] if math.isfinite(error)]
        axes.plot(lengths[: len(errors)], errors, line, color=colour, label=label)
        if len(errors) < len(lengths):
            axes.plot(lengths[len(errors) - 1], errors[-1], "x", color=colour, ms=8, mew=2)
    axes.set_ylim(bottom=1e-11)
    axes.legend(loc="lower right")


if __name__ == "__main__":
    TITLE = "FP32 against 16-bit accumulation: dot products and the variance of a normalization"
    sys.exit(main("accumulation", TITLE, "Micikevicius et al. 2017, section 3.3", run, draw))
