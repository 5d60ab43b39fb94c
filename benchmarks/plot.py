"""The plot of `bench.json`: time and peak bytes of every workload relative to torch.amp, eager and compiled.

    python benchmarks/plot.py                             # writes docs/dev/figures/bench.svg
    python benchmarks/plot.py FILE.json                   # writes FILE.svg

Each contender is a mark with its 95 % interval; left of the line is faster, or smaller, than torch.amp. The file
contains the digest of the results, so that a test can detect an outdated plot.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results" / "bench.json"
FIGURE = Path(__file__).parent.parent / "docs" / "dev" / "figures" / "bench.svg"
AMP = "amp-bf16"


@dataclass(frozen=True)
class Mark:
    """How a contender is drawn: in a color of Okabe and Ito, and with a shape that readers can tell without color."""

    name: str
    label: str
    shape: str
    color: str


MARKS = (
    Mark("fp32", "FP32", "o", "#6e7781"),
    Mark("short-bf16", "Mezzo, FP32 weights", "D", "#0072b2"),
    Mark("split-bf16", "Mezzo, split weights", "s", "#d55e00"),
    Mark("recompute", "  and GELU recomputed", "P", "#aa4499"),
    Mark("fused-loss", "  and LinearCrossEntropy", "X", "#b8860b"),
    Mark("lean-bf16", "Mezzo, lean", "^", "#009e73"),
)
TEXT, FAINT = "#1f2328", "#d8dee4"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "text.color": TEXT,
    "axes.titlecolor": TEXT,
    "axes.labelcolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "legend.labelcolor": TEXT,
    "svg.hashsalt": "mezzo",
    "svg.fonttype": "none",
}


def digest(results: Mapping[str, Any]) -> str:
    """A hash of the values of the results, independent of the layout of the file."""
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:16]


def _ratios(found: Mapping[str, Any], measure: str) -> dict[str, tuple[float, float, float]]:
    """Contender -> ratio to torch.amp, with its lower and upper bound."""
    if "ratios" not in found:
        return {}
    if measure == "time":
        return {name: (each["ratio"], *each["interval"]) for name, each in found["ratios"].items()}
    peaks = found["peak_bytes"]
    if AMP not in peaks:
        return {}
    return {name: (peak / peaks[AMP],) * 3 for name, peak in peaks.items()}


def _panel(axes: Axes, rows: Mapping[str, Any], mode: str, measure: str) -> None:
    axes.axvline(1, color=TEXT, linewidth=1)
    for place, modes in enumerate(rows.values()):
        if place % 2:
            axes.axhspan(place - 0.5, place + 0.5, color=FAINT, alpha=0.28, linewidth=0)
        found = _ratios(modes.get(mode, {}), measure)
        drawn = [mark for mark in MARKS if mark.name in found]
        for turn, mark in enumerate(drawn):
            value, low, high = found[mark.name]
            axes.errorbar(
                value,
                place + (turn - (len(drawn) - 1) / 2) * 0.84 / max(4, len(drawn)),
                xerr=[[max(0, value - low)], [max(0, high - value)]],
                fmt=mark.shape,
                color=mark.color,
                markersize=4.8,
                elinewidth=1.3,
                label=mark.label,
            )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title(f"{'time' if measure == 'time' else 'peak bytes'} relative to torch.amp, {mode}")
    axes.grid(axis="x", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _spread(results: Mapping[str, Any], measure: str) -> tuple[float, float]:
    """Limits of the axis, the same for eager and compiled. They contain every value, but not every interval."""
    values = [1.0]
    for modes in results["rows"].values():
        for mode in ("eager", "compiled"):
            found = _ratios(modes.get(mode, {}), measure)
            values += [found[mark.name][0] for mark in MARKS if mark.name in found]
    room = 0.06 * (max(values) - min(values)) + 0.02
    return min(values) - room, max(values) + room


def figure(results: Mapping[str, Any]) -> Figure:
    """The four panels."""
    rows = results["rows"]
    shown = Figure(figsize=(9.2, 1.6 + 0.86 * max(2, len(rows))), layout="constrained")
    grid = shown.subplots(2, 2, sharey=True, sharex="col")
    for line, mode in enumerate(("eager", "compiled")):
        for column, measure in enumerate(("time", "bytes")):
            axes = grid[line][column]
            _panel(axes, rows, mode, measure)
            axes.set_xlim(*_spread(results, measure))
            axes.tick_params(labelbottom=True)
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels())}
    drawn = [mark for mark in MARKS if mark.label in handles]
    shown.legend(
        [handles[mark.label] for mark in drawn],
        [mark.label.replace("  and", "split and") for mark in drawn],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    return shown


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Write the plot as SVG."""
    with mpl.rc_context(STYLE):
        metadata = {"Date": None, "Description": f"results {digest(results)}"}
        figure(results).savefig(path, format="svg", metadata=metadata)


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    path = source.with_suffix(".svg") if len(sys.argv) > 1 else FIGURE
    draw(json.loads(source.read_text(encoding="utf-8")), path)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
