"""The page as a file: what the templates are given, and how they escape it.

Names, arguments, reasons and logs come from code that Mezzo did not write. The templates escape every value, and a
content policy in the head forbids every request and every script but the one shipped here, named by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from pathlib import PurePath
from typing import Any

import jinja2
from markupsafe import Markup, escape

from mezzo.core.comparison import READING, WIDE
from mezzo.core.version import VERSION
from mezzo.report import charts, figures, numbers, range_figures
from mezzo.report.numbers import counted, finite, printable, size
from mezzo.report.run import Comparison, Run, command_line

COLOURS = ("s1", "s2", "s3", "s4", "s5", "s6")
"""Classes that style.css colours; a seventh candidate shares the first one's colour and keeps its name."""


def render(comparison: Comparison) -> str:
    """The page of a comparison. The same folder gives the same text, whenever and wherever it is made."""
    request, runs, candidates = comparison.request, comparison.runs, comparison.candidates
    target = request.get("demo") or request.get("target")
    facts = []
    for key, words in (("seeds", "paired seed"), ("steps", "step")):
        found = {values for one in candidates.values() if (values := finite(one.get(key))) is not None}
        if len(found) == 1:
            facts.append(counted(int(found.pop()), words) + (" per run" if key == "steps" else ""))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(candidates)}
    base = ("FP32", "s0", comparison.of(comparison.baseline))
    curves: list[charts.Chart | None] = []
    for name, colour in colours.items():
        curves.append(figures.loss(f"Loss: {name} over FP32", [base, (name, colour, comparison.of(name))]))
        margin = finite(candidates[name].get("margin"))
        curves.append(figures.difference(comparison, name, colour, margin))
    # One run of each precision stands for its seeds: their exponents are alike, and the page stays small.
    watched = [
        [run for run in comparison.of(one) if run.ranges][:1] for one in (comparison.baseline, *colours)
    ]
    return _page(
        runs,
        [target and PurePath(str(target)).name, comparison.directory.resolve().name],
        ", ".join(f"{key} {_parity(values)}" for key, values in candidates.items()),
        kicker="Mixed precision against FP32",
        facts=facts,
        comparison=comparison,
        colours=colours,
        curves=curves,
        scales=[figures.loss_scale(comparison.of(one), colour, one) for one, colour in colours.items()],
        ranges=[range_figures.range_figures(run) for some in watched for run in some],
        formats=_ops((one, comparison.of(one)) for one in colours),
        machine=_machine(comparison.verdict.get("machine"), runs),
        kinds="cw" if any(run.ranges or run.overflows for run in runs) else "c",
    )


def render_runs(runs: Sequence[Run], place: str, advice: Mapping[str, Any] | None = None) -> str:
    """The page of runs (at least one) without a verdict; ``place`` names it if no run says which script it is."""
    policies = list(dict.fromkeys(run.ran_by for run in runs if run.started))
    names = [run.name if len(runs) > 1 or not run.started else run.ran_by for run in runs]
    named = [(name, COLOURS[i % len(COLOURS)], run) for i, (name, run) in enumerate(zip(names, runs))]
    return _page(
        runs,
        ["", place],
        ", ".join(policies),
        kicker="Calibration" if advice else "A training run" if len(runs) == 1 else "Training runs",
        advice=advice,
        facts=policies,
        comparison=None,
        curves=[figures.loss(f"Loss: {name}", [(name, colour, [run])]) for name, colour, run in named],
        scales=[figures.loss_scale([run], colour, name) for name, colour, run in named],
        ranges=[range_figures.range_figures(run) for run in runs if run.ranges],
        formats=_ops((name, [run]) for name, _, run in named),
        machine=_machine(None, runs),
        kinds="r",
    )


