"""Is a network as good in mixed precision as in FP32? A CNN and a transformer, seed by seed.

The paper trained its networks twice, once in FP32 and once in mixed precision, and put the two results side by side:
every pair agrees (section 4.1, table 1). One run of each can't tell a loss of quality from luck, so here every
precision has the same seeds (five or more; three for the quick transformer), and `mezzo compare` judges: paired runs of
an unchanged script, each in a process of its own, and a paired test of equivalence (``docs/compare.md``).

Declared before the runs:

- a finding NETWORK-FORMAT-as-good holds if the verdict is **equivalent**: the 90 % interval of the mean difference
  lies within the margin, for the training loss and for the metric. Consistent (no harm seen, nothing proven),
  inconclusive and divergent do not hold.
- margins of the quick size: 1 % of FP32's final training loss; 0.5 points of test accuracy (four of the 800 test
  images; the pairs of the paper differ by -0.01 to +0.28 points); 1 % of the validation loss. In full they are those
  of `mezzo compare`: 0.5 %, 0.2 points, 0.5 %, with more seeds where proof takes more.
- in full, a control: fp16 with a constant loss scale of 2^-24, where gradients round to zero. The finding
  cnn-control-divergent holds if the same judge calls it **divergent**. Without it, `equivalent` could be all that the
  judge ever says.

Every run has one thread and may share the machine, so ignore timings.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

import figures
from common import Finding, Numbers, main, progress

CONTROL = "fp16,loss_scale=5.96e-8"


class Network(NamedTuple):
    """What a demo of `mezzo compare` trains, and its metric."""

    title: str
    demo: str
    metric: str
    unit: str
    digits: int


NETWORKS = {
    "cnn": Network("a convolutional network on handwritten digits", "digits", "test accuracy", " %", 2),
    "transformer": Network("a transformer on Python's source text", "text-gpt", "validation loss", "", 4),
}
# `mezzo compare`'s own options, and after -- those of the demo.
QUICK = {
    "cnn": "--precision bf16 --precision fp16 --seeds 5 --margin 0.01 --metric-margin 0.5 -- --epochs 7 --width 16",
    "transformer": "--precision bf16 --precision fp16 --seeds 3 --margin 0.01 -- --steps 100 --width 64 --layers 2 "
    "--context 64 --characters 200000 --lr 3e-3",
}
FULL = {
    "cnn": f"--precision bf16 --precision fp16 --precision {CONTROL} --seeds 10 --margin 0.005 --metric-margin 0.2 "
    "-- --epochs 8 --width 24",
    "transformer": "--precision bf16 --precision fp16 --seeds 5 --margin 0.005 -- --steps 240 --width 96 --layers 3 "
    "--context 64 --lr 3e-3",
}


def compare(name: str, options: str) -> dict[str, Any]:
    """Compare one network's precisions; the candidates of `verdict.json`."""
    progress(f"comparing, {NETWORKS[name].title}")
    with tempfile.TemporaryDirectory(prefix="mezzo-side-by-side-") as folder:
        command = [
            sys.executable,
            "-m",
            "mezzo.cli.main",
            "compare",
            "--demo",
            NETWORKS[name].demo,
            "--out",
            folder,
        ]
        status = subprocess.run(
            [*command, *options.split()], stdout=subprocess.DEVNULL, check=False
        ).returncode
        if status not in (0, 1):
            raise SystemExit(f"mezzo compare ended with exit status {status}")
        verdict = json.loads((Path(folder) / "verdict.json").read_text(encoding="utf-8"))
    candidates: dict[str, Any] = verdict["candidates"]
    return candidates


def run(full: bool) -> tuple[list[Finding], Numbers]:
    """Compare both networks, and turn each verdict into a finding."""
    networks = {name: compare(name, options) for name, options in (FULL if full else QUICK).items()}
    findings = [
        judged(name, precision, one)
        for name, candidates in networks.items()
        for precision, one in candidates.items()
    ]
    return findings, {"networks": networks}


def judged(name: str, precision: str, candidate: dict[str, Any]) -> Finding:
    """The finding on one candidate, from its part of `verdict.json`."""
    seen = describe(NETWORKS[name], candidate)
    word = candidate["parity"]
    if precision == CONTROL:
        return Finding(
            f"{name}-control-divergent",
            "Control: fp16 with a loss scale of 2^-24, which rounds gradients to zero, must be divergent.",
            seen,
            word == "divergent",
        )
    title = NETWORKS[name].title
    return Finding(
        f"{name}-{precision}-as-good",
        f"{title[0].upper()}{title[1:]} is as good in {precision} as in FP32: the verdict is equivalent, as for every "
        "pair in the paper.",
        seen,
        word == "equivalent",
    )


