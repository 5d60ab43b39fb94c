"""The figure of side-by-side: a column a network; above the metric by seed, below its difference from FP32's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mezzo.reproduce.figures import BF16, FP16, FP32, INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"bf16": BF16, "fp16": FP16}
BAND = "#eef1f4"
HEIGHT = 8.8


def draw(numbers: dict[str, Any], figure: Figure) -> None:
    """Draw all; the control is named in the table alone, since it lies far off."""
    figure.set_size_inches(9.0, HEIGHT)
    networks = numbers["networks"]
    grid = figure.add_gridspec(3, len(networks), height_ratios=(1.0, 1.0, 1.15))
    for column, network in enumerate(networks.values()):
        # A candidate whose training broke has no numbers to draw; the table says its verdict.
        shown = {
            name: one
            for name, one in network["candidates"].items()
            if name in COLOURS and one["metric_gap"] is not None
        }
        if not shown:
            continue
        by_seed(figure.add_subplot(grid[0, column]), network, shown)
        differences(figure.add_subplot(grid[1, column]), network, shown, legend=column == 0)
    table(figure.add_subplot(grid[2, :]), numbers)


def by_seed(axes: Axes, network: dict[str, Any], shown: dict[str, Any]) -> None:
    """Dots of one seed stand side by side, joined by a line."""
    axes.set_title(network["title"].split(" on ")[0].removeprefix("a ").capitalize())
    axes.set_ylabel(network["metric_label"])
    seeds: dict[int, list[tuple[float, float, str]]] = {}
    for place, (name, one) in enumerate(shown.items(), 1):
        for pair in one["pairs"]:
            dots = seeds.setdefault(pair["seed"], [(0.0, pair["fp32_metric"], FP32)])
            dots.append((place * 0.22, pair["metric"], COLOURS[name]))
    for seed, dots in seeds.items():
        left = seed - 0.11 * len(shown)
        axes.plot([left + x for x, _, _ in dots], [y for _, y, _ in dots], color="#c3cad1", lw=1.2, zorder=1)
        for x, y, colour in dots:
            axes.plot(left + x, y, "o", ms=6.5, color=colour)
    axes.set_xlabel("seed")
    axes.set_xticks(sorted(seeds), [str(seed + 1) for seed in sorted(seeds)])
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.15)


def differences(axes: Axes, network: dict[str, Any], shown: dict[str, Any], *, legend: bool) -> None:
    """Mixed - FP32 by seed, the mean with its 90 % interval at the right, and the margin as a band."""
    some = next(iter(shown.values()))
    margin = some["metric_margin"]
    last = max(pair["seed"] for pair in some["pairs"])
    axes.axhspan(-margin, margin, color=BAND, zorder=0)
    axes.axhline(0.0, color=FP32, lw=1.2, zorder=1)
    for edge in (-margin, margin):
        axes.axhline(edge, color="#8a939d", lw=0.9, ls=(0, (4, 3)), zorder=1)
    for place, (name, one) in enumerate(shown.items()):
        colour, aside = COLOURS[name], 0.22 * place - 0.11 * (len(shown) - 1)
        axes.plot(
            [pair["seed"] + aside for pair in one["pairs"]],
            [pair["metric"] - pair["fp32_metric"] for pair in one["pairs"]],
            "o", ms=6.5, color=colour,
        )  # fmt: skip
        low, high = one["metric_gap_interval"] or (one["metric_gap"],) * 2
        at = last + 1.2 + 2.2 * aside
        axes.plot([at, at], [low, high], color=colour, lw=3.0, solid_capstyle="butt")
        axes.plot(at, one["metric_gap"], "D", ms=6.0, color=colour)
    axes.axvline(last + 0.6, color="#c3cad1", lw=0.8)
    axes.set_xticks(
        [*(pair["seed"] for pair in some["pairs"]), last + 1.2],
        [*(str(pair["seed"] + 1) for pair in some["pairs"]), "mean"],
    )
    axes.set_xlabel("seed; mean with its 90 % interval")
    unit = "points" if network["metric_label"].endswith("%") else "nats"
    axes.set_ylabel(f"mixed - FP32, {unit}")
    reach = max(
        [margin, *(abs(p["metric"] - p["fp32_metric"]) for one in shown.values() for p in one["pairs"])]
    )
    axes.set_ylim(-1.55 * reach, 1.55 * reach)
    axes.grid(visible=False)
    axes.annotate(
        f"margin ±{margin:.2g}", (0.99, -margin), xycoords=("axes fraction", "data"), xytext=(0, -4),
        textcoords="offset points", color=MUTED, fontsize=9, ha="right", va="top",
    )  # fmt: skip
    if legend:
        for place, (name, colour) in enumerate([("FP32", FP32), *((n, COLOURS[n]) for n in shown)]):
            axes.annotate(
                f"● {name}", (0.30 + 0.16 * place, 0.965), xycoords="axes fraction", color=colour, va="top",
                fontsize=10, fontweight="bold",
            )  # fmt: skip


def rows(numbers: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Network, FP32, mixed, difference, verdict: ours, then the original work's."""
    found = []
    for network in numbers["networks"].values():
        title = network["title"].split(" on ")[0].removeprefix("a ")
        what = network["metric_label"].removesuffix(", nats a character")
        digits = 2 if network["metric_label"].endswith("%") else 4
        for name, one in network["candidates"].items():
            if one["final_metric"] is None:
                found.append((f"{title}, {name}: {what}", "", "", "", one["parity"]))
                continue
            found.append(
                (
                    f"{title}, {name}: {what}",
                    f"{one['fp32_metric']:.{digits}f}",
                    f"{one['final_metric']:.{digits}f}",
                    f"{one['metric_gap']:+.{digits}f}",
                    f"{one['parity']} ({one['seeds']} seeds)",
                )
            )
    for one in numbers["paper"]:
        found.append(
            (
                one["network"],
                f"{one['fp32_top1']:.2f}",
                f"{one['mixed_top1']:.2f}",
                f"{one['points']:+.2f}",
                "original work, top-1, %",
            )
        )
    return found


def table(axes: Axes, numbers: dict[str, Any]) -> None:
    """The table of the original work, with ours above it."""
    axes.set_axis_off()
    lines = [("", "FP32", "mixed", "difference", "verdict"), *rows(numbers)]
    ours = len(lines) - len(numbers["paper"])
    places = (0.0, 0.50, 0.64, 0.78, 0.81)
    for index, line in enumerate(lines):
        y = 1.0 - (index + 0.5 + 0.4 * (index >= ours)) / (len(lines) + 0.4)
        for column, text in enumerate(line):
            head = index == 0
            axes.text(
                places[column], y, text, transform=axes.transAxes, va="center", fontsize=9.5,
                ha="left" if column in (0, 4) else "right",
                color=MUTED if head or index >= ours else INK, fontweight="bold" if head else "normal",
            )  # fmt: skip
    rule = 1.0 - 1.0 / (len(lines) + 0.4)
    axes.axhline(rule, color="#8a939d", lw=0.8)
    between = 1.0 - (ours + 0.2) / (len(lines) + 0.4)
    axes.axhline(between, color="#c3cad1", lw=0.8)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
