"""Parity of a candidate precision with FP32, from paired runs: a word, and every number behind it.

The margin is declared before the runs, and the noise that they show never widens it. *Harm* is a pair's difference in
the worse direction. docs/dev/verdicts.md says what each word requires.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mezzo.core import comparison
from mezzo.core.comparison import ORDER, Comparison, Parity, compare, final_count, final_loss, window_losses
from mezzo.core.equivalence import CONFIDENCE, Floats, failure_rate_bound, paired_interval
from mezzo.core.errors import UsageError

COLLAPSE_SHARE = 0.25
COLLAPSE_SPREAD = 6.0
TAKES_OVER = "One optimizer takes over from another, as for a second model"
"""The cause begins so where an earlier optimizer's losses ended worse."""
CONSTANT = "FP32's loss is the same at every step, so it tells nothing"
"""The cause where no run learns anything that its loss shows."""


@dataclass(frozen=True)
class RunResult:
    """What a finished run is judged by; `moved` is None if no optimizer step was seen, `reruns` is of closures.

    `ends` are the numbers of losses after which a new optimizer took over from another one, as for a second model.
    """

    losses: Floats
    metric: float | None = None
    moved: int | None = None
    skipped: int = 0
    reruns: int = 0
    ends: tuple[int, ...] = ()

    @property
    def phases(self) -> list[Floats]:
        """The losses of each phase: of several in a row with too few losses the last one has all."""
        each = np.split(np.asarray(self.losses, dtype=np.float64), self.ends)
        kept = [each[-1]]
        for part in reversed(each[:-1]):
            if len(kept[0]) < comparison.LEAST:
                kept[0] = np.concatenate([part, kept[0]])
            else:
                kept.insert(0, part)
        return kept

    @property
    def last(self) -> Floats:
        """The losses of the last phase."""
        return self.phases[-1]

    @property
    def updates(self) -> int | None:
        """Optimizer steps, moved or skipped; None where none was seen."""
        return None if self.moved is None else self.moved + self.skipped

    def same_as(self, other: RunResult) -> bool:
        """Whether the losses and the metric are equal to the last bit."""
        return np.array_equal(self.losses, other.losses) and self.metric == other.metric


Runs = Mapping[int, RunResult]
"""Runs by the numbers of their seeds."""


@dataclass(frozen=True)
class Margins:
    """The largest acceptable harm: the loss's is a share of FP32's, the metric's too where `metric_relative`."""

    loss: float = 0.005
    metric: float = 0.2
    metric_higher: bool = True
    metric_relative: bool = False


@dataclass(frozen=True)
class Verdict:
    """The word for one candidate, the sentence behind it, and the comparisons that it rests on."""

    parity: Parity
    reason: str
    pairs: int  # distinct ones: bit-equal FP32 runs under different seeds are one
    loss: Comparison | None = None
    metric: Comparison | None = None
    # Of each pair its seed's number, candidate - FP32 of the final loss, and both metrics.
    differences: tuple[tuple[int, float, float | None, float | None], ...] = ()
    notes: tuple[str, ...] = ()
    cause: str = (
        ""  # what decided the word if not the final numbers: broken training, a worse earlier phase, ...
    )
    departed: str = ""  # harm in the second half, though not at the end, which alone forbids `equivalent`


class Paired(NamedTuple):
    """The runs of a comparison; `groups` has the seeds' numbers, of equal FP32 runs together."""

    baseline: Runs
    candidate: Runs
    perturbed: Runs
    groups: list[list[int]]


