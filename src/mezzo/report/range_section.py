"""Where the numbers of a run lie: exponents, shares lost, updates over weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from mezzo.core.ranges import GRADIENTS, WHAT, shift_of
from mezzo.report.charts.exponents import exponents
from mezzo.report.charts.heat import heat
from mezzo.report.charts.update_ratio import update_ratios
from mezzo.report.document import plots
from mezzo.report.markup import Markup, element
from mezzo.report.numbers import counted
from mezzo.report.ranges import FORMATS, RATIO, Ranges
from mezzo.report.run import Run

_LEAST, _MOST = -24, 32
"""The slider's ends as powers of two, moved out for a run that went further; from 1 on where no scale was below."""
# Gradients first: they are what a format loses first.
_ORDER = ("activation gradient", "weight gradient", "activation", "weight")


def ranges(runs: Sequence[Run]) -> Markup | None:
    """The section; None where no run was watched."""
    parts = [_one(run, several=len(runs) > 1) for run in runs if run.ranges]
    return element("div", parts) if parts else None


def _one(run: Run, *, several: bool) -> Markup:
    seen = run.ranges
    formats = {what: _format(seen, what) for what in WHAT}
    # An update that was not watched may have changed the scale since.
    scales = [update.loss_scale for update in run.updates] or seen.scales
    shift = shift_of(next((scale for scale in reversed(scales) if 0 < scale < math.inf), 1.0))
    figures = [exponents(what, seen.of(what), formats[what], shift, "s1") for what in _ORDER]
    maps = [
        heat(what, seen, formats[what])
        for what in ("activation gradient", "activation", "weight gradient", RATIO)
    ]
    ratios = update_ratios(seen, "s1")
    several_steps = len(seen.updates) > 1
    told = (
        f"{counted(len(seen.updates), 'watched step')}, update {seen.updates[0]:,}"
        + (f" to {seen.updates[-1]:,}" if several_steps else "")
        + f"; {counted(len(seen.tracks), 'tensor')}. Histograms are of all watched steps together; zeros are left out."
    )
    return element(
        "div",
        element("h3", run.name) if several else None,
        element("p", told, class_="note"),
        _controls(
            shift, [shift_of(scale) for scale in scales], formats["activation gradient"], maps=any(maps)
        ),
        plots(figures),
        _headed("Lost, by tensor and step", plots(maps)),
        _headed("Updates over weights", ratios),
        class_="ranges",
    )


def _headed(title: str, content: Markup | None) -> Markup | None:
    return element("div", element("h3", title), content, class_="part") if content is not None else None


def _format(seen: Ranges, what: str) -> str:
    """The low format that a kind of tensor has in the run; where it has none, that which the run computes in."""
    for kinds in ((what,), GRADIENTS, ("activation",)):
        found = Counter(track.format for kind in kinds for track in seen.of(kind) if track.format in FORMATS)
        if found:
            return found.most_common(1)[0][0]
    return FORMATS[0]


def _controls(shift: int, used: Sequence[int], format: str, *, maps: bool) -> Markup:
    """What a script brings to life: the loss scale that gradients are drawn at, and the format of the maps."""
    least = min(0, *used, shift)
    return element(
        "div",
        element(
            "label",
            "Loss scale ",
            element(
                "input",
                type="range",
                min=min(_LEAST, least) if least < 0 else 0,
                max=max(_MOST, *used, shift),
                step=1,
                value=shift,
                class_="scale",
            ),
            element("output", ""),
        ),
        element(
            "label",
            "Maps show ",
            element(
                "select",
                [element("option", name, value=name, selected=name == format) for name in FORMATS],
                class_="format",
            ),
            hidden=not maps,
        ),
        class_="controls",
        hidden=True,
    )
