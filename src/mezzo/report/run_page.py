"""The page of a single run (or of several without a verdict): what it did, and what was seen in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath

from mezzo.report.charts.loss import loss
from mezzo.report.charts.loss_scale import loss_scale
from mezzo.report.document import Section, document, empty, maybe, plots
from mezzo.report.findings import findings
from mezzo.report.glossary import RUN, glossary
from mezzo.report.machine import machine
from mezzo.report.markup import element
from mezzo.report.ops import ops
from mezzo.report.range_section import ranges
from mezzo.report.run import Run
from mezzo.report.runs import notes
from mezzo.report.summary import summary

COLOURS = ("s1", "s2", "s3", "s4", "s5", "s6")


def render_runs(runs: Sequence[Run], place: str) -> str:
    """The whole file as text.

    Args:
        runs: at least one.
        place: the name of their folder or file, for a run that does not say which script it is.
    """
    started = next((run.started for run in runs if run.started), None)
    name = PurePath(started.script).name if started else place
    policies = list(dict.fromkeys(run.ran_by for run in runs if run.started))
    words = [*policies]
    if started:
        words.append(str(started.machine.get("gpu") or started.machine.get("cpu") or ""))
        words.append(started.started.replace("T", " ")[:16])
    return document(
        title=f"{name}: {', '.join(policies)}" if policies else name,
        kicker="A training run" if len(runs) == 1 else "Training runs",
        heading=name,
        facts=" · ".join(word for word in words if word),
        sections=_sections(runs),
    )


def _sections(runs: Sequence[Run]) -> Iterable[Section | None]:
    coloured = [(run, COLOURS[i % len(COLOURS)]) for i, run in enumerate(runs)]
    several = len(runs) > 1
    names = {run.name: run.name if several or not run.started else run.ran_by for run in runs}
    yield (
        "run",
        "The run" if not several else "The runs",
        element("div", [summary(run, several=several) for run in runs], class_="cards"),
    )
    curves = [
        loss(f"Loss: {names[run.name]}", [(names[run.name], colour, [run])]) for run, colour in coloured
    ]
    yield "loss", "Loss", plots(curves) or empty("No loss was recorded.")
    scales = [loss_scale([run], colour, names[run.name]) for run, colour in coloured]
    yield maybe("scale", "Loss scale", plots(scales))
    yield maybe("findings", "What made steps fail", findings(runs))
    yield maybe("ranges", "Ranges", ranges([run for run in runs if run.ranges]))
    tables = [table for table in (ops([run], names[run.name]) for run in runs) if table is not None]
    yield maybe("formats", "Formats", element("div", tables) if tables else None)
    told = notes(runs)
    yield maybe("notes", "Notes", element("div", told, class_="found") if told else None)
    yield maybe("machine", "Machine", machine(None, runs))
    yield "reading", "How to read this page", glossary(RUN)
