"""A figure file from an experiment's numbers: SVG and PNG, readable on a light and on a dark page.

matplotlib is imported here and nowhere else but in an experiment's own `draw`, and only its object form is used: no
display, no state of the process is touched.
"""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezzo.core.errors import UsageError
from mezzo.reproduce.experiment import Experiment

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEEDS = {"matplotlib": "matplotlib", "sklearn": "scikit-learn"}
"""What the experiments need beyond Mezzo's own requirements: what is imported, and what is installed."""

WIDTH, HEIGHT, DPI = 9.0, 5.0, 100

FP32, FP16, BF16, FP16_SAFE, BF16_SAFE = "#4a5560", "#b1480a", "#0b62c4", "#0c7268", "#7b3cb5"
"""A colour a precision, the same in every figure: FP32 grey, fp16 and bf16 as such, and with what mends them."""
INK, MUTED, GRID = "#181c21", "#57606a", "#e9ecef"

STYLE: dict[str, Any] = {
    "font.size": 11,
    "font.family": "sans-serif",
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
    "grid.color": GRID,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "mezzo",  # the same numbers give the same bytes
}


def check_installed() -> None:
    """Raise before hours of training if what comes after them could not be done.

    Raises:
        UsageError: a package is not there; the message says how to get it.
    """
    absent = [package for module, package in NEEDS.items() if importlib.util.find_spec(module) is None]
    if absent:
        raise UsageError(
            f"{' and '.join(absent)} not found, which the experiments and their figures need: "
            "pip install 'mezzo[reproduce]'"
        )


def draw(experiment: Experiment, numbers: dict[str, Any]) -> dict[str, bytes]:
    """``figure.svg`` and ``figure.png`` of these numbers, as bytes: about 900 pixels wide, on white.

    Args:
        experiment: whose figure it is.
        numbers: `Outcome.numbers`, as JSON gives them back.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a reader's own matplotlibrc is not ours to draw by
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI)
        experiment.draw(numbers, figure)
        files = {}
        for kind, metadata in (
            ("svg", {"Title": experiment.title, "Date": None, "Creator": "Mezzo"}),
            ("png", {"Title": experiment.title, "Software": "Mezzo"}),
        ):
            drawn = io.BytesIO()
            figure.savefig(drawn, format=kind, metadata=metadata)
            files[f"figure.{kind}"] = drawn.getvalue()
    return files


def label_end(axes: Axes, x: float, y: float, text: str, colour: str, *, shift: float = 0.0) -> None:
    """Write a line's name beside its last point, `shift` points higher, in place of a legend."""
    axes.annotate(
        text, (x, y), xytext=(6, shift), textcoords="offset points", color=colour, va="center",
        annotation_clip=False,
    )  # fmt: skip


def write(files: dict[str, bytes], folder: Path) -> None:
    """Put files into a folder that exists."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
