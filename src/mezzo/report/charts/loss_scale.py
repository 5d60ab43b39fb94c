"""The loss scale over a run's updates: every skipped one marked, those that are alarms with their culprit."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from mezzo.core.finding import Finding
from mezzo.core.records import UpdateRecord
from mezzo.report.charts.axis import Axis, scale_text
from mezzo.report.charts.frame import Frame, Key
from mezzo.report.findings import told, too_high
from mezzo.report.markup import Markup
from mezzo.report.numbers import counted
from mezzo.report.run import Run
from mezzo.report.series import Array

# More strokes than this would be a wall of colour: one a bucket is drawn, and the note gives the true count.
STROKES = 200
_SPREAD = 1000  # updates of all optimizers to one of these: beyond, an index is broken
NAMED = 12
ALARMS = 4
REASONS, LETTERS = 2, 60
"""Of the reasons of skipped updates, how many a caption has, and how much of each."""

Updates = tuple[UpdateRecord, ...]
Found = dict[int, Finding]
"""Index of an update -> what was found out about it."""


def loss_scale(runs: Sequence[Run], series: str, name: str) -> Markup | None:
    """The figure, or None where no update was scaled and none was skipped.

    Args:
        runs: of one precision.
        series: the class of its colour.
        name: of the precision.
    """
    tracks = [track for run in runs for track in _tracks(run, alone=len(runs) == 1)]
    updates = [update for _, track, _ in tracks for update in track]
    if not any(update.skipped or update.loss_scale != 1.0 for update in updates):
        return None
    steps = max(stands(track)[-1] + 1 for _, track, _ in tracks)
    scale = too_high(runs[0])
    scales = [u.loss_scale for u in updates if math.isfinite(u.loss_scale) and u.loss_scale > 0]
    low, high = (min(scales), max(scales)) if scales else (1.0, 2.0)
    told = _grouped(tracks)
    # A stroke at the first or the last update stands clear of the frame's edge.
    room = 0.02 * max(1, steps - 1)
    frame = Frame(
        title=f"Loss scale: {name}",
        described=" ".join(told),
        x=Axis(-room, max(1, steps - 1) + room),
        y=Axis(low / 2, high * 2, log=True),
        x_name="update",
        y_name="The factor on the loss"
        + (", a line for each seed and optimizer." if len(tracks) > 1 else "."),
        height="low",
        powers=True,
    )
    drawn = set()
    for who, track, found in tracks:
        frame.line(*_corners(track), series=series, style="line" if len(tracks) == 1 else "thin")
        for place, update in _strokes(track, found):
            kind, words = _mark(update, found.get(update.index), scale)
            label = f"{who}, " if who else ""
            frame.tick(place, kind, f"{label}update {place:,.0f} skipped{words}")
            if kind == "alarm":
                frame.mark(place, float("inf"), "alarm", f"{label}update {place:,.0f}{words}", shape="cross")
            drawn.add(kind)
    frame.keys.append(Key(series, "line", "loss scale"))
    for kind, shape, words in (
        ("skip", "tick", "skipped update"),
        ("probe", "tick", "skipped: the scale was too high"),
        ("alarm", "cross", "skipped: an alarm"),
    ):
        if kind in drawn:
            frame.keys.append(Key(kind, shape, words))
    frame.notes += told + _culprits(tracks)
    return frame.render()


def stands(track: Updates) -> list[int]:
    """Where the updates of one optimizer stand: at their own index among the run's, as findings and ranges name them.

    Those of several loops in one file have the same indices: they are counted.
    """
    found = [update.index for update in track]
    rising = all(a < b for a, b in zip([-1, *found], found))
    return found if rising and found[-1] < _SPREAD * len(found) else list(range(len(found)))


def _culprits(tracks: Sequence[tuple[str, Updates, Found]]) -> list[str]:
    """A sentence for each thing that made updates fail, the first few: what the marks say under the pointer."""
    places: dict[tuple[str, ...], tuple[str, str, list[int]]] = {}
    for who, track, found in tracks:
        for place, update in zip(stands(track), track):
            finding = found.get(update.index) if update.skipped else None
            if finding is not None and finding.alarms:
                # Later ones have other numbers in their words.
                same = places.setdefault((who, *finding.place), (who, told(finding), []))
                same[2].append(place)
    sentences = []
    for who, words, updates in places.values():
        named = ", ".join(f"{place:,}" for place in updates[:NAMED]) + (", …" if len(updates) > NAMED else "")
        whose = f"{who}, update" if who else "Update"
        sentences.append(f"{whose}{'s' if len(updates) > 1 else ''} {named}: {words}.")
    more = [f"{len(sentences) - ALARMS:,} more culprits are below."] if len(sentences) > ALARMS else []
    return sentences[:ALARMS] + more


def _mark(update: UpdateRecord, finding: Finding | None, scale: str) -> tuple[str, str]:
    """The class of a skipped update's stroke, and what to say of it; `scale` where the loss scale was too high."""
    if finding is None:
        return "skip", f": {update.reason}" if update.reason else ""
    if not finding.alarms:
        return "probe", f": {scale}"
    return "alarm", f": {told(finding)}"


