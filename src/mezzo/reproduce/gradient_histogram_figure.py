"""gradient-histogram's figure: the histogram over fp16's range, the training curves, the end loss by loss scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mezzo.reproduce.figures import BF16_SAFE, FP16, FP16_SAFE, FP32, INK, MUTED, WIDTH, label_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def scaled(scale: float) -> str:
    """The policy of an fp16 run, as `mezzo.policy` reads it."""
    return f"fp16,loss_scale={scale!r}"


def in_figures(scale: float) -> str:
    """A power of two as it is written: 8 as it is, others as powers."""
    return f"{scale:g}" if 1 <= scale < 1024 else f"2^{math.log2(scale):g}"


def _power(scale: float) -> str:
    """`in_figures` with a raised exponent."""
    base, _, exponent = in_figures(scale).partition("^")
    return f"{base}$^{{{exponent}}}$" if exponent else base


def together(moments: dict[str, Any]) -> dict[str, Any]:
    """The shares of all moments, as one tensor's: means weighted by elements."""
    rows = list(moments.values())
    weights = [row["elements"] / sum(other["elements"] for other in rows) for row in rows]

    def mean(values: list[float]) -> float:
        return math.fsum(weight * value for weight, value in zip(weights, values))

    found: dict[str, Any] = {name: mean([row[name] for row in rows]) for name in ("zero", "between", "below")}
    for name in ("lost", "subnormal", "overflow"):
        found[name] = {key: mean([row[name][key] for row in rows]) for key in rows[0][name]}
    return found


def draw(numbers: dict[str, Any], figure: Figure) -> None:
    """Above the histogram over fp16's band, below the training curves and the end loss by loss scale."""
    figure.set_size_inches(WIDTH, 8.0)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.1, 1))
    _draw_histogram(figure.add_subplot(grid[0, :]), numbers)
    _draw_curves(figure.add_subplot(grid[1, 0]), numbers)
    _draw_ends(figure.add_subplot(grid[1, 1]), numbers)


def _draw_histogram(axes: Axes, numbers: dict[str, Any]) -> None:
    lowest, every = numbers["lowest"], together(numbers["moments"])
    total = sum(row["elements"] for row in numbers["moments"].values())
    counts = np.sum([row["counts"] for row in numbers["moments"].values()], axis=0)
    exponents = np.arange(lowest, lowest + len(counts))
    low, high = -46, 17
    axes.axvspan(-14, 16, color="#0c7268", alpha=0.10, linewidth=0)
    axes.axvspan(-24, -14, color="#d9a400", alpha=0.13, linewidth=0)
    axes.axvspan(low, -25, color=FP16, alpha=0.08, linewidth=0)
    lost = exponents < -25
    for chosen, colour in ((lost, FP16), (~lost, MUTED)):
        axes.bar(exponents[chosen] + 0.5, 100 * counts[chosen] / total, width=0.86, color=colour)
    top = 1.6 * 100 * counts.max() / total
    for shift, height in ((3, 0.82), (15, 0.68)):
        part = 1 - every["lost"][f"{2.0**shift:g}"] / max(every["lost"]["1"], 1e-30)
        axes.annotate(
            "",
            (-25, height * top),
            (-25 - shift, height * top),
            arrowprops={"arrowstyle": "->", "color": INK, "shrinkA": 0, "shrinkB": 0},
        )
        text = f"a scale of {_power(2.0**shift)} recovers {part:.1%} of these"
        axes.text(-25.3, (height + 0.02) * top, text, ha="right", va="bottom", fontsize=9.5)
    for x, text in (
        (-25.3, f"zero in fp16: {every['lost']['1']:.1%}"),
        (-14.2, f"subnormal: {every['subnormal']['1']:.1%}"),
        (15.8, "normal in fp16"),
    ):
        axes.text(x, 0.97 * top, text, ha="right", va="top", color=INK, fontsize=9.5)
    axes.set(
        title=f"A detector's activation gradients: {every['zero']:.0%} are zero, the others lie here",
        xlabel="log$_2$ of the magnitude, FP32", ylabel="% of all gradients", xlim=(low, high), ylim=(0, top),
    )  # fmt: skip
    axes.set_xticks([-45, -40, -35, -30, -24, -19, -14, -10, -5, 0, 5, 10, 15])
    axes.grid(False, axis="x")


def _draw_curves(axes: Axes, numbers: dict[str, Any]) -> None:
    ends = []
    for precision, colour, line in _lines(numbers):
        rows = numbers["runs"][precision]
        steps = min(len(run["losses"]) for run in rows)
        losses = np.array([[math.nan if x is None else x for x in run["losses"][:steps]] for run in rows])
        window = max(1, steps // 12)
        smooth = np.array([np.convolve(row, np.ones(window) / window, "valid") for row in losses])
        at = np.arange(window, steps + 1)
        axes.plot(at, smooth.T, line, color=colour, alpha=0.18, linewidth=0.8)
        axes.plot(at, smooth.mean(axis=0), line, color=colour)
        ends.append((at[-1], smooth.mean(axis=0)[-1], _name(precision), colour))
    axes.set(title="Training loss a positive anchor", xlabel="step")
    axes.set_xlim(0, 1.28 * max(x for x, *_ in ends))
    axes.margins(y=0.14)
    label_ends(axes, ends, size=9)


def _lines(numbers: dict[str, Any]) -> list[tuple[str, str, str]]:
    smallest = min(numbers["size"]["scales"])
    chosen = [("fp32", FP32, "-"), (scaled(smallest), INK, "-"), (scaled(1.0), FP16, "-")]
    chosen += [(scaled(8.0), FP16_SAFE, "--"), (scaled(2.0**15), BF16_SAFE, ":")]
    return [row for row in chosen if row[0] in numbers["runs"]]


def _name(precision: str) -> str:
    """A policy in a word, for a line's end."""
    return "FP32" if precision == "fp32" else f"scale {_power(float(precision.rpartition('=')[2]))}"


def _draw_ends(axes: Axes, numbers: dict[str, Any]) -> None:
    fp32 = np.array([run["held_out"] for run in numbers["runs"]["fp32"]])
    scales = sorted(numbers["size"]["scales"])
    margin = 100 * numbers["margin"]
    axes.axhspan(-margin, margin, color=FP32, alpha=0.10, linewidth=0)
    axes.axhline(0, color=FP32, linewidth=1)
    means = []
    for place, scale in enumerate(scales):
        rows = [run["held_out"] for run in numbers["runs"][scaled(scale)]]
        gaps = 100 * (np.array([math.nan if x is None else x for x in rows]) - fp32) / fp32.mean()
        axes.plot([place] * len(gaps), gaps, "o", color=FP16, alpha=0.35, markersize=4, markeredgewidth=0)
        means.append(gaps.mean())
    axes.plot(range(len(scales)), means, "-", color=FP16, marker="o", markersize=6)
    axes.set_yscale("symlog", linthresh=margin)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(y=0.2)
    axes.set_xticks(range(len(scales)), [_power(scale) for scale in scales])
    axes.text(
        len(scales) - 1, margin, f"margin {margin:g} % ", ha="right", va="bottom", color=MUTED, fontsize=9
    )
    axes.set(title="Held-out loss against FP32's, %", xlabel="loss scale of the fp16 run")
