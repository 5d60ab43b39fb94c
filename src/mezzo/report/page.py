"""The page as a file: what the templates are given, and how they escape it.

Names, arguments, reasons and logs come from code that Mezzo did not write. The templates escape every value, and
`_shown` makes control characters visible. A content policy in the head forbids every request and every script but the
one shipped here, named by its hash: an escape that was missed would still be inert.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import Any

import jinja2
from markupsafe import Markup, escape

from mezzo.core.finding import Finding
from mezzo.core.records import OverflowRecord, RunStarted
from mezzo.core.remedies import of_constant_scale
from mezzo.core.version import VERSION
from mezzo.report import charts, figures, numbers
from mezzo.report.comparison import Comparison, command_line
from mezzo.report.numbers import count, counted, finite, listed, percent, printable, significant, size
from mezzo.report.range_figures import range_figures
from mezzo.report.run import Run

COLOURS = ("s1", "s2", "s3", "s4", "s5", "s6")
"""Classes that style.css colours; a seventh candidate shares the first one's colour and keeps its name."""
PARITY = {
    "equivalent": ("M3 8.5L6.5 12L13 4.5", "The gap's whole interval lies within the margin."),
    "consistent": (
        "M2.5 6.5C5 4 6.5 8 8 6.5S11 5 13.5 6.5M2.5 10.5C5 8 6.5 12 8 10.5S11 9 13.5 10.5",
        "No harm seen, with fewer pairs than would prove its absence.",
    ),
    "inconclusive": (
        "M5.5 6A2.5 2.5 0 1 1 8.9 8.3C8.2 8.6 8 9 8 9.8M8 12.6V12.7",
        "The runs cannot tell; more seeds may.",
    ),
    "divergent": (
        "M4 4L12 12M12 4L4 12",
        "The result differs from FP32 by more than the margin, or training broke.",
    ),
}
"""Parity word -> its icon's path in a 16-unit square, and the word in one line. Colour never stands alone."""
RULES = {
    "lower": "computed in the 16-bit format",
    "fp32": "computed in FP32",
    "internal_fp32": "16 bits in and out, FP32 inside",
    "promote": "computed in the widest input's format",
    "banned": "refused in this format",
}


def render(comparison: Comparison) -> str:
    """The page of a comparison. The same folder gives the same text, whenever and wherever it is made."""
    request, runs, candidates = comparison.request, comparison.runs, comparison.candidates
    started = next((run.started for run in runs if run.started), None)
    target = request.get("demo") or request.get("target") or (started.script if started else "")
    name = PurePath(str(target)).name or comparison.directory.resolve().name
    verdicts = ", ".join(f"{key} {_parity(values)}" for key, values in candidates.items())
    told = [
        {finite(values.get(key)) for values in candidates.values()} - {None} for key in ("seeds", "steps")
    ]
    seeds, steps = (int(one.pop() or 0) if len(one) == 1 else None for one in told)
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(candidates)}
    curves: list[charts.Chart | None] = []
    for candidate, colour in colours.items():
        groups = [
            ("FP32", "s0", comparison.of(comparison.baseline)),
            (candidate, colour, comparison.of(candidate)),
        ]
        margin = finite(candidates[candidate].get("margin"))
        curves += [
            figures.loss(f"Loss: {candidate} over FP32", groups),
            figures.difference(comparison, candidate, colour, margin),
        ]
    # A run of each precision stands for its seeds: their exponents are alike, and a page has an end.
    watched = [
        [run for run in comparison.of(one) if run.ranges][:1] for one in (comparison.baseline, *colours)
    ]
    return _page(
        title=f"{name}: {verdicts}" if verdicts else name,
        kicker="Mixed precision against FP32",
        heading=name,
        facts=[
            counted(seeds, "paired seed") if seeds is not None else "",
            f"{count(steps)} steps a run" if steps is not None else "",
            *_where_and_when(started),
        ],
        comparison=comparison,
        colours=colours,
        runs=runs,
        curves=curves,
        scales=[figures.loss_scale(comparison.of(one), colour, one) for one, colour in colours.items()],
        ranges=[range_figures(run) for some in watched for run in some],
        formats=_ops((one, comparison.of(one)) for one in colours),
        machine=comparison.verdict.get("machine"),
        kinds="cw" if any(run.ranges or run.overflows for run in runs) else "c",
    )


