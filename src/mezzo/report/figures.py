"""The charts of runs and of a comparison: loss, its difference from FP32, loss scale, speed, memory and metric."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mezzo.core.curve import final_count
from mezzo.core.overflow import CAUSES, OverflowReport
from mezzo.core.records import UpdateRecord
from mezzo.report import numbers
from mezzo.report.charts import Axis, Bars, Chart, Key, Row, axis_over, bars, dots
from mezzo.report.comparison import Comparison
from mezzo.report.numbers import counted, finite, listed, ratio, scale_text, significant
from mezzo.report.run import Run
from mezzo.report.series import Array, align, band, sample, smooth, thin, thin_band, window_for

CUT = 5.0  # the frame of a loss that explodes ends so many of FP32's falls above its top
SHOWN = 0.98  # the share of the smoothed differences in the frame; the first steps mostly leave it
POINTS = 160
STROKES = 200  # of more skipped updates one per bucket is drawn, and the note gives the true count
NAMED = 12
ALARMS = 4
REASONS, LETTERS = 2, 60  # of skipped updates in a caption: how many, and how much of each
_SPREAD = 1000  # updates of all optimizers to one of these: beyond, an index is broken
MARKS = (
    Key("skip", "tick", "skipped update"),
    Key("probe", "tick", "skipped: the scale was too high"),
    Key("alarm", "cross", "skipped: an alarm"),
)
Group = tuple[str, str, list[Run]]  # a precision's name, its colour, and its runs


def loss(title: str, groups: Sequence[Group]) -> Chart | None:
    """Training losses, each group with its band over seeds; None where the last recorded none.

    A first group of two is what the second is held against.
    """
    rows = [align([run.losses for run in runs if len(run.losses)]) for _, _, runs in groups]
    if not rows[-1].size:
        return None
    steps, seeds = max(part.shape[1] for part in rows), max(part.shape[0] for part in rows)
    window = window_for(steps)
    alone = len(groups) == 1 and seeds == 1
    over = f"mean over {counted(seeds, 'seed')}, " if seeds > 1 else "" if alone else "one seed, "
    x, y = Axis(0.0, float(max(1, steps - 1))), _loss_axis(rows)
    unit = (
        f"Each loss that gradients were taken of, {over}{_smoothed(window)}{' Logarithmic.' if y.log else ''}"
    )
    chart = Chart(title, "", x, y, "step", unit)
    columns, described = [], []
    picks = sample(steps, POINTS)
    for (name, colour, runs), raw in zip(groups, rows):
        if not raw.size:
            chart.notes.append(f"{name} recorded no loss: there is nothing to compare with.")
            continue
        low, mean, high = band(smooth(raw, window))
        if window > 1:
            chart.line(*thin(raw[0]), series=colour, style="raw")
        if raw.shape[0] > 1:
            chart.band(*thin_band(low, high), series=colour)
        # FP32 is drawn broad and pale under the candidate, so that both are seen where they agree.
        chart.line(*thin(mean), series=colour, name=name, style="line" if name == groups[-1][0] else "under")
        columns.append((name, _at(mean, picks)))
        chart.notes += _faults(chart, name, colour, runs, alone)
        good = mean[np.isfinite(mean)]
        if len(good):
            described.append(f"{name} goes from {significant(good[0])} to {significant(good[-1])}")
    chart.described = "; ".join(described) + "." if described else "No finite loss was recorded."
    chart.notes += _mixed([run for _, _, runs in groups for run in runs])
    if seeds > 1:
        chart.keys.append(Key("s0", "band", "smallest to largest seed"))
    if window > 1:
        chart.keys.append(Key("s0", "raw", "every step" if alone else "every step of the first seed"))
    chart.read(picks, columns)
    return chart


def _smoothed(window: int) -> str:
    return f"averaged over {window} steps around." if window > 1 else "not smoothed."


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
    """That a curve holds losses of several kinds: a record tells the loss, and not which optimizer it was for."""
    counts = [(len(run.losses), Counter(update.optimizer for update in run.updates)) for run in runs]
    most = max((len(one) for losses, one in counts if len(one) > 1 and losses > max(one.values())), default=0)
    told = (
        f"{most} optimizers stepped: the curve holds every loss that gradients were taken of, one after the other, "
        "whichever optimizer it was for."
    )
    return [told] if most else []


def _faults(chart: Chart, name: str, series: str, runs: Sequence[Run], alone: bool) -> list[str]:
    """Mark, and tell in words, where a run's loss stopped being finite, or left the frame."""
    notes = []
    for run in runs:
        who = name if alone else f"{name}, seed {run.seed}"
        # A loss that was not read is a gap, and not a NaN.
        read = ~np.isin(np.arange(len(run.losses)), list(run.lost))
        bad = np.flatnonzero(read & ~np.isfinite(run.losses))
        if len(bad):
            kind = "NaN" if np.isnan(run.losses[bad[0]]) else "infinite"
            more = f", the first of {len(bad):,} steps without a finite one" if len(bad) > 1 else ""
            notes.append(f"{who}: the loss is {kind} at step {bad[0]:,}{more}.")
            chart.cross(bad[0], series, notes[-1])
        good = np.where(np.isfinite(run.losses), run.losses, -np.inf)
        if len(good) and good.max() > chart.y.high:
            peak = int(good.argmax())
            notes.append(
                f"{who}: leaves the frame; its largest finite loss is {significant(good[peak])}, at step {peak:,}."
            )
    return notes


