"""The figure of `accumulation`: sums by length, their errors, and a variance."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(numbers: dict[str, Any], figure: Figure) -> None:
    """Four panels: a sum that sticks, errors of positive and of zero-mean terms, a variance's error."""
    from mezzo.reproduce.figures import WIDTH

    figure.set_size_inches(WIDTH, 8.0)
    axes = figure.subplots(2, 2)
    lengths = numbers["lengths"]
    for one in axes.flat:
        one.set_xscale("log", base=2)
        one.set_xlim(
            lengths[0], lengths[-1] ** 1.42 / lengths[0] ** 0.42
        )  # room for names at the lines' ends
        one.set_xticks([length for length in lengths if int(math.log2(length)) % 4 == 0])
    _draw_sums(axes[0, 0], numbers, lengths)
    _draw_errors(axes[0, 1], numbers["dot"]["positive"], lengths, "Dot product of positive factors: error")
    _draw_errors(
        axes[1, 0], numbers["dot"]["zero mean"], lengths, "Dot product of factors of mean zero: error"
    )
    _draw_variance(axes[1, 1], numbers, lengths)


def _draw_sums(axes: Axes, numbers: dict[str, Any], lengths: list[int]) -> None:
    from mezzo.reproduce.figures import BF16, FP16, FP32, MUTED, label_ends

    axes.set_yscale("log", base=2)
    axes.set(title=f"Sum of equal terms of {numbers['equal_term']:g}", xlabel="terms", ylabel="sum")
    exact = [numbers["equal_term"] * length for length in lengths]
    axes.plot(lengths, exact, color=FP32)
    ends = [(lengths[-1], exact[-1], "FP32", FP32)]
    for form, colour, power in (("fp16", FP16, "2¹¹"), ("bf16", BF16, "2⁸")):
        seen, predicted = numbers["equal_sums"][form], numbers["stagnates_at"][form]
        axes.axhline(predicted, color=MUTED, linestyle=":", linewidth=1)
        axes.text(
            lengths[-1],
            predicted / 1.25,
            f"predicted: {power} terms",
            color=MUTED,
            fontsize=9,
            ha="right",
            va="top",
        )
        axes.plot(lengths, seen, color=colour, marker="o", markersize=3.5)
        ends.append((lengths[-1], seen[-1] * 1.5, form, colour))
    label_ends(axes, ends)


_LINES = (("sequential", "-", ""), ("blocks", "--", ", blocks"), ("pairwise", ":", ", pairwise"))


def _draw_errors(axes: Axes, kind: dict[str, Any], lengths: list[int], title: str) -> None:
    from mezzo.reproduce.figures import BF16, FP16, FP32, label_ends

    axes.set_yscale("log")
    axes.set(title=title, xlabel="terms", ylabel="relative error of the sum")
    rows = [
        (kind[form][order], line, colour, f"{form}{name}")
        for form, colour in (("fp16", FP16), ("bf16", BF16))
        for order, line, name in _LINES
    ]
    rows.append((kind["fp16"]["fp32"], "-", FP32, "FP32"))
    for errors, line, colour, _ in rows:
        axes.plot(lengths, errors, line, color=colour)
    label_ends(axes, [(lengths[-1], errors[-1], name, colour) for errors, _, colour, name in rows])


def _draw_variance(axes: Axes, numbers: dict[str, Any], lengths: list[int]) -> None:
    from mezzo.reproduce.figures import BF16_SAFE, FP16, FP16_SAFE, FP32, label_ends

    axes.set_yscale("log")
    axes.set(
        title="Variance in fp16: error (× then overflows)",
        xlabel="values in the channel",
        ylabel="relative error",
    )
    rows = (
        ("unit", "sequential", "-", FP16, "N(0, 1)", "center", 8),
        ("unit", "pairwise", ":", FP16, "N(0, 1), pairwise", "center", -18),
        ("offset", "pairwise", ":", BF16_SAFE, "N(8, 1), pairwise", "center", 8),
        ("large", "pairwise", ":", FP16_SAFE, "N(0, 16²), pairwise", "left", -18),
        ("unit", "fp32", "-", FP32, "FP32, N(0, 1)", "center", 8),
    )
    ends = []
    for name, order, line, colour, label, side, above in rows:
        errors = [error for error in numbers["variance"][name][order] if error is not None]
        axes.plot(lengths[: len(errors)], errors, line, color=colour)
        x, y = lengths[len(errors) - 1], errors[-1]
        if len(errors) == len(lengths):
            ends.append((x, y, label, colour))
            continue
        axes.plot([x], [y], "x", color=colour, markersize=8, markeredgewidth=2)
        axes.annotate(
            label, (x, y), xytext=(-24 if side == "left" else 0, above), textcoords="offset points", color=colour,
            ha=side, fontsize=9,
        )  # fmt: skip
    label_ends(axes, ends)