def _tracks(run: Run, *, alone: bool) -> list[tuple[str, Updates, Found]]:
    """The updates of each optimizer of a run, with what to call them: each has a scale of its own."""
    numbers = sorted({update.optimizer for update in run.updates})
    found = {record.update: record.finding for record in run.overflows}
    tracks = []
    for number in numbers:
        words = ([] if alone else [f"Seed {run.seed}"]) + (
            [f"optimizer {number}"] if len(numbers) > 1 else []
        )
        track = tuple(update for update in run.updates if update.optimizer == number)
        tracks.append((", ".join(words), track, found))
    return tracks


def _grouped(tracks: list[tuple[str, Updates, Found]]) -> list[str]:
    """What there is to tell of each track, with those of which the same is true told together."""
    names: dict[str, list[str]] = {}
    for name, track, found in tracks:
        names.setdefault(_told(track, found), []).append(name)
    return [
        f"{'; '.join(who)}: {what}" if any(who) else f"{what[0].upper()}{what[1:]}"
        for what, who in names.items()
    ]


def _told(track: Updates, found: Found) -> str:
    skipped = [place for place, update in zip(stands(track), track) if update.skipped]
    if not skipped:
        return f"none of {counted(len(track), 'update')} skipped."
    named = ", ".join(f"{place:,}" for place in skipped[:NAMED]) + (", …" if len(skipped) > NAMED else "")
    # In order of step; each may hold the loss scale and a whole finding, which is told on its own.
    reasons = list(
        dict.fromkeys(_short(update.reason) for update in track if update.skipped and update.reason)
    )
    more = ", …" if len(reasons) > REASONS else ""
    why = f" ({'; '.join(reasons[:REASONS])}{more})" if reasons else ""
    looked = [found[update.index] for update in track if update.skipped and update.index in found]
    alarms = sum(finding.alarms for finding in looked)
    causes = f"; of {len(looked):,} looked into, {counted(alarms, 'alarm')}" if looked else ""
    return (
        f"{len(skipped):,} of {counted(len(track), 'update')} skipped, "
        f"at {named}{why}{causes}; "
        f"the last scale is {scale_text(track[-1].loss_scale)}."
    )


def _short(reason: str) -> str:
    """What fits into a caption of a reason: its first clause, without the scale, which the curve shows.

    >>> _short("a gradient was NaN or infinite at loss scale 65536; parameters and optimizer are as before. More")
    'a gradient was NaN or infinite'
    """
    clause = re.split(r"; |[.] | at loss scale ", reason, maxsplit=1)[0]
    return clause if len(clause) <= LETTERS else clause[: LETTERS - 1].rstrip() + "…"


def _corners(updates: Updates) -> tuple[Array, Array]:
    """The steps of the staircase alone: where the scale changes, and both ends."""
    xs: list[float] = []
    ys: list[float] = []
    at = stands(updates)
    for place, update in zip(at, updates):
        scale = update.loss_scale if update.loss_scale > 0 else math.nan
        if ys and scale != ys[-1]:
            xs.append(float(place))
            ys.append(ys[-1])
        if not ys or scale != ys[-1]:
            xs.append(float(place))
            ys.append(scale)
    xs.append(float(max(1, at[-1])))
    ys.append(ys[-1])
    return np.array(xs), np.array(ys)


def _strokes(updates: Updates, found: Found) -> list[tuple[float, UpdateRecord]]:
    """The skipped updates to draw, of each bucket one: an alarm before any other."""
    at = stands(updates)
    skipped = [(float(place), update) for place, update in zip(at, updates) if update.skipped]
    if len(skipped) <= STROKES:
        return skipped

    def alarms(update: UpdateRecord) -> bool:
        return update.index in found and found[update.index].alarms

    kept: dict[int, tuple[float, UpdateRecord]] = {}
    for place, update in skipped:
        bucket = int(place * STROKES / (at[-1] + 1))
        if bucket not in kept or (alarms(update) and not alarms(kept[bucket][1])):
            kept[bucket] = (place, update)
    return list(kept.values())