def judge(
    baseline: Runs, candidate: Runs, perturbed: Runs | None = None, margins: Margins | None = None
) -> Verdict:
    """The verdict on one candidate, from FP32's runs and the candidate's.

    `perturbed`: FP32 runs whose initial weights were moved by one ulp, the noise floor. Raises UsageError for no pair.
    """
    margins = margins or Margins()
    perturbed = dict(perturbed or {})
    numbers = sorted(set(baseline) & set(candidate))
    if not numbers:
        raise UsageError(
            "no pair of runs to compare: FP32 and the candidate share no seed. Run both with the same seeds."
        )
    broken = _broken(baseline, {k: candidate[k] for k in numbers})
    notes = _notes(baseline, candidate, numbers)
    length = _length([*baseline.values(), *perturbed.values()], baseline, candidate)
    groups = _groups({k: baseline[k] for k in numbers})
    if len(groups) < len(numbers):
        notes.append(
            f"{len(numbers)} seeds gave {len(groups)} distinct FP32 run{'s' * (len(groups) > 1)}: the result of the "
            "script does not depend on the seed, so equal runs are counted once."
        )
    if broken:
        return Verdict(Parity.DIVERGENT, broken, len(groups), notes=tuple(notes), cause=broken)
    perturbed = {k: one for k, one in perturbed.items() if k in baseline and not one.same_as(baseline[k])}

    firsts = [group[0] for group in groups]
    runs = Paired(baseline, candidate, perturbed, groups)
    loss, learned = _final_loss(runs, margins.loss)
    base_metrics, our_metrics = (
        {k: float(value) for k in numbers if (value := its[k].metric) is not None}
        for its in (baseline, candidate)
    )
    metric = None
    if len(base_metrics) == len(our_metrics) == len(numbers):
        base_metric = np.array([base_metrics[k] for k in firsts])
        our_metric = np.array([np.mean([our_metrics[k] for k in group]) for group in groups])
        size = margins.metric * (abs(float(base_metric.mean())) if margins.metric_relative else 1.0)
        moved = [(one.metric, baseline[k].metric) for k, one in perturbed.items()]
        gaps = [one - other for one, other in moved if one is not None and other is not None]
        worse = -1.0 if margins.metric_higher else 1.0
        metric = compare("metric", base_metric, our_metric, worse, size, gaps, comparison.COARSE * size)
    loss_gaps = {k: final_loss(candidate[k].last) - final_loss(baseline[k].last) for k in numbers}
    differences = tuple(
        (k, loss_gaps[k], *((our_metrics[k], base_metrics[k]) if metric else (None, None))) for k in numbers
    )
    parts = [loss] if metric is None else [loss, metric]
    parity = max((part.parity for part in parts), key=ORDER.index)
    plan = length is None and not 1 == len(groups) < len(numbers)  # more pairs of equal runs prove nothing
    reason = " ".join(comparison.sentence(part, plan) for part in parts)
    cause = _collapse(runs, learned)
    departed = ""
    if cause:
        parity, reason = Parity.DIVERGENT, cause
    elif parity is not Parity.DIVERGENT and metric is None and all(map(_is_flat, baseline.values())):
        cause = CONSTANT
        parity, reason = Parity.INCONCLUSIVE, f"{cause}. {reason}"
    elif parity in (Parity.EQUIVALENT, Parity.CONSISTENT) and (cause := _earlier_phase(runs, margins.loss)):
        parity, reason = Parity.INCONCLUSIVE, f"{cause} {reason}"
    elif parity is Parity.EQUIVALENT and (departed := _departure(runs, margins.loss)):
        parity, reason = (
            Parity.CONSISTENT,
            f"The final losses are equivalent. {departed}: not called equivalent.",
        )
    if length is not None:
        cause = cause or length[1] * (length[0] is Parity.DIVERGENT or parity is not Parity.DIVERGENT)
        parity, reason = max(parity, length[0], key=ORDER.index), f"{length[1]} {reason}"
    if parity is Parity.EQUIVALENT:
        rare = f"in fewer than {100 * failure_rate_bound(len(groups)):.0f} % of the seeds (95 % confidence)"
        notes.append(f"{len(groups)} pairs of runs cannot exclude failures that occur {rare}.")
    return Verdict(parity, reason, len(groups), loss, metric, differences, tuple(notes), cause, departed)


