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

Updates = tuple[UpdateRecord, ...]


def loss_scale(comparison: Comparison, candidate: str, series: str) -> Markup | None:
    """The figure, or None where no update was scaled and none was skipped."""
    tracks = [track for run in comparison.of(candidate) for track in _tracks(run)]
    updates = [update for _, track in tracks for update in track]
    if not any(update.skipped or update.loss_scale != 1.0 for update in updates):
        return None
    steps = max(len(track) for _, track in tracks)
    scales = [u.loss_scale for u in updates if math.isfinite(u.loss_scale) and u.loss_scale > 0]
    low, high = (min(scales), max(scales)) if scales else (1.0, 2.0)
    told = _grouped(tracks)
    frame = Frame(
        title=f"Loss scale: {candidate}",
        described=" ".join(told),
        x=Axis(0.0, float(max(1, steps - 1))),
        y=Axis(low / 2, high * 2, log=True),
        x_name="update",
        y_name="The factor on the loss"
        + (", a line for each seed and optimizer." if len(tracks) > 1 else "."),
        height="low",
        powers=True,
    )
    marked = False
    for name, track in tracks:
        frame.line(*_corners(track), series=series, style="line" if len(tracks) == 1 else "thin")
        for place, update in _strokes(track):
            reason = f": {update.reason}" if update.reason else ""
            frame.tick(place, "skip", f"{name}, update {place:,.0f} skipped{reason}")
            marked = True
    frame.keys.append(Key(series, "line", "loss scale"))
    if marked:
        frame.keys.append(Key("skip", "tick", "skipped update"))
    frame.notes += told
    return frame.render()


def _tracks(run: Run) -> list[tuple[str, Updates]]:
    """The updates of each optimizer of a run, with what to call them: each has a scale of its own."""
    numbers = sorted({update.optimizer for update in run.updates})
    names = [f"Seed {run.seed}" + (f", optimizer {number}" if len(numbers) > 1 else "") for number in numbers]
    return [
        (name, tuple(update for update in run.updates if update.optimizer == number))
        for name, number in zip(names, numbers)
    ]


def _grouped(tracks: list[tuple[str, Updates]]) -> list[str]:
    """What there is to tell of each track, with those of which the same is true told together."""
    names: dict[str, list[str]] = {}
    for name, track in tracks:
        names.setdefault(_told(track), []).append(name)
    return [f"{'; '.join(who)}: {what}" for what, who in names.items()]


def _told(track: Updates) -> str:
    skipped = [place for place, update in enumerate(track) if update.skipped]
    if not skipped:
        return f"none of {counted(len(track), 'update')} skipped."
    named = ", ".join(f"{place:,}" for place in skipped[:NAMED]) + (", …" if len(skipped) > NAMED else "")
    reasons = sorted({update.reason for update in track if update.skipped and update.reason})
    why = f" ({'; '.join(reasons[:3])})" if reasons else ""
    return (
        f"{len(skipped):,} of {counted(len(track), 'update')} skipped, "
        f"at {named}{why}; "
        f"the last scale is {significant(track[-1].loss_scale, 6)}."
    )


def _corners(
    updates: Updates,
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


def _strokes(updates: Updates) -> list[tuple[float, UpdateRecord]]:
    skipped = [(float(place), update) for place, update in enumerate(updates) if update.skipped]
    if len(skipped) <= STROKES:
        return skipped
    kept: dict[int, tuple[float, UpdateRecord]] = {}
    for place, update in skipped:
        kept.setdefault(int(place * STROKES / len(updates)), (place, update))
    return list(kept.values())
