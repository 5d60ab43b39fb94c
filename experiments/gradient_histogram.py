"""How large activation gradients are, which of them fp16 loses, and whether that matters.

Micikevicius et al. 2017, section 3.2 and figure 3: in Multibox SSD 67 % of the activation gradients are zero, and
much of the rest lies below fp16's range, while most of that range is not used. A loss scale of 8, a shift by three
powers of two, is enough to match FP32: values in [2^-27, 2^-24) matter, those below 2^-27 don't.

Here a small multibox detector, without normalization as SSD's VGG, finds a square, a disk or a cross in a noisy
image: two feature maps, 1,920 anchors per image, nearly all of them background; the hardest negatives, three for each
positive, count in the loss, which is a mean over all anchors. Gradients are those of the convolutions' outputs, in
FP32.

Declared before the runs:

- ``mostly-zeros`` holds if, of all gradients looked at together, more than half are zero.
- ``lost-unscaled`` holds if fp16 makes zeros of more than 5 % of the nonzero ones, at every moment.
- ``shift-3-recovers-most`` and ``shift-15-recovers-all`` hold if a loss scale of 2^3 recovers more than half of what
  is lost unscaled, and one of 2^15 more than 99 % with nothing past 65504, over all moments together.
- ``unscaled-falls-behind``: training in fp16 without a loss scale ends behind FP32: the lower end of the 90 %
  interval of the mean paired difference of the held-out loss is above the margin: 1 % of FP32's mean; 5 % in full,
  where longer runs part further by chance (two seeds, before: by about 2.5 %).
- ``scaled-lies-on-fp32``: at every scale above 1, that interval lies within the margin on both sides (a paired TOST).
- ``small-gradients-matter-later``: a loss scale below 1 stands for a loss that is so much smaller, as with more
  anchors or a larger batch. It holds if at the smallest scale tried fp16 falls behind by the rule above.

What it leaves out: real images, and the size of the original.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import figures
import mezzo
from common import Finding, Numbers, gap, in_words, main, power, progress, scaled, tex
from detector import Detector, loss_of, pictures

LOWEST, HIGHEST = -60, 20
"""Exponents of the first and last bin of the histogram; what is smaller or larger is counted there."""
BATCH = 32
LEARNING_RATE = 10.0  # large, since the loss is a mean over all anchors; it falls to zero along a cosine
SHIFTS = (1.0, 8.0, 2.0**15)
MOMENTS = {"start": 0.0, "middle": 0.5, "end": 1.0}


class Size(NamedTuple):
    """Steps, runs per precision, loss scales of the fp16 runs (smallest first), margin as a share of FP32's loss."""

    steps: int
    seeds: int
    scales: tuple[float, ...]
    margin: float


QUICK = Size(60, 3, (2.0**-9, 1.0, *SHIFTS[1:]), 0.01)
FULL = Size(200, 8, (2.0**-9, 2.0**-6, 2.0**-3, 1.0, *SHIFTS[1:]), 0.05)
BELOW_2_28 = (
    "After few steps, most of the lost gradients are below 2^-28, where three powers of two are not enough. Later in "
    "training they are, as the full run shows."
)
LITTLE_WEIGHT = (
    "fp16 loses many of the nonzero gradients, but only small ones. The gradient of a weight is a sum that the large "
    "ones dominate. With a loss 512 times smaller, fp16 learns nothing (small-gradients-matter-later). With a large "
    "vocabulary, where small gradients matter, fp16 ends with a higher loss (lstm-loss-scale)."
)


