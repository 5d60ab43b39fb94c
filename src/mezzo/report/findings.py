"""What made steps fail: a row for each thing that was found out, however often it happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mezzo.core.finding import CAUSES, Finding, TensorFacts
from mezzo.core.records import OverflowRecord
from mezzo.core.remedies import of_constant_scale
from mezzo.report.charts.axis import scale_text
from mezzo.report.markup import Child, Markup, element, prose
from mezzo.report.numbers import counted, seconds, significant, size
from mezzo.report.run import Run

ROWS = 60
NAMED = 8
_COLUMNS = ("Update", "Module and line", "Operation", "Cause", "What went in", "What to try")


@dataclass
class Group:
    """The same finding, as often as it was made.

    Args:
        records: of it, in order.
        runs: the names of the runs in which it was made.
        constant: the loss scale of those, if their policy has a constant one.
        scale: what is true of the loss scale in them (`too_high`), of a finding about that.
        lasting: whether that scale stays as it is, so that it has to be mended.
    """

    records: list[OverflowRecord] = field(default_factory=list)
    runs: dict[str, None] = field(default_factory=dict)
    constant: float | None = None
    scale: str = ""
    lasting: bool = False

    @property
    def finding(self) -> Finding:
        """The first of them: what followed may be its consequence."""
        return self.records[0].finding

    @property
    def why(self) -> str:
        """The cause in words: what is true of this finding in its run."""
        return self.scale or self.finding.why

    @property
    def remedies(self) -> list[str]:
        """What to try."""
        return self.finding.remedies if self.constant is None else of_constant_scale(self.constant)


def too_high(run: Run) -> str:
    """Why updates of a run failed that a smaller loss scale would have kept."""
    if run.constant_scale is not None:
        return f"the constant loss scale {scale_text(run.constant_scale)} is too large for this step"
    if run.steady_scale is not None:
        return (
            f"the loss scale, {scale_text(run.steady_scale)} in all of this run, is too large for this step"
        )
    return "the loss scale was finding its height (gradients overflow at this one, and not at a smaller one)"


def lasting(run: Run) -> bool:
    """Whether a loss scale that is too large stays so: a constant, or one that no skipped update made smaller."""
    return run.constant_scale is not None or run.steady_scale is not None


def findings(runs: Sequence[Run]) -> Markup | None:
    """The section, alarms first; None where no skipped update was looked into."""
    groups = _grouped(runs)
    if not groups:
        return None
    several = len(runs) > 1
    alarms = [group for group in groups if group.finding.alarms]
    probes = [group for group in groups if not group.finding.alarms]
    parts: list[Markup] = [_summary(alarms, probes)]
    if alarms:
        parts.append(_table(alarms[:ROWS], several, "Alarms"))
        if len(alarms) > ROWS:
            parts.append(element("p", f"{len(alarms) - ROWS:,} more are in the records.", class_="note"))
    if probes:
        table = _table(probes[:ROWS], several, "Steps that a smaller scale would have kept")
        shown = counted(len(probes), "place")
        parts.append(
            element(
                "details",
                element("summary", f"Where the loss scale was too high: {shown}"),
                table,
                open=any(group.lasting for group in probes),
            )
        )
    return element("div", parts, class_="found")


def told(finding: Finding) -> str:
    """A finding in a sentence, also one whose cause only a newer version knows."""
    if finding.cause in CAUSES:
        return str(finding)
    return f"{finding.direction} of {finding.op} in {finding.module}: {finding.cause}"


def _grouped(runs: Sequence[Run]) -> list[Group]:
    groups: dict[tuple[str, ...], Group] = {}
    for run in runs:
        for record in run.overflows:
            one = record.finding
            scale = "" if one.alarms else too_high(run)
            key = (*one.place, scale)
            group = groups.setdefault(key, Group(scale=scale))
            if scale:
                group.constant, group.lasting = run.constant_scale, lasting(run)
            group.records.append(record)
            group.runs[run.name] = None
    return list(groups.values())


def _summary(alarms: Sequence[Group], probes: Sequence[Group]) -> Markup:
    steps = sum(len(group.records) for group in alarms)
    by_scale: Counter[str] = Counter()
    for group in probes:
        by_scale[group.scale] += len(group.records)
    words: list[Markup | str] = []
    if alarms:
        told = f"{counted(steps, 'skipped update')} to look into, of {counted(len(alarms), 'kind')}."
        words.append(element("strong", told, class_="bad"))
    elif not any(group.lasting for group in probes):
        words.append(element("strong", "No alarm."))
    lasting = {group.scale for group in probes if group.lasting}
    for scale, number in by_scale.items():
        told = f"{counted(number, 'skipped update')}: {scale}."
        words += [" ", element("strong", told, class_="bad") if scale in lasting else told]
    return element("p", words, class_="note")


def _table(groups: Sequence[Group], several: bool, label: str) -> Markup:
    head = element("tr", [element("th", name, scope="col") for name in _COLUMNS])
    body = [_row(group, several) for group in groups]
    table = element("table", element("thead", head), element("tbody", body), class_="list findings")
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label=label)


def _row(group: Group, several: bool) -> Markup:
    one = group.finding
    where: list[Markup | str] = [element("code", one.module or "(the model)")]
    if one.line:
        where.append(element("code", one.line, class_="source"))
    operation: list[Markup | str] = [element("code", one.op or "–"), element("span", one.direction)]
    remedies = [element("li", prose(text)) for text in group.remedies]
    cause = [element("b", one.cause), element("span", group.why)]
    cells: list[tuple[Child, str]] = [
        (where, "where"),
        (operation, "stack"),
        (cause, "stack why"),
        ([[_facts(tensor) for tensor in one.inputs] or "–", _details(one)], "why"),
        (element("ol", remedies) if remedies else "–", "why"),
    ]
    return element(
        "tr",
        element(
            "th", _when(group), _in_runs(group) if several else None, scope="row", data_label=_COLUMNS[0]
        ),
        [
            element("td", content, class_=style, data_label=column)
            for column, (content, style) in zip(_COLUMNS[1:], cells, strict=True)
        ],
        class_="departs" if one.alarms else None,
    )


def _when(group: Group) -> str:
    updates = [record.update for record in group.records]
    named = ", ".join(f"{update:,}" for update in updates[:NAMED]) + (", …" if len(updates) > NAMED else "")
    return named if len(updates) == 1 else f"{counted(len(updates), 'time')}: {named}"


def _in_runs(group: Group) -> Markup:
    return element("span", ", ".join(group.runs), class_="muted")


def _facts(tensor: TensorFacts) -> Markup:
    shape = "×".join(map(str, tensor.shape)) or "scalar"
    numbers = f"{significant(tensor.smallest, 3)} to {significant(tensor.largest, 3)}"
    if not tensor.largest:
        numbers = "nothing finite but 0" if tensor.zeros else "nothing finite"
    bad = [
        counted(number, word, word)
        for number, word in (
            (tensor.zeros, "zero" if tensor.zeros == 1 else "zeros"),
            (tensor.infinities, "infinite"),
            (tensor.nans, "NaN"),
        )
        if number
    ]
    return element(
        "div",
        element("b", tensor.name),
        f" {tensor.format} {shape}: {', '.join([numbers, *bad])}",
        class_="fact",
    )


def _details(one: Finding) -> Markup | None:
    """What came out, who passed it on, how it was found: folded."""
    parts: list[Markup] = []
    if one.outputs:
        parts.append(
            element("div", element("em", "What came out"), [_facts(tensor) for tensor in one.outputs])
        )
    if one.propagators:
        listed = element("ol", [element("li", element("code", text)) for text in one.propagators])
        parts.append(element("div", element("em", "Passed on by"), listed))
    if one.note:
        parts.append(element("p", prose(one.note)))
    how = {"replay": "Found by running the step's calls again", "live": "Seen as it happened"}
    cost = f"{how.get(one.how, one.how)}: {seconds(one.seconds)}, {size(one.kept_bytes)} kept for it."
    parts.append(element("p", cost, class_="muted"))
    return element("details", element("summary", "Details"), parts)