def difference(comparison: Comparison, candidate: str, series: str, margin: float | None) -> Chart | None:
    """A candidate's loss minus FP32's of the same seed, with the margin (in the loss's own unit) and twins' noise.

    None where no seed has both runs.
    """
    runs = comparison.of(candidate)
    rows, twins = _paired(comparison, runs), _paired(comparison, comparison.twins)
    if not rows.size:
        return None
    base = align([run.losses for run in comparison.of(comparison.baseline)])
    steps = max(base.shape[1], *(len(run.losses) for run in runs))
    window = window_for(steps)
    low, mean, high = band(smooth(rows, window))
    noise = band(smooth(twins, window)) if twins.size else None
    good = mean[np.isfinite(mean)]
    described = "No step has a finite loss in both runs."
    if len(good):
        told = "" if margin is None else f"; the margin is {significant(margin, 3)}"
        described = f"{candidate} ends {numbers.signed(good[-1])} from FP32{told}."
    over = f"mean over {counted(len(rows), 'pair')}" if len(rows) > 1 else "one pair"
    chart = Chart(
        title=f"Difference: {candidate} minus FP32 of the same seed",
        described=described,
        x=Axis(0.0, float(max(1, steps - 1))),
        y=_difference_axis(
            [low, high, *([noise.low, noise.high] if noise else [])], margin, smooth(base, window)
        ),
        x_name="step",
        unit=f"Loss difference, {over}, {_smoothed(window)}",
        keys=[Key(series, "line", f"{candidate} minus FP32")],
    )
    if margin is not None:
        n = rows.shape[1]
        words = f"margin ±{significant(margin, 2)}, shaded where it counts"
        chart.span(-margin, margin, float(n - final_count(n)), float(n - 1), "margin", words)
    picks = sample(steps, POINTS)
    columns = [(f"{candidate} − FP32", _at(mean, picks))]
    if noise:
        columns.append(("twin − FP32", _at(noise.mean, picks)))
        if len(twins) > 1:
            chart.band(*thin_band(noise.low, noise.high), "noise", "FP32 twins moved by one ulp (noise)")
        else:
            chart.line(*thin(noise.mean), "noise", "FP32 twin moved by one ulp (noise)")
    chart.rule(0.0, "zero")
    if len(rows) > 1:
        chart.band(*thin_band(low, high), series=series, name="smallest to largest seed")
    chart.line(*thin(mean), series=series)
    with np.errstate(invalid="ignore"):
        if (low < chart.y.low).any() or (high > chart.y.high).any():
            largest = np.nanmax(np.abs(np.concatenate([low, high])))
            chart.notes.append(
                f"The curve leaves the frame in places: its largest size is {significant(largest, 3)}."
            )
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
    """The updates of one optimizer of a run, each with its own loss scale; ``who`` is "" where there is one alone.

    ``places`` is where they stand: at their own index among the run's, as findings and ranges name them. Those of
    several loops in one file have the same indices: they are counted. ``found`` is what was found out, by that index.
    """

    who: str
    updates: tuple[UpdateRecord, ...]
    places: list[int]
    found: Mapping[int, OverflowReport]

    @property
    def skipped(self) -> list[tuple[int, UpdateRecord, OverflowReport | None]]:
        """The skipped updates: place, record, and what was found out."""
        return [(p, u, self.found.get(u.index)) for p, u in zip(self.places, self.updates) if u.skipped]


