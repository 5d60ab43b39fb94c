"""The loss scale over a run's updates, with every skipped update marked."""

from __future__ import annotations

import math

import numpy as np

from mezzo.core.records import UpdateRecord
from mezzo.report.charts.axis import Axis
from mezzo.report.charts.frame import Frame, Key
from mezzo.report.markup import Markup
from mezzo.report.numbers import counted, significant
from mezzo.report.reading import Comparison, Run
from mezzo.report.series import Array

# More strokes than this would be a wall of colour: one a bucket is drawn, and the note gives the true count.
STROKES = 200
NAMED = 12


def loss_scale(comparison: Comparison, candidate: str, series: str) -> Markup | None:
    """The figure, or None where no update was scaled and none was skipped."""
    runs = [run for run in comparison.of(candidate) if run.updates]
    if not any(update.skipped or update.loss_scale != 1.0 for run in runs for update in run.updates):
        return None
    steps = max(len(run.updates) for run in runs)
    scales = [
        u.loss_scale for run in runs for u in run.updates if math.isfinite(u.loss_scale) and u.loss_scale > 0
    ]
    low, high = (min(scales), max(scales)) if scales else (1.0, 2.0)
    frame = Frame(
        title=f"Loss scale: {candidate}",
        described=" ".join(_told(run) for run in runs),
        x=Axis(0.0, float(max(1, steps - 1))),
        y=Axis(low / 2, high * 2, log=True),
        x_name="update",
        y_name="The factor on the loss, " + ("each seed a line." if len(runs) > 1 else "one seed."),
        height="low",
        powers=True,
    )
    for run in runs:
        frame.line(*_corners(run.updates), series=series, style="line" if len(runs) == 1 else "thin")
    frame.keys.append(Key(series, "line", "loss scale"))
    marked = False
    for run in runs:
        for place, update in _strokes(run.updates):
            reason = f": {update.reason}" if update.reason else ""
            frame.tick(place, "skip", f"seed {run.seed}, update {update.index:,} skipped{reason}")
            marked = True
    if marked:
        frame.keys.append(Key("skip", "tick", "skipped update"))
    frame.notes += [_told(run) for run in runs]
    return frame.render()


def _told(run: Run) -> str:
    skipped = run.skipped
    if not skipped:
        return f"Seed {run.seed}: none of {counted(len(run.updates), 'update')} skipped."
    named = ", ".join(f"{index:,}" for index in skipped[:NAMED]) + (", …" if len(skipped) > NAMED else "")
    reasons = sorted({update.reason for update in run.updates if update.skipped and update.reason})
    why = f" ({'; '.join(reasons[:3])})" if reasons else ""
    return (
        f"Seed {run.seed}: {len(skipped):,} of {counted(len(run.updates), 'update')} skipped, "
        f"at {named}{why}; "
        f"the last scale is {significant(run.updates[-1].loss_scale, 6)}."
    )


def _corners(
    updates: tuple[UpdateRecord, ...],
) -> tuple[Array, Array]:
    """The steps of the staircase alone: where the scale changes, and both ends."""
    xs: list[float] = []
    ys: list[float] = []
    for place, update in enumerate(updates):
        scale = update.loss_scale if update.loss_scale > 0 else math.nan
        if ys and scale != ys[-1]:
            xs.append(float(place))
            ys.append(ys[-1])
        if not ys or scale != ys[-1]:
            xs.append(float(place))
            ys.append(scale)
    xs.append(float(max(1, len(updates) - 1)))
    ys.append(ys[-1])
    return np.array(xs), np.array(ys)


def _strokes(updates: tuple[UpdateRecord, ...]) -> list[tuple[float, UpdateRecord]]:
    skipped = [(float(place), update) for place, update in enumerate(updates) if update.skipped]
    if len(skipped) <= STROKES:
        return skipped
    kept: dict[int, tuple[float, UpdateRecord]] = {}
    for place, update in skipped:
        kept.setdefault(int(place * STROKES / len(updates)), (place, update))
    return list(kept.values())
