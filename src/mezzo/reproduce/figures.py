"""A figure file from an experiment's numbers: SVG and PNG, readable on a light and on a dark page.

matplotlib is imported here and nowhere else but in an experiment's own `draw`, and only its object form is used: no
display, no state of the process is touched.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Iterable
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

STYLE: Any = {  # matplotlib's own type has a literal for each of its 300 keys
    "font.size": 10,
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
    "xtick.minor.size": 0,  # on a logarithmic axis they are most of an SVG's bytes
    "ytick.minor.size": 0,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",  # letters as letters: searchable, and half the bytes of outlines
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
            ("png", {"Title": experiment.title}),
        ):
            drawn = io.BytesIO()
            figure.savefig(drawn, format=kind, metadata=metadata)
            files[f"figure.{kind}"] = drawn.getvalue()
    files["figure.png"] = _with_fewer_colours(files["figure.png"])
    return files


def label_ends(axes: Axes, ends: Iterable[tuple[float, float, str, str]], *, size: float = 10.0) -> None:
    """Write lines' names beside their last points, in place of a legend, moved apart where they would overlap.

    Call it when the axes' scales and limits are as they will stay.

    Args:
        axes: of the lines.
        ends: for each line its last point's x and y, its name and its colour. One without a finite y has no label.
        size: of the letters, in points.
    """
    axes.autoscale_view()
    rows = sorted((row for row in ends if math.isfinite(row[1])), key=lambda row: row[1])
    high = axes.get_position().height * axes.get_figure().get_size_inches()[1] * 72  # type: ignore[union-attr]
    to_axes = axes.transData + axes.transAxes.inverted()
    points = [float(to_axes.transform((x, y))[1]) * high for x, y, _, _ in rows]
    for row, at, placed in zip(rows, points, _apart(points, 1.15 * size)):
        x, y, text, colour = row
        axes.annotate(
            text, (x, y), xytext=(6, placed - at), textcoords="offset points", color=colour, va="center",
            fontsize=size, annotation_clip=False,
        )  # fmt: skip


def _apart(places: list[float], gap: float) -> list[float]:
    """Rising places moved as little as need be so that no two are nearer than the gap.

    Places that would touch become a cluster, spread evenly about its members' mean.

    >>> _apart([0.0, 1.0, 10.0], 4.0)
    [-1.5, 2.5, 10.0]
    """
    clusters: list[list[float]] = []
    for place in places:
        clusters.append([place])
        while len(clusters) > 1 and _low(clusters[-1], gap) - _high(clusters[-2], gap) < gap:
            last = clusters.pop()
            clusters[-1] = clusters[-1] + last
    return [_low(cluster, gap) + i * gap for cluster in clusters for i in range(len(cluster))]


def _low(cluster: list[float], gap: float) -> float:
    return sum(cluster) / len(cluster) - gap * (len(cluster) - 1) / 2


def _high(cluster: list[float], gap: float) -> float:
    return _low(cluster, gap) + gap * (len(cluster) - 1)


def _with_fewer_colours(png: bytes) -> bytes:
    """The same picture in a third of the bytes: a palette of 256 holds all that lines and letters need."""
    from PIL import Image  # a requirement of matplotlib's own

    smaller = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        title = image.info.get("Title")
        palette = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    if title:
        info.add_itxt("Title", title)
    palette.save(smaller, format="png", optimize=True, pnginfo=info)
    return smaller.getvalue()
