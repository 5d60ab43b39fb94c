"""The style of the figures, and curves by seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FP32, FP16, BF16, FP16_SAFE, BF16_SAFE = "#4a5560", "#b1480a", "#0b62c4", "#0c7268", "#7b3cb5"
"""One color per precision, the same in every figure; `_SAFE` is the format with what keeps its numbers."""
INK, MUTED, BAND = "#181c21", "#57606a", "#eef1f4"
STYLE: Any = {
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": "#8a939d",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e9ecef",
    "legend.fontsize": 9,
    "legend.framealpha": 0.7,
    "legend.edgecolor": "none",
    "text.color": INK,
    "xtick.minor.size": 0,  # on a logarithmic axis they are most of an SVG's bytes
    "ytick.minor.size": 0,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.8,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",  # letters as letters: searchable, and half the bytes of outlines
    "svg.hashsalt": "mezzo",  # the same numbers give the same bytes
}


def save(path: Path, title: str, draw: Callable[[Figure], None]) -> None:
    """Draw into an empty figure of 9 by 8 inches, and write it as SVG."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(9.0, 8.0))
        draw(figure)
        figure.savefig(path, metadata={"Title": title, "Date": None, "Creator": "Mezzo"})


def plot_seeds(axes: Axes, at: Sequence[int], rows: Any, colour: str, line: str, name: str) -> None:
    """Plot one faint curve per seed, and their mean."""
    values = np.array(rows, dtype=float)
    axes.plot(at, values.T, line, color=colour, alpha=0.25, linewidth=0.9)
    axes.plot(at, values.mean(axis=0), line, color=colour, label=name)
