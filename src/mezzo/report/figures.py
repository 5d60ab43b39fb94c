"""The charts of runs and of a comparison: loss, its difference from FP32, loss scale."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mezzo.core.comparison import final_count
from mezzo.core.overflow import OverflowReport
from mezzo.core.records import UpdateRecord
from mezzo.report import numbers
from mezzo.report.charts import Axis, Chart, Key, axis_over
from mezzo.report.numbers import counted, listed, scale_text, significant
from mezzo.report.run import Comparison, Run
from mezzo.report.series import Array, align, band, sample, smooth, window_for

CUT = 5.0  # the frame of a loss that explodes ends so many of FP32's falls above its top
SHOWN = 0.98  # the share of the smoothed differences in the frame; the first steps mostly leave it
POINTS = 160
STROKES = 200  # of more skipped updates one per bucket is drawn, and the note gives the true count
NAMED = 12
REASONS, LETTERS = 2, 60  # of skipped updates in a caption: how many, and how much of each
MARKS: tuple[Key, ...] = (
    ("skip", "tick", "skipped update"),
    ("probe", "tick", "skipped: the scale was too high"),
    ("alarm", "cross", "skipped: an alarm"),
)
Group = tuple[str, str, list[Run]]  # a precision's name, its colour, and its runs


def loss(title: str, groups: Sequence[Group]) -> Chart | None:
    """Training losses with a band over seeds, FP32's first if there are two groups; None if the last recorded none."""
    rows = [align([run.losses for run in runs if len(run.losses)]) for _, _, runs in groups]
    if not rows[-1].size:
        return None
    steps, seeds = max(part.shape[1] for part in rows), max(part.shape[0] for part in rows)
    window = window_for(steps)
    alone = len(groups) == 1 and seeds == 1
    over = f"mean over {counted(seeds, 'seed')}, " if seeds > 1 else "" if alone else "one seed, "
    y = _loss_axis(rows)
    unit = f"Loss at each backward pass, {over}{_smoothed(window)}{' Logarithmic.' * y.log}"
    chart = Chart(title, Axis(0.0, float(max(1, steps - 1))), y, unit)
    columns, described = [], []
    picks = sample(steps, POINTS)
    for (name, colour, runs), raw in zip(groups, rows):
        if not raw.size:
            chart.notes.append(f"{name} recorded no loss: there is nothing to compare with.")
            continue
        low, mean, high = band(smooth(raw, window))
        if window > 1:
            chart.line(raw[0], colour, style="raw")
        if raw.shape[0] > 1:
            chart.band(low, high, colour)
        # FP32 is drawn broad and pale under the candidate, so that both are seen where they agree.
        chart.line(mean, colour, name, style="line" if name == groups[-1][0] else "under")
        columns.append((name, _at(mean, picks)))
        chart.notes += _faults(chart, name, colour, runs, alone)
        good = mean[np.isfinite(mean)]
        if len(good):
            described.append(f"{name} goes from {significant(good[0])} to {significant(good[-1])}")
    chart.described = "; ".join(described) + "." if described else "No finite loss was recorded."
    chart.notes += _mixed([run for _, _, runs in groups for run in runs])
    if seeds > 1:
        chart.keys.append(("s0", "band", "smallest to largest seed"))
    if window > 1:
        chart.keys.append(("s0", "raw", "every step" if alone else "every step of the first seed"))
    chart.read(picks, columns)
    return chart


def _smoothed(window: int) -> str:
    return f"averaged over {window} steps." if window > 1 else "not smoothed."


def _at(values: Array, picks: Sequence[int]) -> list[float]:
    return [float(values[pick]) if pick < len(values) else math.nan for pick in picks]


def _loss_axis(rows: Sequence[Array]) -> Axis:
    base = rows[0][np.isfinite(rows[0])]
    if not len(base):
        return axis_over(rows)
    top = float(base.max())
    most = top + CUT * max(top - float(base.min()), abs(top) * 0.1)
    return axis_over([np.where(part <= most, part, np.nan) for part in rows])


def _mixed(runs: Sequence[Run]) -> list[str]:
    """A note if a curve holds losses of several kinds: a record does not say which optimizer a loss was for."""
    counts = [(len(run.losses), Counter(update.optimizer for update in run.updates)) for run in runs]
    most = max((len(one) for losses, one in counts if len(one) > 1 and losses > max(one.values())), default=0)
    note = f"{most} optimizers stepped: the curve holds the losses of all, in the order of backward."
    return [note] * (most > 0)


def _faults(chart: Chart, name: str, series: str, runs: Sequence[Run], alone: bool) -> list[str]:
    """Mark and describe where a run's loss stopped being finite, or left the frame."""
    notes = []
    for run in runs:
        who = name if alone else f"{name}, seed {run.seed}"
        bad = np.flatnonzero(~np.isfinite(run.losses))
        if len(bad):
            kind = "NaN" if np.isnan(run.losses[bad[0]]) else "infinite"
            more = f", the first of {len(bad):,} steps without a finite one" if len(bad) > 1 else ""
            notes.append(f"{who}: the loss is {kind} at step {bad[0]:,}{more}.")
            chart.cross(bad[0], series, notes[-1])
        good = np.where(np.isfinite(run.losses), run.losses, -np.inf)
        if len(good) and good.max() > chart.y.high:
            peak = int(good.argmax())
            most = f"{significant(good[peak])}, at step {peak:,}"
            notes.append(f"{who}: leaves the frame; its largest finite loss is {most}.")
    return notes


