"""lstm-loss-scale's figure: held-out loss by step, its difference from FP32's, and the mean of all logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mezzo.reproduce.figures import BF16_SAFE, FP16, FP16_SAFE, FP32, MUTED, WIDTH, label_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"fp32": FP32, 1: FP16, 128: FP16_SAFE, 2**15: BF16_SAFE}


def scaled(scale: int) -> str:
    """The policy of an fp16 run, as `mezzo.policy` reads it."""
    return f"fp16,loss_scale={scale}"


def in_figures(scale: float) -> str:
    """A scale as it is written: as it is, or from 1,024 on as a power of two."""
    return f"{scale:g}" if scale < 1024 else f"2^{math.log2(scale):g}"


def differences(numbers: dict[str, Any], precision: str) -> list[list[float]]:
    """Held-out loss minus FP32's of the same seed, [seeds][evaluations]; NaN where there is none."""
    found = []
    for ours, theirs in zip(numbers["runs"][precision], numbers["runs"]["fp32"]):
        rows = zip(or_nan(ours["held_out"], len(theirs["held_out"])), theirs["held_out"])
        found.append([our - their for our, their in rows])
    return found


def or_nan(losses: Sequence[float | None], count: int) -> list[float]:
    """A run's losses at `count` evaluations: what is missing, because a run stopped or the JSON has null, is NaN."""
    rows = [math.nan if loss is None else loss for loss in losses]
    return rows + [math.nan] * (count - len(rows))


def draw(numbers: dict[str, Any], figure: Figure) -> None:
    """Three panels, seeds faint and means strong; see the module."""
    figure.set_size_inches(WIDTH, 7.6)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.25, 1))
    rows = [("fp32", "FP32", "-")]
    rows += [
        (scaled(scale), f"scale {_raised(in_figures(scale))}" if scale != 1 else "no loss scale", line)
        for scale, line in zip(numbers["size"]["scales"], ("-", "--", ":"))
    ]
    colours = {precision: _colour(precision) for precision, _, _ in rows}
    whole = {row[0]: [run["held_out"] for run in numbers["runs"][row[0]]] for row in rows}
    logits = {row[0]: [run["mean_logit"] for run in numbers["runs"][row[0]]] for row in rows}
    gaps = {row[0]: differences(numbers, row[0]) for row in rows[1:]}
    at = numbers["runs"]["fp32"][0]["at"]

    top = figure.add_subplot(grid[0, :])
    top.set(title="A language-model LSTM: held-out loss, nats a word", xlabel="step")
    _curves(top, at, whole, rows, colours, room=1.14)
    left, right = figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    margin = numbers["margin"]
    left.axhspan(-margin, margin, color=FP32, alpha=0.12, linewidth=0)
    left.set(title=f"Difference from FP32 (band: margin {margin:g})", xlabel="step")
    _curves(left, at, gaps, rows[1:], colours, room=1.38)
    right.set(title="Mean of all logits", xlabel="step")
    _curves(right, at, logits, rows, colours, room=1.38)


def _raised(power: str) -> str:
    base, _, exponent = power.partition("^")
    return f"{base}$^{{{exponent}}}$" if exponent else base


def _colour(precision: str) -> str:
    key: str | int = precision if precision == "fp32" else int(precision.rpartition("=")[2])
    return _COLOURS.get(key, MUTED)


def _curves(
    axes: Axes,
    at: list[int],
    curves: dict[str, list[list[float | None]]] | dict[str, list[list[float]]],
    rows: list[tuple[str, str, str]],
    colours: dict[str, str],
    *,
    room: float,
) -> None:
    """Each precision's curves by seed, and their mean with its name at the end."""
    ends = []
    for precision, name, line in rows:
        seeds = np.array([or_nan(curve, len(at)) for curve in curves[precision]])
        mean = seeds.mean(axis=0)
        axes.plot(at, seeds.T, line, color=colours[precision], alpha=0.25, linewidth=0.9)
        width, strength = (3.6, 0.6) if precision == "fp32" else (1.8, 1.0)  # others may lie on FP32
        axes.plot(at, mean, line, color=colours[precision], linewidth=width, alpha=strength)
        last = np.flatnonzero(np.isfinite(mean))
        if last.size:
            ends.append((float(at[last[-1]]), float(mean[last[-1]]), name, colours[precision]))
    axes.set_xlim(0, room * at[-1])
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= at[-1]])
    axes.margins(y=0.12)
    label_ends(axes, ends, size=9.5)