def _page(runs: Sequence[Run], names: Sequence[str | None], told: str, **values: Any) -> str:
    """Render the template. The heading is the first name, else the script's, else the second name."""
    started = next((run.started for run in runs if run.started), None)
    name = names[0] or (PurePath(started.script).name if started else "") or names[1]
    values.update(runs=runs, heading=name, title=f"{name}: {told}" if told else name, started=started)
    page = _environment().get_template("page.html").render(findings=_findings(runs), **values)
    return page.strip() + "\n"


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
    given = [one for name, one in vars(numbers).items() if callable(one) and not name.startswith("_")]
    given += [one for one in vars(figures).values() if getattr(one, "__module__", "") == figures.__name__]
    given += [charts.gauge, command_line]
    found.globals.update({one.__name__: one for one in given}, LEVELS=range_figures.LEVELS)
    for name in ("style.css", "script.js"):
        text, kind = Markup(packaged(name)), name.partition(".")[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        found.globals.update({kind: text, f"{kind}_hash": f"sha256-{digest}"})
    found.globals.update(version=VERSION, parity=_parity, noted=_noted, READING=READING, WIDE=WIDE)
    found.filters.update(
        prose=_prose, json=partial(json.dumps, separators=(",", ":"), allow_nan=False), comma="{:,}".format
    )
    return found


def _shown(value: Any) -> Any:
    """The text of an expression in a template, without control characters; it is escaped after this."""
    return value if isinstance(value, Markup) else "" if value is None else printable(str(value))


def _prose(text: str) -> Markup:
    """A sentence whose parts in backquotes are code."""
    parts = [escape(printable(part)) for part in re.split(r"`([^`\n]+)`", text)]
    parts[1::2] = [Markup("<code>{}</code>").format(part) for part in parts[1::2]]
    return Markup("").join(parts)


def _parity(values: Mapping[str, Any]) -> str:
    word = values.get("parity")
    return word if isinstance(word, str) and word else "no verdict"


def _findings(runs: Sequence[Run]) -> dict[str, Any] | None:
    """What made steps fail: a group for each place in the model, with its first finding; None if none was traced."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    by_scale: Counter[tuple[str, bool]] = Counter()
    for run in runs:
        for record in run.overflows:
            finding = record.finding
            scale = "" if finding.alarms else run.too_high
            lasting = not finding.alarms and run.constant_scale is not None
            new = {"finding": finding, "scale": scale, "lasting": lasting, "updates": [], "runs": {}}
            group = groups.setdefault((*finding.place, scale), new)
            group["updates"].append(record.update)
            group["runs"][run.name] = None
            if not finding.alarms:
                by_scale[scale, lasting] += 1
    alarms = [group for group in groups.values() if group["finding"].alarms]
    probes = [group for group in groups.values() if not group["finding"].alarms]
    steps = sum(len(group["updates"]) for group in alarms)
    return {"alarms": alarms, "probes": probes, "steps": steps, "by_scale": by_scale} if groups else None


def _ops(groups: Iterable[tuple[str, Sequence[Run]]]) -> list[dict[str, Any]]:
    """Which ops ran in which format, for each precision that watched them: departures first, then most called."""
    found = []
    for name, runs in groups:
        watched = next((run for run in runs if run.ops), None)
        if watched is None:
            continue
        rows = sorted(watched.ops, key=lambda op: (op.as_planned, op.rule, -op.calls, op.op, op.module))
        rules = Counter(op.rule for op in rows).most_common()
        departed = [op for op in rows if not op.as_planned]
        seed = watched.seed if len(runs) > 1 else None
        found.append({"name": name, "rows": rows, "departed": departed, "rules": rules, "seed": seed})
    return found


def _noted(runs: Sequence[Run]) -> dict[str, list[str]]:
    told: dict[str, list[str]] = {}
    for run in runs:
        for note in run.notes:
            told.setdefault(str(note), []).append(run.name)
    return told


def _machine(known: object, runs: Sequence[Run]) -> dict[str, str]:
    """The machine of the verdict, else that of the first run that recorded it."""
    found = known if isinstance(known, dict) and known else None
    found = found or next((run.started.machine for run in runs if run.started), {})
    return {
        key.removesuffix("_bytes").replace("_", " "): size(value) if key.endswith("_bytes") else _plain(value)
        for key, value in found.items()
    }


def _plain(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, list) and value:
        return ", ".join(_plain(item) for item in value)
    return str(value) if value or value == 0 else "none"