def loss_scale(runs: Sequence[Run], series: str, name: str) -> Chart | None:
    """The loss scale over the updates of one precision's runs: skipped ones marked, alarms with their culprit.

    None where no update was scaled and none was skipped.
    """
    tracks = [track for run in runs for track in _tracks(run, alone=len(runs) == 1)]
    updates = [update for track in tracks for update in track.updates]
    if not any(update.skipped or update.loss_scale != 1.0 for update in updates):
        return None
    last = max(1, *(track.places[-1] for track in tracks))
    scales = [u.loss_scale for u in updates if math.isfinite(u.loss_scale) and u.loss_scale > 0] or [1.0, 2.0]
    told = _summary(tracks)
    chart = Chart(
        title=f"Loss scale: {name}",
        described=" ".join(told),
        x=Axis(-0.02 * last, 1.02 * last),  # a stroke at either end stands clear of the frame's edge
        y=Axis(min(scales) / 2, max(scales) * 2, log=True),
        x_name="update",
        unit="The factor on the loss" + (", a line for each seed and optimizer." if len(tracks) > 1 else "."),
        height="low",
        powers=True,
        keys=[Key(series, "line", "loss scale")],
        notes=[*told, *_culprits(tracks)],
    )
    for track in tracks:
        chart.line(*_corners(track), series=series, style="line" if len(tracks) == 1 else "thin")
        label = f"{track.who}, " if track.who else ""
        for place, update, finding in _strokes(track):
            kind, why = "skip", update.reason
            if finding is not None:
                kind, why = ("alarm", told_of(finding)) if finding.alarms else ("probe", runs[0].too_high)
            why = f": {why}" if why else ""
            chart.tick(place, kind, f"{label}update {place:,.0f} skipped{why}")
            if kind == "alarm":
                chart.cross(place, "alarm", f"{label}update {place:,.0f}{why}")
    drawn = " ".join(str(one.attributes["class"]) for one in chart.outer)
    chart.keys += [key for key in MARKS if f"tick {key.series}" in drawn]
    return chart


def told_of(finding: OverflowReport) -> str:
    """A finding in a sentence, also one whose cause only a newer version knows."""
    if finding.cause in CAUSES:
        return str(finding)
    return f"{finding.direction} of {finding.op} in {finding.module}: {finding.cause}"


def _tracks(run: Run, *, alone: bool) -> list[Track]:
    optimizers = sorted({update.optimizer for update in run.updates})
    found = {record.update: record.finding for record in run.overflows}
    tracks = []
    for number in optimizers:
        words = ("" if alone else f"Seed {run.seed}", f"optimizer {number}" if len(optimizers) > 1 else "")
        updates = tuple(update for update in run.updates if update.optimizer == number)
        places = [update.index for update in updates]
        rising = all(a < b for a, b in zip([-1, *places], places))
        if not rising or places[-1] >= _SPREAD * len(places):
            places = list(range(len(places)))
        tracks.append(Track(", ".join(filter(None, words)), updates, places, found))
    return tracks


def _culprits(tracks: Sequence[Track]) -> list[str]:
    """A sentence for each thing that made updates fail, the first few: what the marks say under the pointer."""
    places: dict[tuple[str, ...], tuple[str, str, list[int]]] = {}
    for track in tracks:
        for place, _, finding in track.skipped:
            if finding is not None and finding.alarms:
                # Later ones have other numbers in their words.
                same = places.setdefault((track.who, *finding.place), (track.who, told_of(finding), []))
                same[2].append(place)
    sentences = [
        f"{who}{', update' if who else 'Update'}{'s' if len(at) > 1 else ''} {listed(at, NAMED)}: {words}."
        for who, words, at in places.values()
    ]
    more = [f"{len(sentences) - ALARMS:,} more culprits are below."] if len(sentences) > ALARMS else []
    return sentences[:ALARMS] + more


def _summary(tracks: Sequence[Track]) -> list[str]:
    """What there is to tell of each track, with those of which the same is true told together."""
    names: dict[str, list[str]] = {}
    for track in tracks:
        names.setdefault(_told(track), []).append(track.who)
    return [
        f"{'; '.join(who)}: {what}" if any(who) else what[0].upper() + what[1:] for what, who in names.items()
    ]


def _told(track: Track) -> str:
    skipped, updates = track.skipped, counted(len(track.updates), "update")
    if not skipped:
        return f"none of {updates} skipped."
    # In order of step; each may hold the loss scale and a whole finding, which is told on its own.
    reasons = list(dict.fromkeys(short(update.reason) for _, update, _ in skipped if update.reason))
    more = ", …" if len(reasons) > REASONS else ""
    why = f" ({'; '.join(reasons[:REASONS])}{more})" if reasons else ""
    looked = [finding for _, _, finding in skipped if finding is not None]
    alarms = sum(finding.alarms for finding in looked)
    causes = f"; of {len(looked):,} looked into, {counted(alarms, 'alarm')}" if looked else ""
    return (
        f"{len(skipped):,} of {updates} skipped, at {listed([place for place, _, _ in skipped], NAMED)}{why}{causes}; "
        f"the last scale is {scale_text(track.updates[-1].loss_scale)}."
    )


