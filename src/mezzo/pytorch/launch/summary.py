"""The few lines that end a run: what ran in which precision, what was skipped, what was left alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mezzo.core.loss_scale import NoLossScale, StaticLossScale
from mezzo.core.remedies import of_constant_scale
from mezzo.core.scale_numbers import power_text

if TYPE_CHECKING:
    from mezzo.core.records import OverflowRecord
    from mezzo.pytorch.launch.session import Session

# Places where values that are not finite were made, told one by one.
_PLACES = 5
_REMEDIES = 3
# After so many findings that alarm the tracer looks into no more skipped steps of a run.
_LOOKED_INTO = 20


def summary(session: Session, *, failed: bool = False) -> str:
    """The account of a run, a line each, ready to print; empty where the script failed before it did anything."""
    if failed and not (session.device_type or session.journal.losses or session.journal.notes):
        return ""
    lines = [_headline(session)]
    journal = session.journal
    if session.left_alone is None:
        if session.device_type:
            lines.append(_calls(session))
            lines += _fallbacks()
        if journal.updates or journal.losses:
            steps = _count(journal.updates, "optimizer step")
            lines.append(
                f"{steps}, {journal.skipped} skipped; {_count(journal.losses, 'backward pass', 'es')}"
            )
        if not isinstance(session.scale, NoLossScale):
            reruns = (
                f"; {_count(session.reruns, 'backward pass', 'es')} run again at a smaller one"
                if session.reruns
                else ""
            )
            lines.append(f"loss scale {power_text(session.scale.scale)} at the end{reruns}")
        lines += findings(
            journal.findings,
            skipped=journal.skipped if session.request.trace and session.scaling else 0,
            constant=session.scale.scale if isinstance(session.scale, StaticLossScale) else None,
            recorded=session.request.records is not None,
        )
        if journal.ops:
            lines.append(_ops(session))
        lines += session.policy.notes
    lines += journal.notes
    return "\n".join(f"mezzo: {line}" for line in lines)


def _headline(session: Session) -> str:
    if session.left_alone is not None:
        if before := session.lowered_calls:
            calls = _count(before, "call")
            return (
                f"this script ran as it is from there on; {calls} before that ran in {session.policy.compute}"
            )
        asked = session.request.policy
        ignored = "" if asked == "auto" else f": {asked} was not applied"
        return f"this script ran as it is; Mezzo changed nothing{ignored}"
    if not session.device_type:
        return "no model was called, so there was nothing to run in another precision"
    text = f"policy {session.policy}"
    return f"{text} ({session.precision_reason})" if session.precision_reason else text


def _calls(session: Session) -> str:
    names = ", ".join(session.modules)
    calls = _count(session.model_calls, "call")
    if session.compiled:
        calls = "compiled calls" if not session.model_calls else f"{calls}, and compiled ones,"
    if 0 < session.lowered_calls < session.model_calls:
        return (
            f"{calls} of {names}, {session.lowered_calls} of them in 16 bits (first steps are timed in both)"
        )
    if session.policy.is_fp32:
        return f"{calls} of {names}, all in FP32"
    stored = "; weights stay FP32" if session.policy.params == "fp32" else ""  # else a note says how
    return f"{calls} of {names} in {session.policy.compute} on {session.device_type}{stored}"


def _fallbacks() -> list[str]:
    from mezzo.pytorch.region.fallback import CALLS

    ops = ", ".join(f"{op} ({_count(calls, 'call')})" for op, calls in CALLS.most_common())
    return [f"in FP32, because PyTorch has no 16-bit kernel for their inputs: {ops}"] if ops else []


def _ops(session: Session) -> str:
    by_format: dict[str, list[str]] = {}
    for op in session.journal.ops:
        by_format.setdefault(op.observed.split(" -> ")[0], []).append(op.op)
    parts = [f"{name or 'no floats'}: {len(ops)} ops" for name, ops in sorted(by_format.items())]
    return "formats seen in one step: " + "; ".join(parts)


def findings(
    records: Sequence[OverflowRecord],
    *,
    skipped: int = 0,
    constant: float | None = None,
    recorded: bool = False,
) -> list[str]:
    """What was found out about the skipped steps: what is to be mended, each place once, with what to try first.

    Args:
        records: one for each skipped step that was looked into.
        skipped: skipped steps of the run, looked into or not; with 0 those that were not are not counted.
        constant: the loss scale, if it is one that never changes; None: it finds its place by itself.
        recorded: whether `records` are in a file as well.
    """
    lines = _scale_lines([record for record in records if not record.finding.alarms], constant)
    places: dict[tuple[str, ...], list[OverflowRecord]] = {}
    for record in records:
        if record.finding.alarms:
            places.setdefault(record.finding.place, []).append(record)
    for same in list(places.values())[:_PLACES]:
        times = f", and {_count(len(same) - 1, 'later one')}" if len(same) > 1 else ""
        lines.append(f"update {same[0].update} skipped{times}: {same[0].finding}")
        lines += _tries(same[0].finding.remedies, recorded)
    if len(places) > _PLACES:
        where = "in the records" if recorded else "which --out DIR writes down"
        lines.append(f"and {_count(len(places) - _PLACES, 'other place')}, {where}")
    if skipped > len(records):
        lines.append(_not_looked_into(skipped - len(records), records))
    return lines


def _scale_lines(probes: Sequence[OverflowRecord], constant: float | None) -> list[str]:
    if not probes:
        return []
    was = "was" if len(probes) == 1 else "were"
    if constant is None:
        return [f"{_count(len(probes), 'skipped step')} {was} the loss scale finding its place"]
    why = f"the constant loss scale {power_text(constant)} is too large for the gradients"
    return [
        f"{_count(len(probes), 'step')} {was} skipped because {why}",
        *_tries(of_constant_scale(constant), recorded=True),
    ]


def _tries(remedies: Sequence[str], recorded: bool) -> list[str]:
    lines = [f"  {'try:' if n == 0 else ' or:'} {text}" for n, text in enumerate(remedies[:_REMEDIES])]
    if (left := len(remedies) - _REMEDIES) > 0:
        where = (
            "in the records and the report that is made of them" if recorded else "in the report of --out DIR"
        )
        lines.append(f"  and {left} more {where}")
    return lines


def _not_looked_into(number: int, records: Sequence[OverflowRecord]) -> str:
    more = "more skipped step" if records else "skipped step"
    text = f"{'and ' if records else ''}{_count(number, more)} that {'was' if number == 1 else 'were'} not looked into"
    if sum(record.finding.alarms for record in records) >= _LOOKED_INTO:
        text += f": Mezzo stops looking after {_LOOKED_INTO} findings"
    return text


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