def render_runs(runs: Sequence[Run], place: str) -> str:
    """The page of runs without a verdict: what they did, and what was seen in them.

    Args:
        runs: at least one.
        place: the name of their folder or file, for a run that does not say which script it is.
    """
    started = next((run.started for run in runs if run.started), None)
    name = PurePath(started.script).name if started else place
    policies = list(dict.fromkeys(run.ran_by for run in runs if run.started))
    named = [
        (run.name if len(runs) > 1 or not run.started else run.ran_by, run, COLOURS[i % len(COLOURS)])
        for i, run in enumerate(runs)
    ]
    return _page(
        title=f"{name}: {', '.join(policies)}" if policies else name,
        kicker="A training run" if len(runs) == 1 else "Training runs",
        heading=name,
        facts=[*policies, *_where_and_when(started)],
        comparison=None,
        runs=runs,
        curves=[figures.loss(f"Loss: {one}", [(one, colour, [run])]) for one, run, colour in named],
        scales=[figures.loss_scale([run], colour, one) for one, run, colour in named],
        ranges=[range_figures(run) for run in runs if run.ranges],
        formats=_ops((one, [run]) for one, run, _ in named),
        machine=None,
        kinds="r",
    )


def _page(*, facts: Sequence[str], runs: Sequence[Run], machine: object, **values: Any) -> str:
    values.update(runs=runs, findings=_findings(runs), machine=_machine(machine, runs))
    page = _environment().get_template("page.html").render(facts=" · ".join(filter(None, facts)), **values)
    return page.strip() + "\n"


def _where_and_when(started: RunStarted | None) -> list[str]:
    if started is None:
        return []
    machine = started.machine
    return [str(machine.get("gpu") or machine.get("cpu") or ""), started.started.replace("T", " ")[:16]]


