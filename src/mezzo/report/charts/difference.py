"""Loss difference: a candidate minus FP32 of the same seed, with the margin and one-ulp twins' noise."""

from __future__ import annotations

import numpy as np

from mezzo.core.curve import final_count
from mezzo.report.charts.axis import Axis, axis_over
from mezzo.report.charts.frame import Frame, Key
from mezzo.report.markup import Markup
from mezzo.report.numbers import counted, signed, significant
from mezzo.report.reading import Comparison
from mezzo.report.run import Run
from mezzo.report.series import Array, align, band, sample, smooth, thin, thin_band, window_for

# The frame shows this share of the smoothed differences; the rest, the first steps mostly, may leave it.
SHOWN = 0.98


def difference(comparison: Comparison, candidate: str, series: str, margin: float | None) -> Markup | None:
    """The figure, or None where no seed has both runs. ``margin`` is in the loss's own unit, or None."""
    rows = _paired(comparison, comparison.of(candidate))
    twins = _paired(comparison, comparison.twins)
    if not rows.size:
        return None
    base = align([run.losses for run in comparison.of(comparison.baseline)])
    steps = max(base.shape[1], max(len(run.losses) for run in comparison.of(candidate)))
    window = window_for(steps)
    over = band(smooth(rows, window))
    noise = band(smooth(twins, window)) if twins.size else None
    frame = Frame(
        title=f"Difference: {candidate} minus FP32 of the same seed",
        described=_described(candidate, over.mean, margin),
        x=Axis(0.0, float(max(1, steps - 1))),
        y=_height(
            [over.low, over.high] + ([noise.low, noise.high] if noise else []), margin, smooth(base, window)
        ),
        x_name="step",
        y_name=_unit(rows.shape[0], window),
    )
    if margin is not None:
        n = rows.shape[1]
        frame.span(
            -margin,
            margin,
            float(n - final_count(n)),
            float(n - 1),
            "margin",
            f"margin ±{significant(margin, 2)}, shaded where it counts",
        )
    if noise is not None:
        if twins.shape[0] > 1:
            frame.band(
                *thin_band(noise.low, noise.high), series="noise", name="FP32 twins moved by one ulp (noise)"
            )
        else:
            frame.line(*thin(noise.mean), series="noise", name="FP32 twin moved by one ulp (noise)")
    frame.rule(0.0, "zero")
    if rows.shape[0] > 1:
        frame.band(*thin_band(over.low, over.high), series=series, name="smallest to largest seed")
    frame.line(*thin(over.mean), series=series)
    frame.keys.insert(0, Key(series, "line", f"{candidate} minus FP32"))
    if _outside(frame.y, over.low, over.high):
        largest = np.nanmax(np.abs(np.concatenate([over.low, over.high])))
        frame.notes.append(
            f"The curve leaves the frame in places: its largest size is {significant(largest, 3)}."
        )
    picks = sample(steps, 160)
    columns = [(f"{candidate} − FP32", series, _at(over.mean, picks))]
    if noise is not None:
        columns.append(("twin − FP32", "noise", _at(noise.mean, picks)))
    frame.readout(picks.astype(float).tolist(), columns)
    return frame.render()


def _paired(comparison: Comparison, runs: list[Run]) -> Array:
    """Loss minus FP32's of the same seed, (pairs, steps); NaN where either has none."""
    base = {run.seed: run.losses for run in comparison.of(comparison.baseline) if len(run.losses)}
    pairs = []
    for run in runs:
        if run.seed in base and len(run.losses):
            n = min(len(run.losses), len(base[run.seed]))
            with np.errstate(invalid="ignore", over="ignore"):
                pairs.append(run.losses[:n] - base[run.seed][:n])
    return align(pairs)


def _height(parts: list[Array], margin: float | None, base: Array) -> Axis:
    """`SHOWN` of the differences, and the margin; never more than FP32's own fall (an exploding loss)."""
    values = np.concatenate(parts)
    falls = base[np.isfinite(base)]
    if len(falls) > 1 and falls.max() > falls.min():
        values = np.clip(values, falls.min() - falls.max(), falls.max() - falls.min())
    values = values[np.isfinite(values)]
    edges = [np.array([0.0])]
    if len(values):
        edges.append(np.quantile(values, [(1 - SHOWN) / 2, (1 + SHOWN) / 2]))
    if margin is not None:
        edges.append(np.array([-1.15 * margin, 1.15 * margin]))
    return axis_over(edges, log=False, about_zero=True)


def _outside(axis: Axis, low: Array, high: Array) -> bool:
    with np.errstate(invalid="ignore"):
        return bool((low < axis.low).any() or (high > axis.high).any())


def _unit(pairs: int, window: int) -> str:
    over = f"mean over {counted(pairs, 'pair')}" if pairs > 1 else "one pair"
    return f"Loss difference, {over}, " + (
        f"averaged over {window} steps around." if window > 1 else "not smoothed."
    )


def _described(candidate: str, mean: Array, margin: float | None) -> str:
    good = mean[np.isfinite(mean)]
    if not len(good):
        return "No step has a finite loss in both runs."
    words = f"{candidate} ends {signed(good[-1])} from FP32"
    return words + (f"; the margin is {significant(margin, 3)}." if margin is not None else ".")


def _at(values: Array, picks: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> list[float]:
    return [float(values[pick]) if pick < len(values) else float("nan") for pick in picks]