def difference(comparison: Comparison, candidate: str, series: str, margin: float | None) -> Chart | None:
    """A candidate's loss minus FP32's of the same seed, with margin and noise check; None if no seed has both."""
    runs = comparison.of(candidate)
    rows, perturbed = _paired(comparison, runs), _paired(comparison, comparison.perturbed)
    if not rows.size:
        return None
    base = align([run.losses for run in comparison.of(comparison.baseline)])
    steps = max(base.shape[1], *(len(run.losses) for run in runs))
    window = window_for(steps)
    low, mean, high = band(smooth(rows, window))
    noise = band(smooth(perturbed, window)) if perturbed.size else ()
    parts = [low, high, *noise[::2]]
    over = f"mean over {counted(len(rows), 'pair')}" if len(rows) > 1 else "one pair"
    chart = Chart(
        f"Difference: {candidate} minus FP32 of the same seed",
        Axis(0.0, float(max(1, steps - 1))),
        _difference_axis(parts, margin, smooth(base, window)),
        f"Loss difference, {over}, {_smoothed(window)}",
        described="No step has a finite loss in both runs.",
        keys=[(series, "line", f"{candidate} minus FP32")],
    )
    good = mean[np.isfinite(mean)]
    if len(good):
        told = "" if margin is None else f"; the margin is {significant(margin, 3)}"
        chart.described = f"{candidate} ends {numbers.signed(good[-1])} from FP32{told}."
    if margin is not None:
        n = rows.shape[1]
        words = f"margin ±{significant(margin, 2)}, shaded where it counts"
        chart.span(-margin, margin, float(n - final_count(n)), float(n - 1), "margin", words)
    picks = sample(steps, POINTS)
    columns = [(f"{candidate} − FP32", _at(mean, picks))]
    if noise:
        columns.append(("noise check − FP32", _at(noise[1], picks)))
        if len(perturbed) > 1:
            chart.band(noise[0], noise[2], "noise", "noise check: FP32 with weights moved by one ulp")
        else:
            chart.line(noise[1], "noise", "noise check: FP32 with weights moved by one ulp")
    chart.rule(0.0, "zero")
    if len(rows) > 1:
        chart.band(low, high, series, "smallest to largest seed")
    chart.line(mean, series)
    with np.errstate(invalid="ignore"):
        if (low < chart.y.low).any() or (high > chart.y.high).any():
            largest = significant(np.nanmax(np.abs(np.concatenate([low, high]))), 3)
            chart.notes.append(f"The curve leaves the frame in places: its largest size is {largest}.")
    chart.read(picks, columns)
    return chart


def _paired(comparison: Comparison, runs: Sequence[Run]) -> Array:
    """Loss minus FP32's of the same seed, (pairs, steps); NaN where either has none."""
    base = {run.seed: run.losses for run in comparison.of(comparison.baseline) if len(run.losses)}
    pairs = []
    for run in runs:
        if run.seed in base and len(run.losses):
            n = min(len(run.losses), len(base[run.seed]))
            with np.errstate(invalid="ignore", over="ignore"):
                pairs.append(run.losses[:n] - base[run.seed][:n])
    return align(pairs)


def _difference_axis(parts: Sequence[Array], margin: float | None, base: Array) -> Axis:
    """`SHOWN` of the differences, and the margin; never more than FP32's own fall (an exploding loss)."""
    values, falls = np.concatenate(parts), base[np.isfinite(base)]
    if len(falls) > 1 and falls.max() > falls.min():
        values = np.clip(values, falls.min() - falls.max(), falls.max() - falls.min())
    values = values[np.isfinite(values)]
    edges = [np.quantile(values, [(1 - SHOWN) / 2, (1 + SHOWN) / 2])] if len(values) else []
    if margin is not None:
        edges.append(np.array([-1.15 * margin, 1.15 * margin]))
    return axis_over(edges or [np.zeros(1)], log=False, about_zero=True)


class Track(NamedTuple):
    """The updates of one optimizer of a run; ``who`` is "" if it is the only one."""

    who: str
    updates: list[UpdateRecord]
    skipped: list[tuple[UpdateRecord, OverflowReport | None]]