def shares(gradient: Tensor, scales: Sequence[float]) -> dict[str, Any]:
    """Count what fp16 makes of a gradient times each of these loss scales (powers of two), as shares of its elements.

    Returns:
        ``elements``; ``zero``; ``between`` (in [2^-27, 2^-24)) and ``below`` (nonzero, below 2^-27); and by loss
        scale ``lost`` (not zero, but zero in fp16: 2^-25 and below, ties to even), ``subnormal`` (nonzero, below
        2^-14 in fp16) and ``overflow`` (infinite or NaN in fp16; products that FP32 can't hold count).
    """
    flat = gradient.detach().flatten().float()
    size, zero = flat.abs(), flat == 0

    def share(chosen: Tensor) -> float:
        return chosen.sum().item() / chosen.numel()

    found: dict[str, Any] = {
        "elements": flat.numel(),
        "zero": share(zero),
        "between": share((size >= 2.0**-27) & (size < 2.0**-24)),
        "below": share((size < 2.0**-27) & ~zero),
        **{name: {} for name in ("lost", "subnormal", "overflow")},
    }
    for scale in scales:
        half, key = (size * scale).half(), f"{scale:g}"
        found["lost"][key] = share((half == 0) & ~zero)
        found["subnormal"][key] = share((half > 0) & (half < 2.0**-14))
        found["overflow"][key] = share(~half.isfinite())
    return found


def histogram(gradient: Tensor) -> list[int]:
    """How many elements have each exponent, ``floor(log2(|g|))``, from `LOWEST` to `HIGHEST`; zeros are left out.

    Smaller ones are in the first bin; larger, infinite and NaN ones in the last.
    """
    flat = gradient.detach().flatten().double()
    flat = flat[flat != 0].nan_to_num(math.inf, math.inf, -math.inf).clamp(-(2.0**99), 2.0**99)
    exponents = (torch.frexp(flat).exponent - 1).clamp(LOWEST, HIGHEST)
    counts: list[int] = torch.bincount(exponents - LOWEST, minlength=HIGHEST - LOWEST + 1).tolist()
    return counts


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


def train(steps: int, precision: str, seed: int, moments: dict[str, Any] | None = None) -> dict[str, Any]:
    """One run: the loss per positive anchor of every step, and at the end, in FP32, of 512 images held out.

    Args:
        steps: of SGD with momentum 0.9.
        precision: a policy.
        seed: of weights and images.
        moments: filled, for each of `MOMENTS`, with histogram and shares of all convolutions' output gradients.
    """
    torch.manual_seed(seed)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps))
    )
    generator = torch.Generator().manual_seed(seed)
    mp = mezzo.MixedPrecision(model, optimizer, precision, clip_norm=1.0, scheduler=schedule)
    look_at = (
        {round(share * (steps - 1)): name for name, share in MOMENTS.items()} if moments is not None else {}
    )
    run: dict[str, Any] = {"losses": [], "skipped": 0}
    for step in range(steps):
        images, boxes, kinds = pictures(BATCH, generator)
        with mp.autocast():
            outputs, activations = model(images)
            loss, shown = loss_of(outputs.float(), boxes, kinds)
        run["losses"].append(shown.item())
        caught: list[Tensor] = []
        if step in look_at:
            for activation in activations:
                activation.register_hook(
                    lambda gradient, into=caught: into.append(gradient.detach().flatten())
                )
        run["skipped"] += mp.step(loss).skipped
        if moments is not None and caught:
            every = torch.cat(caught)
            moments[look_at[step]] = {"step": step, "counts": histogram(every), **shares(every, SHIFTS)}
    with torch.no_grad():
        images, boxes, kinds = pictures(512, torch.Generator().manual_seed(4321))
        run["held_out"] = loss_of(model(images)[0], boxes, kinds)[1].item()
    return run


def run(full: bool) -> tuple[list[Finding], Numbers]:
    """Train every precision with every seed; look at the gradients of FP32's first run."""
    size = FULL if full else QUICK
    moments: dict[str, Any] = {}
    runs: dict[str, list[dict[str, Any]]] = {}
    for precision in ("fp32", *map(scaled, size.scales)):
        progress(f"training, {precision}, {size.seeds} seeds")
        runs[precision] = [
            train(size.steps, precision, seed, moments if (precision, seed) == ("fp32", 0) else None)
            for seed in range(size.seeds)
        ]
    numbers = {"size": size._asdict(), "moments": moments, "runs": runs}
    return findings(numbers, full), numbers