def short(reason: str) -> str:
    """What fits into a caption of a reason: its first clause, without the scale, which the curve shows.

    >>> short("a gradient was NaN or infinite at loss scale 65536; parameters and optimizer are as before. More")
    'a gradient was NaN or infinite'
    """
    clause = re.split(r"; |[.] | at loss scale ", reason, maxsplit=1)[0]
    return clause if len(clause) <= LETTERS else clause[: LETTERS - 1].rstrip() + "…"


def _corners(track: Track) -> tuple[Array, Array]:
    """The steps of the staircase alone: where the scale changes, and both ends."""
    points: list[tuple[float, float]] = []
    for place, update in zip(track.places, track.updates):
        scale = update.loss_scale if update.loss_scale > 0 else math.nan
        if not points or scale != points[-1][1]:
            points += [*((place, before) for _, before in points[-1:]), (place, scale)]
    points.append((max(1, track.places[-1]), points[-1][1]))
    x, y = np.array(points, dtype=float).T
    return x, y


def _strokes(track: Track) -> list[tuple[int, UpdateRecord, OverflowReport | None]]:
    """The skipped updates to draw, of each bucket one: an alarm before any other."""
    if len(track.skipped) <= STROKES:
        return track.skipped
    kept: dict[int, tuple[int, UpdateRecord, OverflowReport | None]] = {}
    for one in sorted(track.skipped, key=lambda one: not (one[2] and one[2].alarms)):
        kept.setdefault(int(one[0] * STROKES / (track.places[-1] + 1)), one)
    return sorted(kept.values(), key=lambda one: one[0])


def speed(comparison: Comparison, colours: Mapping[str, str]) -> Bars | None:
    """Speed of a training step relative to FP32, with the interval; None where no candidate has one."""
    times = comparison.verdict.get("step_seconds")
    times = times if isinstance(times, dict) else {}

    def step(value: object) -> list[str]:
        return [] if finite(value) is None else [f"{numbers.seconds(value)} a step"]

    rows = [Row("FP32", "s0", 1.0, "1.00×", "".join(step(times.get(comparison.baseline))))]
    for name, values in comparison.candidates.items():
        found, interval = finite(values.get("speedup")), numbers.pair(values.get("speedup_interval"))
        detail = [f"{interval[0]:.2f} to {interval[1]:.2f}"] if interval else []
        detail += step(values.get("step_seconds", times.get(name)))
        rows.append(Row(name, colours[name], found, ratio(found), ", ".join(detail), interval))
    if not any(row.value for row in rows[1:]):
        return None
    unit = "Times FP32; longer is faster. The whisker is the interval."
    return bars("Speed of a training step", unit, rows, 1.0)


def memory(comparison: Comparison, colours: Mapping[str, str]) -> Bars | None:
    """Peak memory of a training step beside FP32's; None where no run recorded it and no candidate has a ratio."""
    base, peaks = comparison.peak(comparison.baseline), {name: comparison.peak(name) for name in colours}
    ratios = {name: finite(values.get("peak_memory_ratio")) for name, values in comparison.candidates.items()}
    rows = [Row("FP32", "s0", 1.0, "1.00×")]
    if base is None or not any(peaks.values()):  # ratios alone, from a folder whose run records are gone
        rows += [Row(name, colours[name], found, ratio(found)) for name, found in ratios.items()]
        return (
            bars("Peak memory", "Times FP32; shorter is smaller.", rows, 1.0)
            if any(ratios.values())
            else None
        )
    rows = [Row("FP32", "s0", base, numbers.size(base))]
    for name, found in ratios.items():
        detail = f"{ratio(found)} of FP32" if found else ""
        rows.append(Row(name, colours[name], peaks[name], numbers.size(peaks[name]), detail))
    hows = " and ".join(sorted({run.memory.how for run in comparison.runs if run.memory}))
    return bars("Peak memory of a training step", f"By {hows}; shorter is smaller.", rows, base)


def metric(comparison: Comparison, colours: Mapping[str, str]) -> Bars | None:
    """The final metric, a dot for each seed; None where no metric was found in what the script printed."""
    rows = []
    for name, colour in {comparison.baseline: "s0", **colours}.items():
        found = comparison.metrics(name)
        mean = significant(float(np.mean(list(found.values()))), 5) if found else "–"
        seeds = {f"seed {seed}": value for seed, value in found.items()}
        rows.append(Row("FP32" if name == comparison.baseline else name, colour, None, mean, dots=seeds))
    unit = "A dot for each seed; the number is their mean."
    return dots("Final metric", unit, rows) if any(row.dots for row in rows) else None