def loss_scale(runs: Sequence[Run], series: str, name: str) -> Chart | None:
    """The loss scale over a precision's updates, skipped ones marked; None if none was scaled or skipped."""
    tracks = [track for run in runs for track in _tracks(run, alone=len(runs) == 1)]
    updates = [update for track in tracks for update in track.updates]
    if not any(update.skipped or update.loss_scale != 1.0 for update in updates):
        return None
    last = max(1, *(update.index for update in updates))
    scales = [u.loss_scale for u in updates if math.isfinite(u.loss_scale) and u.loss_scale > 0] or [1.0, 2.0]
    told = _summary(tracks)
    chart = Chart(
        f"Loss scale: {name}",
        Axis(-0.02 * last, 1.02 * last),  # a stroke at either end stands clear of the frame's edge
        Axis(math.log2(min(scales)) - 1, math.log2(max(scales)) + 1),
        "The factor on the loss" + (", a line for each seed and optimizer." if len(tracks) > 1 else "."),
        x_name="update",
        described=" ".join(told),
        powers=True,
        keys=[(series, "line", "loss scale")],
        notes=told,
    )
    drawn = set()
    for track in tracks:
        x, y = _corners(track)
        chart.line(y, series, style="line" if len(tracks) == 1 else "thin", x=x)
        label = f"{track.who}, " if track.who else ""
        for update, finding in _strokes(track):
            place = update.index
            kind, why = "skip", update.reason
            if finding is not None:
                kind, why = ("alarm", finding.sentence) if finding.alarms else ("probe", runs[0].too_high)
            why = f": {why}" if why else ""
            drawn.add(kind)
            chart.tick(place, kind, f"{label}update {place:,.0f} skipped{why}")
            if kind == "alarm":
                chart.cross(place, "alarm", f"{label}update {place:,.0f}{why}")
    chart.keys += [key for key in MARKS if key[0] in drawn]
    return chart


def _tracks(run: Run, *, alone: bool) -> list[Track]:
    optimizers = sorted({update.optimizer for update in run.updates})
    found = {record.update: record.finding for record in run.overflows}
    tracks = []
    for number in optimizers:
        words = ("" if alone else f"Seed {run.seed}", f"optimizer {number}" if len(optimizers) > 1 else "")
        updates = [update for update in run.updates if update.optimizer == number]
        skipped = [(update, found.get(update.index)) for update in updates if update.skipped]
        tracks.append(Track(", ".join(filter(None, words)), updates, skipped))
    return tracks


def _summary(tracks: Sequence[Track]) -> list[str]:
    """A sentence about each track; tracks with the same sentence share it."""
    said: dict[str, list[str]] = {}
    for track in tracks:
        said.setdefault(_told(track), []).append(track.who)
    return [f"{'; '.join(who)}: {one}" if any(who) else one[0].upper() + one[1:] for one, who in said.items()]


def _told(track: Track) -> str:
    skipped, updates = track.skipped, counted(len(track.updates), "update")
    if not skipped:
        return f"none of {updates} skipped."
    # In order of step. A reason may hold the loss scale and a whole overflow report, which the page shows elsewhere.
    reasons = list(dict.fromkeys(short(update.reason) for update, _ in skipped if update.reason))
    why = f" ({'; '.join(reasons[:REASONS])}{', …' * (len(reasons) > REASONS)})" if reasons else ""
    looked = [finding for _, finding in skipped if finding is not None]
    alarms = sum(finding.alarms for finding in looked)
    causes = f"; of {len(looked):,} looked into, {counted(alarms, 'alarm')}" if looked else ""
    places = listed([update.index for update, _ in skipped], NAMED)
    return (
        f"{len(skipped):,} of {updates} skipped, at {places}{why}{causes}; "
        f"the last scale is {scale_text(track.updates[-1].loss_scale)}."
    )


def short(reason: str) -> str:
    """A reason for a caption: its first clause, without the scale, which the curve shows.

    >>> short("a gradient was NaN or infinite at loss scale 65536; parameters and optimizer are as before. More")
    'a gradient was NaN or infinite'
    """
    clause = re.split(r"; |[.] | at loss scale ", reason, maxsplit=1)[0]
    return clause if len(clause) <= LETTERS else clause[: LETTERS - 1].rstrip() + "…"


def _corners(track: Track) -> tuple[Array, Array]:
    """The corners of the staircase: the updates where the scale changes, and both ends."""
    points: list[tuple[float, float]] = []
    for update in track.updates:
        scale = math.log2(update.loss_scale) if update.loss_scale > 0 else math.nan
        if not points or scale != points[-1][1]:
            points += [*((update.index, before) for _, before in points[-1:]), (update.index, scale)]
    points.append((max(1, track.updates[-1].index), points[-1][1]))
    x, y = np.array(points, dtype=float).T
    return x, y


def _strokes(track: Track) -> list[tuple[UpdateRecord, OverflowReport | None]]:
    """The skipped updates to draw: one per bucket, an alarm before any other."""
    if len(track.skipped) <= STROKES:
        return track.skipped
    kept: dict[int, tuple[UpdateRecord, OverflowReport | None]] = {}
    for update, finding in sorted(track.skipped, key=lambda one: not (one[1] and one[1].alarms)):
        kept.setdefault(update.index * STROKES // (track.updates[-1].index + 1), (update, finding))
    return sorted(kept.values(), key=lambda one: one[0].index)