def findings(numbers: Numbers, full: bool) -> list[Finding]:
    """The rules of the module's docstring, applied to gradients and runs."""
    moments = numbers["moments"]
    every = together(moments)
    parts = {name: row["lost"]["1"] / max(1 - row["zero"], 1e-30) for name, row in moments.items()}
    at = ", ".join(f"{part:.1%} at the {name}" for name, part in parts.items())

    scales = sorted(numbers["size"]["scales"])
    fp32 = np.array([run["held_out"] for run in numbers["runs"]["fp32"]])
    margin = numbers["size"]["margin"] * float(fp32.mean())
    judged = {
        scale: gap([run["held_out"] for run in numbers["runs"][scaled(scale)]] - fp32, margin)
        for scale in scales
    }

    def ends(chosen: list[float]) -> str:
        rows = "; ".join(
            f"at scale {power(scale)} {judged[scale].mean:+.4f} (90 % interval {judged[scale].low:+.4f} to "
            f"{judged[scale].high:+.4f}; {sum(run['skipped'] for run in numbers['runs'][scaled(scale)])} steps skipped)"
            for scale in chosen
        )
        tail = f"(margin {margin:.3f}, {len(fp32)} seeds)."
        return f"Difference from FP32's held-out loss of {fp32.mean():.3f}: {rows} {tail}"

    above = [scale for scale in scales if scale > 1]
    return [
        Finding(
            "mostly-zeros",
            "Most activation gradients of a detector are exactly zero (67 % in Multibox SSD).",
            f"{every['zero']:.0%} are zero; {every['between']:.1%} lie in [2^-27, 2^-24), {every['below']:.1%} below.",
            every["zero"] > 0.5,
        ),
        Finding(
            "lost-unscaled",
            "Some of the nonzero gradients are too small for fp16.",
            f"Of the nonzero gradients, fp16 rounds to zero {at}; of all gradients {every['subnormal']['1']:.1%} "
            f"become subnormal and {every['overflow']['1']:.1%} overflow.",
            all(part > 0.05 for part in parts.values()),
        ),
        recovers(every, 8.0, "shift-3-recovers-most", 0.5, known="" if full else BELOW_2_28),
        recovers(every, 2.0**15, "shift-15-recovers-all", 0.99),
        Finding(
            "unscaled-falls-behind",
            "Without a loss scale, fp16 ends with a higher loss: gradients below 2^-24 matter.",
            ends([1.0]),
            judged[1.0].behind,
            known=LITTLE_WEIGHT,
        ),
        Finding(
            "scaled-lies-on-fp32",
            "With a loss scale of 8, or a larger one that does not overflow, fp16 matches FP32.",
            ends(above),
            all(judged[scale].equivalent for scale in above),
        ),
        Finding(
            "small-gradients-matter-later",
            f"With a loss {round(1 / scales[0])} times smaller, fp16 ends with a higher loss than FP32.",
            ends([scale for scale in scales if scale < 1]),
            judged[scales[0]].behind,
        ),
    ]


def recovers(every: dict[str, Any], scale: float, name: str, enough: float, known: str = "") -> Finding:
    """Whether a loss scale recovers more than a share `enough` of what is lost, and overflows nothing."""
    lost, still = every["lost"]["1"], every["lost"][f"{scale:g}"]
    over = every["overflow"][f"{scale:g}"]
    part = 1 - still / lost if lost else 0.0
    return Finding(
        name,
        f"A shift by 2^{math.log2(scale):g} recovers {'most' if enough < 0.9 else 'all'} of what fp16 loses.",
        f"It recovers {part:.1%}: {still:.2%} of all gradients are lost instead of {lost:.2%}; {over:.2%} overflow.",
        part > enough and over == 0,
        known,
    )


def draw(numbers: Numbers, figure: Figure) -> None:
    """Above, the histogram and the range of fp16; below, the training curves and the final loss by loss scale."""
    grid = figure.add_gridspec(2, 2, height_ratios=(1.1, 1))
    _draw_histogram(figure.add_subplot(grid[0, :]), numbers["moments"])
    _draw_curves(figure.add_subplot(grid[1, 0]), numbers["runs"])
    _draw_ends(figure.add_subplot(grid[1, 1]), numbers)


