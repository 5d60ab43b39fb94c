"""The figure of gan: loss scales by step above; below, the distances of every seed, and images to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mezzo.reproduce.figures import BF16, FP16, FP16_SAFE, FP32, INK, MUTED, label_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {
    "fp32": ("FP32", FP32),
    "own": ("fp16,\nown scales", FP16),
    "policies": ("fp16\nand bf16", BF16),
    "shared": ("fp16,\nshared", FP16_SAFE),
    "own-summed": ("summed,\nown scales", FP16),
    "shared-summed": ("summed,\nshared", FP16_SAFE),
}


def draw(numbers: dict[str, Any], figure: Figure) -> None:
    """Draw all."""
    figure.set_size_inches(9.0, 9.6)
    grid = figure.add_gridspec(3, 1, height_ratios=(1.1, 1.1, 0.75))
    scales(figure.add_subplot(grid[0]), numbers)
    distances(figure.add_subplot(grid[1]), numbers)
    images(figure.add_subplot(grid[2]), numbers)


def scales(axes: Axes, numbers: dict[str, Any]) -> None:
    """Two scales of their own, and the shared one; a mark where a step was skipped."""
    axes.set_title("Each network's loss scale, and one shared by both")
    own, shared = numbers["log2_scales"]["own"], numbers["log2_scales"]["shared"]
    skipped = {name: numbers["runs"][name][0]["skipped"] for name in ("own", "shared")}
    steps = range(len(own[0]))
    lines = (
        ("generator", own[1], skipped["own"][1], FP16, "-"),
        ("discriminator", own[0], skipped["own"][0], BF16, "-"),
        ("shared", shared[0], sorted({*skipped["shared"][0], *skipped["shared"][1]}), INK, "--"),
    )
    for _, series, skips, colour, style in lines:
        # The shared one lies on the discriminator's: the one is thick, the other thin.
        wide = 1.4 if style == "--" else 3.0 if colour == BF16 else 1.8
        axes.plot(steps, series, color=colour, ls=style, drawstyle="steps-post", lw=wide)
        axes.plot(skips, [series[step] for step in skips], "x", color=colour, ms=6, mew=1.6)
    axes.set_xlabel("step of both networks; × a skipped step: overflow, the scale is halved")
    axes.set_ylabel("loss scale")
    every = [value for _, series, *_ in lines for value in series]
    low, high = int(min(every)) - 1, int(max(every)) + 1
    axes.set_yticks(range(low, high + 1), [f"$2^{{{power}}}$" for power in range(low, high + 1)])
    axes.set_ylim(low, high)
    axes.set_xlim(0, len(own[0]) - 1)
    label_ends(axes, [(len(series) - 1, series[-1], name, colour) for name, series, _, colour, _ in lines])


def distances(axes: Axes, numbers: dict[str, Any]) -> None:
    """A column a setting, a dot a seed, lines between the dots of one seed; the band is FP32's mean and the margin."""
    axes.set_title("Distance from real digits (lower is better)")
    runs = numbers["runs"]
    mean = sum(run["distance"] for run in runs["fp32"]) / len(runs["fp32"])
    axes.axhspan(mean * (1 - numbers["margin"]), mean * (1 + numbers["margin"]), color="#eef1f4", zorder=0)
    for index in range(len(runs["fp32"])):
        axes.plot(
            range(len(NAMES)), [runs[name][index]["distance"] for name in NAMES], color="#c3cad1", lw=1.2
        )
    for place, (name, (_, colour)) in enumerate(NAMES.items()):
        axes.plot([place] * len(runs[name]), [run["distance"] for run in runs[name]], "o", ms=7, color=colour)
        average = sum(run["distance"] for run in runs[name]) / len(runs[name])
        axes.plot([place - 0.25, place + 0.25], [average, average], color=colour, lw=2.4)
    axes.set_xticks(
        range(len(NAMES)), [text.replace(", ", ",\n") for text, _ in NAMES.values()], fontsize=9.5
    )
    axes.set_xlim(-0.5, len(NAMES) - 0.5)
    top = max(run["distance"] for one in runs.values() for run in one)
    axes.set_ylim(0.0, 1.12 * top)
    axes.axvline(3.5, color="#c3cad1", lw=0.8)
    axes.annotate("discriminator's loss × $2^{30}$", (3.55, 1.09 * top), color=MUTED, fontsize=9, va="top")
    axes.set_ylabel("Fréchet distance")
    axes.grid(visible=False, axis="x")
    axes.annotate(
        f"band: FP32's mean ± {numbers['margin']:.0%}, the margin; bars: means", (0.03, 0.04),
        xycoords="axes fraction", color=MUTED, fontsize=9,
    )  # fmt: skip


def images(axes: Axes, numbers: dict[str, Any]) -> None:
    """A block a setting, the same noise in every block."""
    axes.set_title("Digits that they make (first seed)")
    blocks = [("real", "real", INK), *((name, text, colour) for name, (text, colour) in NAMES.items())]
    across, pitch, gap = 2, 9, 8
    down = len(numbers["images"]["real"]) // across
    width = pitch * across + gap
    canvas = [[0.0] * (width * len(blocks) - gap) for _ in range(pitch * down - 1)]
    for block, (name, _, _) in enumerate(blocks):
        for index, image in enumerate(numbers["images"][name][: across * down]):
            top, left = pitch * (index // across), width * block + pitch * (index % across)
            for y, line in enumerate(image):
                canvas[top + y][left : left + len(line)] = line
    axes.imshow(canvas, cmap="Greys", vmin=0, vmax=16, interpolation="nearest", aspect="equal")
    axes.set_xticks(
        [width * block + pitch - 1 for block in range(len(blocks))], [text for _, text, _ in blocks]
    )
    for label, (_, _, colour) in zip(axes.get_xticklabels(), blocks):
        label.set_color(colour)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