def describe(network: Network, candidate: dict[str, Any]) -> str:
    """The verdict's numbers in one sentence, without speed, which means nothing here."""
    word = candidate["parity"]
    if candidate["metric_gap"] is None or candidate["loss_gap"] is None:
        return f"{word}: {candidate['reason']}"
    interval = candidate["metric_gap_interval"]
    within = f" (90 % interval {interval[0]:+.2g} to {interval[1]:+.2g})" if interval else ""
    text = (
        f"{word}: {network.metric} {candidate['final_metric']:.{network.digits}f}{network.unit} against FP32's "
        f"{candidate['fp32_metric']:.{network.digits}f}{network.unit} over {candidate['seeds']} seeds, difference "
        f"{candidate['metric_gap']:+.2g}{within}, margin {candidate['metric_margin']:.2g}; final training loss "
        f"{candidate['loss_gap_relative']:+.2%} of FP32's, margin {candidate['margin_relative']:.1%}"
    )
    if candidate["skipped_steps"]:
        text += f"; {candidate['skipped_steps']} steps were skipped by the loss scale"
    if word in ("consistent", "inconclusive") and None not in (candidate["power"], candidate["metric_power"]):
        text += (
            f"; equal networks would have been proven so with a chance of {candidate['power']:.0%} by the loss and "
            f"{candidate['metric_power']:.0%} by the metric"
        )
    return text + "."


def draw(numbers: Numbers, figure: Figure) -> None:
    """Above: every seed's metric in each precision. Below: its difference from FP32's, with the margin's band."""
    grid = figure.add_gridspec(2, 2)
    for column, (name, candidates) in enumerate(numbers["networks"].items()):
        # The control is not drawn, since it lies far off; nor is a candidate whose training broke.
        drawn = [
            (form, colour, candidates[form])
            for form, colour in (("bf16", figures.BF16), ("fp16", figures.FP16))
            if candidates[form]["metric_gap"] is not None
        ]
        if drawn:
            above, below = (figure.add_subplot(grid[row, column]) for row in (0, 1))
            _draw_metric(above, NETWORKS[name], drawn)
            _draw_differences(below, NETWORKS[name], drawn)


Drawn = list[tuple[str, str, dict[str, Any]]]  # format, color, candidate


def _draw_metric(axes: Axes, network: Network, drawn: Drawn) -> None:
    pairs = drawn[0][2]["pairs"]
    ways = [("FP32", figures.FP32, [pair["fp32_metric"] for pair in pairs])]
    ways += [(form, colour, [pair["metric"] for pair in one["pairs"]]) for form, colour, one in drawn]
    shifts = [0.22 * (place - 1) for place in range(len(ways))]
    for seed in range(len(pairs)):
        dots = [values[seed] for _, _, values in ways]
        axes.plot([seed + shift for shift in shifts], dots, color="#c3cad1", lw=1.2, zorder=1)
    for shift, (form, colour, values) in zip(shifts, ways):
        axes.plot([seed + shift for seed in range(len(pairs))], values, "o", ms=6.5, color=colour, label=form)
    axes.set_title(network.title.split(" on ")[0].removeprefix("a ").capitalize())
    axes.set(xlabel="seed", ylabel=f"{network.metric}{',' if network.unit else ''}{network.unit}")
    axes.set_xticks(range(len(pairs)), [str(seed + 1) for seed in range(len(pairs))])
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.2)
    axes.legend(frameon=False, ncols=3, fontsize=9, loc="upper left", handletextpad=0.1)


def _draw_differences(axes: Axes, network: Network, drawn: Drawn) -> None:
    """Mixed - FP32 by seed, the mean with its 90 % interval at the right, and the margin as a band."""
    margin, last = drawn[0][2]["metric_margin"], len(drawn[0][2]["pairs"])
    axes.axhspan(-margin, margin, color=figures.BAND, zorder=0)
    axes.axhline(0.0, color=figures.FP32, lw=1.2, zorder=1)
    reach = margin
    for place, (_, colour, one) in enumerate(drawn):
        aside = 0.22 * place - 0.11
        gaps = [pair["metric"] - pair["fp32_metric"] for pair in one["pairs"]]
        reach = max(reach, *map(abs, gaps))
        axes.plot([seed + aside for seed in range(last)], gaps, "o", ms=6.5, color=colour)
        low, high = one["metric_gap_interval"] or (one["metric_gap"],) * 2
        at = last + 0.5 + 2.2 * aside
        axes.plot([at, at], [low, high], color=colour, lw=3.0, solid_capstyle="butt")
        axes.plot(at, one["metric_gap"], "D", ms=6.0, color=colour)
    axes.set_xticks([*range(last), last + 0.5], [*(str(seed + 1) for seed in range(last)), "mean"])
    axes.set(
        xlabel="seed; mean with its 90 % interval",
        ylabel=f"mixed - FP32, {'points' if network.unit else 'nats'}",
    )
    axes.set_ylim(-1.55 * reach, 1.55 * reach)
    axes.grid(visible=False)
    axes.text(
        last + 0.9,
        -1.05 * margin,
        f"margin ±{margin:.2g}",
        color=figures.MUTED,
        fontsize=9,
        ha="right",
        va="top",
    )


if __name__ == "__main__":
    TITLE = "A CNN and a transformer, FP32 and mixed precision side by side"
    SOURCE = "Micikevicius et al. 2017, section 4.1, table 1 (top-1 accuracy in FP32 and in mixed precision)"
    sys.exit(main("side-by-side", TITLE, SOURCE, run, draw))
