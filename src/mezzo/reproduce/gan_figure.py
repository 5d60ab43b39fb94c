"""The figure of gan: loss scales by step above; below, the distances of every seed, and images to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mezzo.reproduce.figures import BF16, FP16, FP16_SAFE, FP32, INK, MUTED, label_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {
    "fp32": ("FP32", FP32),
    "own": ("fp16, own scales", FP16),
    "policies": ("fp16 and bf16", BF16),
    "shared": ("fp16, shared scale", FP16_SAFE),
}


def draw(numbers: dict[str, Any], figure: Figure) -> None:
    """Draw all."""
    figure.set_size_inches(9.0, 7.6)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.0, 1.0), width_ratios=(1.0, 1.15))
    scales(figure.add_subplot(grid[0, :]), numbers)
    distances(figure.add_subplot(grid[1, 0]), numbers)
    images(figure.add_subplot(grid[1, 1]), numbers)


def scales(axes: Axes, numbers: dict[str, Any]) -> None:
    """Two scales of their own, and the shared one; a mark where a step was skipped."""
    axes.set_title("Each network's loss scale, and one shared by both")
    own, shared = numbers["log2_scales"]["own"], numbers["log2_scales"]["shared"]
    skipped = {name: numbers["runs"][name][0]["skipped"] for name in ("own", "shared")}
    steps = range(len(own[0]))
    lines = (
        ("generator", own[1], skipped["own"][1], FP16, "-"),
        ("discriminator", own[0], skipped["own"][0], BF16, "-"),
        ("shared", shared[0], sorted({*skipped["shared"][0], *skipped["shared"][1]}), FP32, "--"),
    )
    for _, series, skips, colour, style in lines:
        axes.plot(steps, series, color=colour, ls=style, drawstyle="steps-post", lw=1.8)
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
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("Fréchet distance")
    axes.grid(visible=False, axis="x")
    axes.annotate(
        f"band: FP32's mean ± {numbers['margin']:.0%}, the margin; bars: means", (0.03, 0.04),
        xycoords="axes fraction", color=MUTED, fontsize=9,
    )  # fmt: skip


def images(axes: Axes, numbers: dict[str, Any]) -> None:
    """A row a setting, the same noise in every row."""
    axes.set_title("Digits that they make (first seed)")
    rows = [("real", "real", INK), *((name, text, colour) for name, (text, colour) in NAMES.items())]
    pitch = 9
    canvas = [[0.0] * (pitch * len(numbers["images"]["real"]) - 1) for _ in range(pitch * len(rows) - 1)]
    for row, (name, _, _) in enumerate(rows):
        for column, image in enumerate(numbers["images"][name]):
            for y, line in enumerate(image):
                for x, value in enumerate(line):
                    canvas[pitch * row + y][pitch * column + x] = value
    axes.imshow(canvas, cmap="Greys", vmin=0, vmax=16, interpolation="nearest", aspect="equal")
    axes.set_yticks([pitch * row + 3.5 for row in range(len(rows))], [text for _, text, _ in rows])
    for label, (_, _, colour) in zip(axes.get_yticklabels(), rows):
        label.set_color(colour)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