def _broken(baseline: Runs, candidate: Runs) -> str:
    """Why the candidate's training broke outright, in words; empty where it did not."""
    for k, run in sorted(candidate.items()):
        losses = np.asarray(run.losses, dtype=np.float64)
        if not losses.size:
            return f"With seed {k} it recorded no loss; FP32 recorded {len(baseline[k].losses)}."
        bad = np.flatnonzero(~np.isfinite(losses))
        per_update = max(1.0, losses.size / (run.updates or losses.size))
        if bad.size > run.skipped * per_update or not np.isfinite(final_loss(losses)):
            return (
                f"With seed {k} its loss is {losses[bad[0]]} from step {bad[0]} on "
                f"({bad.size} of {losses.size} losses)."
            )
        if run.moved == 0 and baseline[k].moved:
            return (
                f"With seed {k} no optimizer step changed the weights ({run.skipped} steps were skipped); in FP32 "
                "they changed."
            )
        if run.metric is not None and not np.isfinite(run.metric):
            return f"With seed {k} its metric is {run.metric}."
    return ""


def _length(fp32: Sequence[RunResult], baseline: Runs, candidate: Runs) -> tuple[Parity, str] | None:
    """The best word left to a candidate whose run is not as long as FP32's, and why; None where all are.

    FP32's own runs may differ (early stopping): a candidate may differ by as much again on either side, down to half
    of the shortest. A skipped step explains missing losses of its closure, or one step's losses more. A run without
    any of the last tenth (of the updates, or of the losses if no optimizer was seen) ended early.
    """
    worst = None
    for k in sorted(set(baseline) & set(candidate)):
        one, pair = candidate[k], baseline[k]
        said = f"It recorded {_counts(one)} with seed {k}; FP32 recorded {_counts(pair)}"
        each = -(-len(pair.losses) // max(1, pair.updates or len(pair.losses)))  # losses of one update
        more = each * one.skipped + one.reruns
        rows = [(len(one.losses), [len(run.losses) for run in fp32], (each - 1) * one.skipped, more)]
        if one.updates is not None and pair.updates is not None:
            rows += [(one.updates, [run.updates for run in fp32 if run.updates is not None], 0, one.skipped)]
        for count, its, less, more in rows:
            spread = max(its) - min(its)
            low, high = max(min(its) - spread, min(its) // 2) - less, max(its) + spread + more
            if count < low and count <= low - final_count(low) and its is rows[-1][1]:
                return Parity.DIVERGENT, f"{said}: it ended early."
            if not low <= count <= high:
                worst = (
                    Parity.INCONCLUSIVE,
                    f"{said}. Skipped steps and the spread of FP32's own runs do not explain it.",
                )
        if one.metric is None and pair.metric is not None:
            worst = Parity.INCONCLUSIVE, f"It printed no metric with seed {k}; FP32 did."
    return worst


def _counts(run: RunResult) -> str:
    return f"{len(run.losses)} losses" + (f" and {run.updates} updates" if run.updates is not None else "")


def _notes(baseline: Runs, candidate: Runs, numbers: list[int]) -> list[str]:
    notes = []
    for k in numbers:
        fp32, ours = len(baseline[k].losses), len(candidate[k].losses)
        if fp32 != ours:
            notes.append(f"seed {k}: {ours} losses, {fp32} in FP32; the last tenth of each run was compared.")
        bad = int(np.count_nonzero(~np.isfinite(candidate[k].losses)))
        if bad:
            notes.append(f"seed {k}: {bad} losses were NaN or infinite; their steps were skipped.")
    return notes


def _groups(runs: Runs) -> list[list[int]]:
    """Numbers of runs that are equal to the last bit, together."""
    groups: list[list[int]] = []
    for k in sorted(runs):
        home = next((group for group in groups if runs[group[0]].same_as(runs[k])), None)
        if home is None:
            groups.append([k])
        else:
            home.append(k)
    return groups


def _is_flat(run: RunResult) -> bool:
    return len(run.losses) > 1 and not np.ptp(run.losses)


def _final_loss(runs: Paired, margin: float, phase: int = -1) -> tuple[Comparison, float]:
    """The final loss of a phase, compared; and what FP32 has learned by then."""
    base, ours = runs.baseline, runs.candidate
    base_end = np.array([final_loss(base[group[0]].phases[phase]) for group in runs.groups])
    ends = np.array([np.mean([final_loss(ours[k].phases[phase]) for k in group]) for group in runs.groups])
    starts = [comparison.start_loss(base[group[0]].losses) for group in runs.groups]
    learned = float(np.mean(starts) - base_end.mean())
    size = margin * abs(float(base_end.mean()))
    ulp_gaps = [
        gap
        for k, one in runs.perturbed.items()
        for gap in _late_gaps(base[k].phases[phase], one.phases[phase])
    ]
    share = comparison.COARSE_SHARE * learned
    coarse = max(comparison.COARSE * size, share)
    return compare("final loss", base_end, ends, 1.0, size, ulp_gaps, coarse, share), learned


def _earlier_phase(runs: Paired, margin: float) -> str:
    """Harm at the end of a phase before the last, in words; empty if there is none, or runs have other phases."""
    every = [*runs.baseline.values(), *runs.candidate.values(), *runs.perturbed.values()]
    count = len(every[0].phases)
    if any(len(run.phases) != count for run in every):
        return ""
    for phase in range(count - 1):
        loss, _ = _final_loss(runs, margin, phase)
        if loss.parity is Parity.DIVERGENT:
            ended = f"{loss.candidate:.5g} (FP32 {loss.baseline:.5g})"
            return f"{TAKES_OVER}. Phase {phase + 1} of {count} ended worse, with loss {ended}; the last one did not."
    return ""


def _late_gaps(run: Floats, other: Floats) -> list[float]:
    """Differences of the two runs' windows in the second half: several draws of the noise from one pair."""
    n = min(len(run), len(other))
    gaps = window_losses(other[:n]) - window_losses(run[:n])
    late: list[float] = gaps[len(gaps) // 2 :].tolist()
    return late


def _collapse(runs: Paired, learned: float) -> str:
    """A single run that ended far above every FP32 run, which makes the t interval too wide to establish harm."""
    for what, read in (("last tenth", final_loss), ("very end", comparison.tail_loss)):
        ends = {k: read(run.last) for k, run in runs.baseline.items()}
        all_ends = [*ends.values(), *(read(one.last) for one in runs.perturbed.values())]
        spread = max(all_ends) - min(all_ends)
        size = max(learned, 0.1 * abs(float(np.mean(all_ends))))
        for k in sorted(set(runs.baseline) & set(runs.candidate)):
            end = read(runs.candidate[k].last)
            harm = end - ends[k]
            if not harm <= max(COLLAPSE_SHARE * size, COLLAPSE_SPREAD * spread):  # NaN counts as collapse
                return (
                    f"With seed {k} its loss in the {what} is {end:.4g} (FP32 {ends[k]:.4g}): "
                    f"it lost {100 * harm / size:.0f} % of what FP32 learned. FP32's own runs lie within {spread:.3g}."
                )
    return ""


def _departure(runs: Paired, margin: float) -> str:
    """Harm established in a window of the second half though the ends agree: it forbids `equivalent`."""
    rows = []
    for k in (group[0] for group in runs.groups):
        fp32, ours = runs.baseline[k].last, runs.candidate[k].last
        n = min(len(fp32), len(ours))
        fp32, ours = window_losses(fp32[:n]), window_losses(ours[:n])
        rows.append(np.stack([fp32, ours - fp32]))
    count = min(row.shape[1] for row in rows)
    stack = np.stack([row[:, :count] for row in rows], axis=-1)[:, count // 2 : -1]  # [2, windows, pairs]
    if not stack.shape[1]:
        return ""
    low, _ = paired_interval(stack[1], 1 - (1 - CONFIDENCE) / stack.shape[1])
    allowed = margin * np.abs(stack[0].mean(axis=-1))
    over = np.flatnonzero(~(low <= allowed))
    if not over.size:
        return ""
    window = int(over[0]) + count // 2
    return (
        f"Between {100 * window / count:.0f} and {100 * (window + 1) / count:.0f} % of the run the loss was higher "
        f"than FP32's by {stack[1][over[0]].mean():.3g}, more than the margin, though not at the end"
    )
