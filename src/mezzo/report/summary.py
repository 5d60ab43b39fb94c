"""A run in a few numbers: what it was, how it went, what it had to leave out."""

from __future__ import annotations

import numpy as np

from mezzo.report.charts.axis import scale_text
from mezzo.report.findings import lasting
from mezzo.report.markup import Markup, element
from mezzo.report.numbers import count, counted, seconds, significant, size
from mezzo.report.run import Run
from mezzo.report.runs import exited


def summary(run: Run, *, several: bool) -> Markup:
    """The card of one run, with its name where there are several: those under one policy look alike."""
    alarms = [record for record in run.overflows if record.finding.alarms]
    skipped = len(run.skipped)
    good = run.losses[np.isfinite(run.losses)]
    stats = [
        _stat(
            "Updates", count(len(run.updates)), f"{counted(run.recorded_losses, 'loss', 'losses')} recorded"
        ),
        _stat("Skipped", count(skipped), _skips(run, len(alarms))),
        _stat(
            "Last loss",
            significant(run.losses[-1]) if len(run.losses) else "–",
            f"first {significant(good[0])}, smallest {significant(good.min())}"
            if len(good)
            else "none finite",
        ),
    ]
    scales = [update.loss_scale for update in run.updates]
    if any(scale != 1.0 for scale in scales):
        stats.append(
            _stat(
                "Loss scale",
                scale_text(scales[-1]),
                f"{scale_text(min(scales))} to {scale_text(max(scales))}",
            )
        )
    if run.memory:
        stats.append(_stat("Peak memory", size(run.memory.peak_bytes), f"by {run.memory.how}"))
    if run.ended:
        stats.append(_stat("Time", seconds(run.ended.seconds), f"ended {exited(run.ended.status)}"))
    if run.ranges:
        stats.append(
            _stat(
                "Watched",
                count(len(run.ranges.updates)),
                f"{counted(len(run.ranges.tracks), 'tensor')} in each step",
            )
        )
    names = [run.name] if several or not run.started else []
    heading = element("h3", ": ".join([*names, *([run.ran_by] if run.started else [])]))
    alone = (
        element(
            "p",
            f"The script was left to its own precision in place of {run.precision}: {run.left_alone}.",
            class_="reason",
        )
        if run.left_alone
        else None
    )
    fault = element("p", run.fault, class_="reason bad") if run.fault else None
    return element(
        "article",
        element("header", heading),
        fault,
        alone,
        element("dl", stats, class_="stats"),
        class_="card" + (" p-divergent" if run.failed or alarms or (run.overflows and lasting(run)) else ""),
    )


def _skips(run: Run, alarms: int) -> str:
    if not run.skipped:
        return "none"
    if not run.overflows:
        return "not looked into"
    probing = len(run.overflows) - alarms
    which = "constant loss scale that is too large" if run.constant_scale is not None else "scale too high"
    told = [counted(alarms, "alarm")] if alarms or not probing else []
    return ", ".join([*told, f"{probing:,} by a {which}"] if probing else told)


def _stat(term: str, value: str, detail: str) -> Markup:
    return element("div", element("dt", term), element("dd", element("b", value), element("span", detail)))
