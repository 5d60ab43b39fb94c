"""The README's plot of `bench.json`: time and peak bytes of every row over torch.amp's, eager and compiled.

    python benchmarks/plot.py                             # writes bench.svg and bench-dark.svg beside bench.json
    python benchmarks/plot.py FILE.json

Each contender is a mark, with its 95 % interval; left of the line is faster, or smaller, than torch.amp. Both files
carry the digest of the results that they show, by which a test knows an old plot.
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

RESULTS = Path(__file__).parent / "results"
AMP = "amp-bf16"


@dataclass(frozen=True)
class Mark:
    """How a contender is drawn: colours of Okabe and Ito, told apart by shape as well."""

    name: str
    label: str
    shape: str
    light: str
    dark: str


MARKS = (
    Mark("fp32", "FP32", "o", "#6e7781", "#9aa4af"),
    Mark("short-bf16", "Mezzo, FP32 weights", "D", "#0072b2", "#56b4e9"),
    Mark("split-bf16", "Mezzo, split weights", "s", "#d55e00", "#f0883e"),
    Mark("recompute", "  and GELU recomputed", "P", "#aa4499", "#e58fc8"),
    Mark("fused-loss", "  and LinearCrossEntropy", "X", "#b8860b", "#f0e442"),
    Mark("lean-bf16", "Mezzo, lean", "^", "#009e73", "#2fd0a0"),
)


@dataclass(frozen=True)
class Theme:
    """Colours of everything else."""

    suffix: str
    back: str
    text: str
    faint: str
    dark: bool


THEMES = (
    Theme("", "#ffffff", "#1f2328", "#d8dee4", False),
    Theme("-dark", "#0d1117", "#e6edf3", "#30363d", True),
)


def digest(results: Mapping[str, Any]) -> str:
    """Of the results' values, however the file is laid out."""
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:16]


def _ratios(found: Mapping[str, Any], measure: str) -> dict[str, tuple[float, float, float]]:
    """Contender -> value, low and high over torch.amp's."""
    if "ratios" not in found:
        return {}
    if measure == "time":
        return {name: (each["ratio"], *each["interval"]) for name, each in found["ratios"].items()}
    peaks = found["peak_bytes"]
    if AMP not in peaks:
        return {}
    return {name: (peak / peaks[AMP],) * 3 for name, peak in peaks.items()}


def _panel(axes: Axes, rows: Mapping[str, Any], mode: str, measure: str, theme: Theme) -> None:
    axes.axvline(1, color=theme.text, linewidth=1)
    for place, modes in enumerate(rows.values()):
        if place % 2:
            axes.axhspan(place - 0.5, place + 0.5, color=theme.faint, alpha=0.28, linewidth=0)
        found = _ratios(modes.get(mode, {}), measure)
        drawn = [mark for mark in MARKS if mark.name in found]
        for turn, mark in enumerate(drawn):
            value, low, high = found[mark.name]
            axes.errorbar(
                value,
                place + (turn - (len(drawn) - 1) / 2) * 0.84 / max(4, len(drawn)),
                xerr=[[max(0, value - low)], [max(0, high - value)]],
                fmt=mark.shape,
                color=mark.dark if theme.dark else mark.light,
                markersize=4.8,
                elinewidth=1.3,
                label=mark.label,
            )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title(
        f"{measure} / torch.amp's, {mode}" if measure == "time" else f"peak bytes / torch.amp's, {mode}"
    )
    axes.grid(axis="x", color=theme.faint, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _spread(results: Mapping[str, Any], measure: str) -> tuple[float, float]:
    """The same scale for eager and compiled: every value, but not an interval's far end, is inside."""
    values = [1.0]
    for modes in results["rows"].values():
        for mode in ("eager", "compiled"):
            found = _ratios(modes.get(mode, {}), measure)
            values += [found[mark.name][0] for mark in MARKS if mark.name in found]
    room = 0.06 * (max(values) - min(values)) + 0.02
    return min(values) - room, max(values) + room


def figure(results: Mapping[str, Any], theme: Theme) -> Figure:
    """The four panels."""
    rows = results["rows"]
    shown = Figure(figsize=(9.2, 1.6 + 0.86 * max(2, len(rows))), layout="constrained", facecolor=theme.back)
    grid = shown.subplots(2, 2, sharey=True, sharex="col")
    for line, mode in enumerate(("eager", "compiled")):
        for column, measure in enumerate(("time", "bytes")):
            axes = grid[line][column]
            axes.set_facecolor(theme.back)
            _panel(axes, rows, mode, measure, theme)
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


def draw(results: Mapping[str, Any], beside: Path, kind: str = "svg") -> list[Path]:
    """Write the plot in each theme beside the results' file; the paths."""
    written = []
    for theme in THEMES:
        style: Any = {
            "font.family": "sans-serif",
            "font.size": 9.5,
            "axes.titlesize": 10.5,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "text.color": theme.text,
            "axes.titlecolor": theme.text,
            "axes.labelcolor": theme.text,
            "xtick.color": theme.text,
            "ytick.color": theme.text,
            "legend.labelcolor": theme.text,
            "svg.hashsalt": "mezzo",
            "svg.fonttype": "none",
        }
        path = beside.with_name(f"{beside.stem}{theme.suffix}.{kind}")
        with mpl.rc_context(style):
            extra: dict[str, Any] = (
                {"metadata": {"Date": None, "Description": f"results {digest(results)}"}}
                if kind == "svg"
                else {}
            )
            figure(results, theme).savefig(path, format=kind, dpi=110, facecolor=theme.back, **extra)
        written.append(path)
    return written


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "bench.json"
    for written in draw(json.loads(path.read_text(encoding="utf-8")), path):
        print(f"written: {written}")


if __name__ == "__main__":
    main()
