"""Training loss: a candidate's curve over the FP32 one, each with its band over seeds."""

from __future__ import annotations

from collections import Counter

import numpy as np

from mezzo.report.charts.axis import Axis, axis_over
from mezzo.report.charts.frame import Frame, Key
from mezzo.report.markup import Markup
from mezzo.report.numbers import counted, significant
from mezzo.report.reading import Comparison
from mezzo.report.run import Run
from mezzo.report.series import (
    Array,
    align,
    band,
    first_not_finite,
    sample,
    smooth,
    thin,
    thin_band,
    window_for,
)

# A loss that explodes would squeeze all else into one line: the frame ends so many of FP32's falls above its
# top.
CUT = 5.0


Group = tuple[str, str, list[Run]]
"""A precision's name, its colour, and its runs."""


def loss_over(comparison: Comparison, candidate: str, series: str) -> Markup | None:
    """A candidate's figure over FP32's, or None where the candidate recorded no loss."""
    groups = [
        ("FP32", "s0", comparison.of(comparison.baseline)),
        (candidate, series, comparison.of(candidate)),
    ]
    return loss(f"Loss: {candidate} over FP32", groups)


def loss(title: str, groups: list[Group]) -> Markup | None:
    """The figure, or None where the last group recorded no loss; a first one of two is what it is held against."""
    rows = [align([run.losses for run in runs if len(run.losses)]) for _, _, runs in groups]
    steps = max(part.shape[1] for part in rows)
    if not rows[-1].size:
        return None
    window = window_for(steps)
    smoothed = [smooth(part, window) for part in rows]
    seeds = max(part.shape[0] for part in rows)
    alone = len(groups) == 1 and seeds == 1
    frame = Frame(
        title=title,
        described=_described([name for name, _, _ in groups], smoothed),
        x=Axis(0.0, float(max(1, steps - 1))),
        y=_height(rows),
        x_name="step",
        y_name=_unit(window, seeds, alone),
    )
    if frame.y.log:
        frame.y_name += " Logarithmic."
    columns = []
    picks = sample(steps, 160)
    for (name, colour, runs), raw, part in zip(groups, rows, smoothed):
        if not part.size:
            frame.notes.append(f"{name} recorded no loss: there is nothing to compare with.")
            continue
        over = band(part)
        if window > 1:
            frame.line(*thin(raw[0]), series=colour, style="raw")
        if part.shape[0] > 1:
            frame.band(*thin_band(over.low, over.high), series=colour)
        # FP32 is drawn broad and pale under the candidate, so that both are seen where they agree.
        frame.line(
            *thin(over.mean), series=colour, name=name, style="line" if name == groups[-1][0] else "under"
        )
        values = np.full(steps, np.nan)
        values[: len(over.mean)] = over.mean
        columns.append((name, colour, values[picks]))
        frame.notes += _faults(frame, name, colour, runs, alone)
    frame.notes += _mixed(groups)
    if seeds > 1:
        frame.keys.append(Key("s0", "band", "smallest to largest seed"))
    if window > 1:
        frame.keys.append(Key("s0", "raw", "every step" if alone else "every step of the first seed"))
    frame.readout(picks.astype(float).tolist(), [(n, c, v.tolist()) for n, c, v in columns])
    return frame.render()


def _unit(window: int, seeds: int, alone: bool) -> str:
    over = f"mean over {counted(seeds, 'seed')}, " if seeds > 1 else "" if alone else "one seed, "
    return f"Each loss that gradients were taken of, {over}" + (
        f"averaged over {window} steps around." if window > 1 else "not smoothed."
    )


def _height(rows: list[Array]) -> Axis:
    base = rows[0][np.isfinite(rows[0])]
    if len(base):
        top = float(base.max())
        most = top + CUT * max(top - float(base.min()), abs(top) * 0.1)
        return axis_over([np.where(part <= most, part, np.nan) for part in rows])
    return axis_over(rows)


def _described(names: list[str], smoothed: list[Array]) -> str:
    words = []
    for name, part in zip(names, smoothed):
        if part.size and np.isfinite(part).any():
            mean = band(part).mean
            good = mean[np.isfinite(mean)]
            words.append(f"{name} goes from {significant(good[0])} to {significant(good[-1])}")
    return "; ".join(words) + "." if words else "No finite loss was recorded."


def _mixed(groups: list[Group]) -> list[str]:
    """That a curve holds losses of several kinds: a record tells the loss, and not which optimizer it was for."""
    most = 0
    for run in (run for _, _, runs in groups for run in runs):
        updates = Counter(update.optimizer for update in run.updates)
        if len(updates) > 1 and len(run.losses) > max(updates.values()):
            most = max(most, len(updates))
    if not most:
        return []
    return [
        f"{most} optimizers stepped: the curve holds every loss that gradients were taken of, one after the other, "
        "whichever optimizer it was for."
    ]


def _faults(frame: Frame, name: str, series: str, runs: list[Run], alone: bool) -> list[str]:
    """Mark, and tell in words, where a run's loss stopped being finite, or left the frame."""
    notes = []
    for run in runs:
        who = name if alone else f"{name}, seed {run.seed}"
        # A loss that was not read is a gap, and no NaN.
        read = np.where(np.isin(np.arange(len(run.losses)), list(run.lost)), 0.0, run.losses)
        at = first_not_finite(read)
        if at is not None:
            kind = "NaN" if np.isnan(run.losses[at]) else "infinite"
            times = int(np.count_nonzero(~np.isfinite(read)))
            more = f", the first of {times:,} steps without a finite one" if times > 1 else ""
            text = f"{who}: the loss is {kind} at step {at:,}{more}."
            frame.mark(at, float("inf"), series, text, shape="cross")
            notes.append(text)
        good = np.where(np.isfinite(run.losses), run.losses, -np.inf)
        if len(good) and good.max() > frame.y.high:
            peak = int(good.argmax())
            notes.append(
                f"{who}: leaves the frame; its largest finite loss is "
                f"{significant(good[peak])}, at step {peak:,}."
            )
    return notes