def _draw_histogram(axes: Axes, moments: dict[str, Any]) -> None:
    every = together(moments)
    total = sum(row["elements"] for row in moments.values())
    percent = 100 * np.sum([row["counts"] for row in moments.values()], axis=0) / total
    top = 1.6 * percent.max()
    exponents = np.arange(LOWEST, HIGHEST + 1)
    axes.bar(
        exponents + 0.5,
        percent,
        width=0.86,
        color=[figures.FP16 if e < -25 else figures.MUTED for e in exponents],
    )
    for low, high, colour, text in (
        (-46, -25, figures.FP16, f"zero in fp16: {every['lost']['1']:.1%}"),
        (-24, -14, "#d9a400", f"subnormal: {every['subnormal']['1']:.1%}"),
        (-14, 16, figures.FP16_SAFE, "normal in fp16"),
    ):
        axes.axvspan(low, high, color=colour, alpha=0.1, linewidth=0)
        axes.text(high - 0.2, 0.97 * top, text, ha="right", va="top", fontsize=9.5)
    for shift, height in ((3, 0.82), (15, 0.68)):
        part = 1 - every["lost"][f"{2.0**shift:g}"] / max(every["lost"]["1"], 1e-30)
        arrow = {"arrowstyle": "->", "color": figures.INK, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (-25, height * top), (-25 - shift, height * top), arrowprops=arrow)
        text = f"a scale of {tex(2.0**shift)} recovers {part:.1%} of these"
        axes.text(-25.3, (height + 0.02) * top, text, ha="right", va="bottom", fontsize=9.5)
    axes.set_title(f"A detector's activation gradients: {every['zero']:.0%} are zero, the others lie here")
    axes.set(
        xlabel="log$_2$ of the magnitude, FP32", ylabel="% of all gradients", xlim=(-46, 17), ylim=(0, top)
    )
    axes.set_xticks([-45, -40, -35, -30, -24, -19, -14, -10, -5, 0, 5, 10, 15])
    axes.grid(visible=False, axis="x")


def _draw_curves(axes: Axes, runs: dict[str, Any]) -> None:
    for precision, colour, line in (
        ("fp32", figures.FP32, "-"),
        (scaled(2.0**-9), figures.INK, "-"),
        (scaled(1.0), figures.FP16, "-"),
        (scaled(8.0), figures.FP16_SAFE, "--"),
        (scaled(2.0**15), figures.BF16_SAFE, ":"),
    ):
        losses = np.array([run["losses"] for run in runs[precision]])
        window = max(1, losses.shape[1] // 12)
        smooth = [np.convolve(row, np.ones(window) / window, "valid") for row in losses]
        at = range(window, losses.shape[1] + 1)
        figures.plot_seeds(axes, at, smooth, colour, line, in_words(precision))
    axes.set(title="Training loss a positive anchor", xlabel="step")
    axes.legend()


def _draw_ends(axes: Axes, numbers: Numbers) -> None:
    fp32 = np.array([run["held_out"] for run in numbers["runs"]["fp32"]])
    scales = sorted(numbers["size"]["scales"])
    margin = 100 * numbers["size"]["margin"]
    axes.axhspan(-margin, margin, color=figures.FP32, alpha=0.10, linewidth=0)
    ends = np.array([[run["held_out"] for run in numbers["runs"][scaled(scale)]] for scale in scales])
    gaps = 100 * (ends - fp32) / fp32.mean()
    axes.plot(range(len(scales)), gaps, "o", color=figures.FP16, alpha=0.35, markersize=4, markeredgewidth=0)
    axes.plot(range(len(scales)), gaps.mean(axis=1), "-", color=figures.FP16, marker="o", markersize=6)
    axes.set_yscale("symlog", linthresh=margin)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(y=0.2)
    axes.set_xticks(range(len(scales)), [tex(scale) for scale in scales])
    axes.text(
        len(scales) - 1,
        margin,
        f"margin {margin:g} % ",
        ha="right",
        va="bottom",
        color=figures.MUTED,
        fontsize=9,
    )
    axes.set(title="Held-out loss against FP32's, %", xlabel="loss scale of the fp16 run")


if __name__ == "__main__":
    TITLE = "Activation gradients against fp16's range, and what a shift recovers"
    sys.exit(main("gradient-histogram", TITLE, "Micikevicius et al. 2017, section 3.2, figure 3", run, draw))
