"""The page: its sections in the order in which a reader asks, and the head that keeps it self-contained.

A content policy in the head forbids every request and every script but the one shipped here, named by its
hash: should an escape ever be missed, what slipped through would still be inert.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import PurePath

from mezzo.core.version import VERSION
from mezzo.report.cards import card, parity_of
from mezzo.report.charts.difference import difference
from mezzo.report.charts.loss import loss
from mezzo.report.charts.loss_scale import loss_scale
from mezzo.report.charts.memory import memory
from mezzo.report.charts.metric import metric
from mezzo.report.charts.speed import speed
from mezzo.report.gaps import gaps
from mezzo.report.glossary import glossary
from mezzo.report.machine import machine
from mezzo.report.markup import Markup, element
from mezzo.report.numbers import count, counted, finite
from mezzo.report.ops import ops
from mezzo.report.reading import Comparison
from mezzo.report.rerun import rerun
from mezzo.report.runs import runs

# Series classes that style.css colours; a seventh candidate shares the first one's colour and keeps its name.
COLOURS = ("s1", "s2", "s3", "s4", "s5", "s6")


def render(comparison: Comparison) -> str:
    """The whole file as text. The same folder gives the same text, whenever and wherever it is made."""
    style, script = _packaged("style.css"), _packaged("script.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    name = _name(comparison)
    verdicts = ", ".join(f"{key} {parity_of(values)}" for key, values in comparison.candidates.items())
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        # An icon of nothing: without one a browser would ask a server for /favicon.ico.
        element("link", rel="icon", href="data:,"),
        element("title", f"{name}: {verdicts}" if verdicts else name),
        element("style", style),
    )
    sections = [section for section in _sections(comparison) if section is not None]
    links = [element("a", title, href=f"#{anchor}") for anchor, title, _ in sections]
    toggle = element("button", "Dark", type="button", id="theme", hidden=True)
    body = element(
        "body",
        element(
            "header",
            element(
                "div",
                element("p", "Mixed precision against FP32", class_="kicker"),
                element("h1", name),
                _facts(comparison),
            ),
            element("nav", links, toggle, aria_label="Sections"),
            class_="top",
        ),
        element("main", [_section(*section) for section in sections]),
        element(
            "footer", element("p", f"Made by Mezzo {VERSION} from the run records in this file's folder.")
        ),
        element("script", script),
    )
    return "<!doctype html>\n" + element("html", head, body, lang="en") + "\n"


def _packaged(name: str) -> Markup:
    """A file shipped beside this one; it must not hold what would end its own element."""
    text = files("mezzo.report").joinpath(name).read_text(encoding="utf-8")
    if "</" in text:
        raise ValueError(f"{name} holds '</', which would end its element in the page")
    return Markup(text)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _name(comparison: Comparison) -> str:
    started = next((run.started for run in comparison.runs if run.started), None)
    target = (
        comparison.request.get("demo")
        or comparison.request.get("target")
        or (started.script if started else "")
    )
    return PurePath(str(target)).name or comparison.directory.resolve().name


def _facts(comparison: Comparison) -> Markup:
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
    return element("p", " · ".join(words), class_="facts-line")


Section = tuple[str, str, Markup]


def _sections(comparison: Comparison) -> Iterable[Section | None]:
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(comparison.candidates)}
    cards = [card(comparison, name, colour) for name, colour in colours.items()]
    yield (
        "verdict",
        "Verdict",
        element("div", cards, class_="cards") if cards else _empty("No candidate was compared."),
    )
    curves = []
    for name, colour in colours.items():
        margin = gaps(comparison.candidates[name])[0].margin
        curves += [loss(comparison, name, colour), difference(comparison, name, colour, margin)]
    silent = [
        _empty(f"{name} recorded no loss.")
        for name in colours
        if not any(len(r.losses) for r in comparison.of(name))
    ]
    yield "loss", "Loss", element("div", _plots(curves, "plots"), silent)
    yield _maybe("metric", "Metric", _plots([metric(comparison, colours)], "plots"))
    yield _maybe(
        "speed",
        "Speed and memory",
        _plots([speed(comparison, colours), memory(comparison, colours)], "plots"),
    )
    yield _maybe(
        "scale", "Loss scale", _plots([loss_scale(comparison, n, c) for n, c in colours.items()], "plots")
    )
    tables = [table for table in (ops(comparison, name) for name in colours) if table is not None]
    yield _maybe("formats", "Formats", element("div", tables) if tables else None)
    yield _maybe("runs", "Runs", runs(comparison))
    yield _maybe("machine", "Machine", machine(comparison))
    yield "rerun", "Run it again", rerun(comparison)
    yield "reading", "How to read this page", glossary()


def _plots(figures: Iterable[Markup | None], style: str) -> Markup | None:
    kept = [figure for figure in figures if figure is not None]
    return element("div", kept, class_=style) if kept else None


def _maybe(anchor: str, title: str, content: Markup | None) -> Section | None:
    return None if content is None else (anchor, title, content)


def _section(anchor: str, title: str, content: Markup) -> Markup:
    return element("section", element("h2", title), content, id=anchor)


def _empty(text: str) -> Markup:
    return element("p", text, class_="note")