@cache
def _environment() -> jinja2.Environment:
    """Templates that escape every value; the only texts that are not escaped are this package's own files."""
    package = files("mezzo.report")

    def packaged(name: str) -> str:
        return package.joinpath(name).read_text(encoding="utf-8")

    found = jinja2.Environment(
        loader=jinja2.FunctionLoader(packaged),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = Markup(packaged("style.css")), Markup(packaged("script.js"))
    found.globals.update(
        {
            name: value
            for name, value in vars(numbers).items()
            if callable(value) and not name.startswith("_")
        },
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        version=VERSION,
        parity=_parity,
        PARITY=PARITY,
        LEVELS=charts.LEVELS,
        gauge=charts.gauge,
        command_line=command_line,
        noted=_noted,
        two_digits=lambda value: significant(value, 2),
        whole_percent=lambda value: percent(value, 0),
    )
    found.globals.update({draw.__name__: draw for draw in (figures.speed, figures.memory, figures.metric)})
    found.filters.update(prose=_prose, json=_json, comma="{:,}".format)
    return found


def _shown(value: Any) -> Any:
    """What an expression in a template writes: text without control characters; it is escaped after this."""
    return value if isinstance(value, Markup) else "" if value is None else printable(str(value))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(value: Any) -> str:
    """For an attribute that the script reads: escaped as any text is."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _prose(text: str) -> Markup:
    """A sentence whose parts in backquotes are code.

    >>> str(_prose("`bf16`, or a < `b`"))
    '<code>bf16</code>, or a &lt; <code>b</code>'
    """
    parts = [escape(printable(part)) for part in re.split(r"`([^`\n]+)`", text)]
    parts[1::2] = [Markup("<code>{}</code>").format(part) for part in parts[1::2]]
    return Markup("").join(parts)


def _parity(values: Mapping[str, Any]) -> str:
    """The parity word as recorded; ``no verdict`` where there is none."""
    word = values.get("parity")
    return word if isinstance(word, str) and word else "no verdict"


@dataclass
class Group:
    """The same finding, as often as it was made.

    Args:
        scale: what is true of the loss scale (`Run.too_high`) in its runs, of a finding about that.
        constant: the loss scale of those runs, if their policy has a constant one.
        lasting: whether that scale stays as it is, so that it has to be mended.
        records: in order.
        runs: the names of the runs in which it was made.
    """

    scale: str
    constant: float | None
    lasting: bool
    records: list[OverflowRecord] = field(default_factory=list)
    runs: dict[str, None] = field(default_factory=dict)

    @property
    def finding(self) -> Finding:
        """The first of them: what followed may be its consequence."""
        return self.records[0].finding

    @property
    def remedies(self) -> list[str]:
        """What to try."""
        return self.finding.remedies if self.constant is None else of_constant_scale(self.constant)

    @property
    def when(self) -> str:
        """At which updates."""
        updates = [record.update for record in self.records]
        return (
            listed(updates, 8)
            if len(updates) == 1
            else f"{counted(len(updates), 'time')}: {listed(updates, 8)}"
        )


def _findings(runs: Sequence[Run]) -> dict[str, Any] | None:
    """What made steps fail: a group for each thing that was found out; None where nothing was."""
    groups: dict[tuple[str, ...], Group] = {}
    by_scale: Counter[tuple[str, bool]] = Counter()
    for run in runs:
        for record in run.overflows:
            alarm = record.finding.alarms
            scale, lasting = ("", False) if alarm else (run.too_high, run.lasting)
            new = Group(scale, None if alarm else run.constant_scale, lasting)
            group = groups.setdefault((*record.finding.place, scale), new)
            group.records.append(record)
            group.runs[run.name] = None
            if not alarm:
                by_scale[scale, lasting] += 1
    alarms = [group for group in groups.values() if group.finding.alarms]
    probes = [group for group in groups.values() if not group.finding.alarms]
    steps = sum(len(group.records) for group in alarms)
    return {"alarms": alarms, "probes": probes, "steps": steps, "by_scale": by_scale} if groups else None


def _ops(groups: Iterable[tuple[str, Sequence[Run]]]) -> list[dict[str, Any]]:
    """Which ops ran in which format, of each precision that watched them: departures first."""
    found = []
    for name, runs in groups:
        watched = next((run for run in runs if run.ops), None)
        if watched is None:
            continue
        # Departures first, then what was called most: what a reader looks for is at the top.
        rows = sorted(watched.ops, key=lambda op: (op.as_planned, op.rule, -op.calls, op.op, op.module))
        rules = "; ".join(
            f"{times} {rule or 'without a rule'}" + (f" ({RULES[rule]})" if rule in RULES else "")
            for rule, times in Counter(op.rule for op in rows).most_common()
        )
        where = f" of seed {watched.seed}" if len(runs) > 1 else ""
        told = f"{counted(len(rows), 'op')} in one watched step{where}: {rules}."
        departed = [op for op in rows if not op.as_planned]
        found.append({"name": name, "rows": rows, "departed": departed, "told": told})
    return found


def _noted(runs: Sequence[Run]) -> dict[str, list[str]]:
    """What runs noted, and which did. The same note from every seed is one note."""
    told: dict[str, list[str]] = {}
    for run in runs:
        for note in run.ended.notes if run.ended else []:
            told.setdefault(str(note), []).append(run.name)
    return told


def _machine(known: object, runs: Sequence[Run]) -> list[tuple[str, str]]:
    """The machine as it is known, else as the first run that says so recorded it."""
    found = known if isinstance(known, dict) and known else None
    found = found or next((run.started.machine for run in runs if run.started), {})
    return [
        (
            key.removesuffix("_bytes").replace("_", " "),
            size(value) if key.endswith("_bytes") else _plain(value),
        )
        for key, value in found.items()
    ]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping) and value:
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, list) and value:
        return ", ".join(_plain(item) for item in value)
    return str(value) if value or value == 0 else "none"
