"""The page of a comparison: its sections in the order in which a reader asks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

from mezzo.report.cards import card, parity_of
from mezzo.report.charts.difference import difference
from mezzo.report.charts.loss import loss_over
from mezzo.report.charts.loss_scale import loss_scale
from mezzo.report.charts.memory import memory
from mezzo.report.charts.metric import metric
from mezzo.report.charts.speed import speed
from mezzo.report.document import Section, document, empty, maybe, plots
from mezzo.report.findings import findings
from mezzo.report.gaps import gaps
from mezzo.report.glossary import COMPARISON, WATCHED, glossary
from mezzo.report.machine import machine
from mezzo.report.markup import element
from mezzo.report.numbers import count, counted, finite
from mezzo.report.ops import ops
from mezzo.report.range_section import ranges
from mezzo.report.reading import Comparison
from mezzo.report.rerun import rerun
from mezzo.report.runs import runs

# Series classes that style.css colours; a seventh candidate shares the first one's colour and keeps its name.
COLOURS = ("s1", "s2", "s3", "s4", "s5", "s6")


def render(comparison: Comparison) -> str:
    """The whole file as text. The same folder gives the same text, whenever and wherever it is made."""
    name = _name(comparison)
    verdicts = ", ".join(f"{key} {parity_of(values)}" for key, values in comparison.candidates.items())
    return document(
        title=f"{name}: {verdicts}" if verdicts else name,
        kicker="Mixed precision against FP32",
        heading=name,
        facts=_facts(comparison),
        sections=_sections(comparison),
    )


def _name(comparison: Comparison) -> str:
    started = next((run.started for run in comparison.runs if run.started), None)
    target = (
        comparison.request.get("demo")
        or comparison.request.get("target")
        or (started.script if started else "")
    )
    return PurePath(str(target)).name or comparison.directory.resolve().name


def _facts(comparison: Comparison) -> str:
    """One line under the name: how many seeds and steps, when."""
    values = list(comparison.candidates.values())
    seeds = {int(n) for n in (finite(v.get("seeds")) for v in values) if n is not None}
    steps = {int(n) for n in (finite(v.get("steps")) for v in values) if n is not None}
    words = []
    if len(seeds) == 1:
        words.append(counted(seeds.pop(), "paired seed"))
    if len(steps) == 1:
        words.append(f"{count(steps.pop())} steps a run")
    started = next((run.started for run in comparison.runs if run.started), None)
    if started:
        if started.machine.get("cpu") or started.machine.get("gpu"):
            words.append(str(started.machine.get("gpu") or started.machine.get("cpu")))
        words.append(started.started.replace("T", " ")[:16])
    return " · ".join(words)


def _sections(comparison: Comparison) -> Iterable[Section | None]:
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(comparison.candidates)}
    cards = [card(comparison, name, colour) for name, colour in colours.items()]
    yield (
        "verdict",
        "Verdict",
        element("div", cards, class_="cards") if cards else empty("No candidate was compared."),
    )
    curves = []
    for name, colour in colours.items():
        margin = gaps(comparison.candidates[name])[0].margin
        curves += [loss_over(comparison, name, colour), difference(comparison, name, colour, margin)]
    silent = [
        empty(f"{name} recorded no loss.")
        for name in colours
        if not any(len(r.losses) for r in comparison.of(name))
    ]
    yield "loss", "Loss", element("div", plots(curves), silent)
    yield maybe("metric", "Metric", plots([metric(comparison, colours)]))
    yield maybe("speed", "Speed and memory", plots([speed(comparison, colours), memory(comparison, colours)]))
    scales = [loss_scale(comparison.of(name), colour, name) for name, colour in colours.items()]
    yield maybe("scale", "Loss scale", plots(scales))
    yield maybe("findings", "What made steps fail", findings(comparison.runs))
    # A run of each precision stands for its seeds: their exponents are alike, and a page has an end.
    watched = [
        next((run for run in comparison.of(name) if run.ranges), None)
        for name in (comparison.baseline, *colours)
    ]
    yield maybe("ranges", "Ranges", ranges([run for run in watched if run is not None]))
    tables = [table for table in (ops(comparison.of(name), name) for name in colours) if table is not None]
    yield maybe("formats", "Formats", element("div", tables) if tables else None)
    yield maybe("runs", "Runs", runs(comparison.runs))
    yield maybe("machine", "Machine", machine(comparison.verdict.get("machine"), comparison.runs))
    yield "rerun", "Run it again", rerun(comparison)
    yield (
        "reading",
        "How to read this page",
        glossary(
            COMPARISON + (WATCHED if any(run.ranges or run.overflows for run in comparison.runs) else ())
        ),
    )
