"""The score: every fault named by the right module, and no alarm where there is no fault.

A fault counts as named if its finding has the module, the direction and, where the row has one, the operation. Cause
and line are counted too. A clean run counts as quiet if no skipped step is called a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from faults.rows import Expected, Row
from faults.runs import launched, mends, of_row, policies
from mezzo.core.overflow import OverflowReport
from mezzo.core.records import OverflowRecord, UpdateRecord


@dataclass(frozen=True)
class FaultGrade:
    row: Row
    expected: Expected
    found: OverflowReport | None  # in the last step in which it acted
    skipped: bool = True  # whether that step was skipped at all

    @property
    def right(self) -> dict[str, bool]:
        """What was asked -> whether the finding says it."""
        wanted, found = self.expected, self.found
        if found is None:
            return dict.fromkeys(("module", "direction", "op", "cause", "line"), False)
        return {
            "module": found.module in (wanted.module, wanted.also or wanted.module),
            "direction": found.direction == wanted.direction,
            "op": found.op == (wanted.op or found.op),
            "cause": found.cause == wanted.cause,
            "line": wanted.line in found.line,
        }

    @property
    def named(self) -> bool:
        return all(self.right[what] for what in ("module", "direction", "op"))

    def __str__(self) -> str:
        e, f = self.expected, self.found
        wanted = f"{self.row.name}: {e.cause} {e.direction} {e.op or 'any op'} in {e.module or 'the model'}"
        if f is None:
            return f"{wanted}; found nothing{'' if self.skipped else ', and the step was not skipped'}"
        told = f"{f.cause} {f.direction} {f.op or 'no op'} in {f.module!r} line {f.line!r}"
        return f"{wanted}; found {told}{f', note: {f.note}' if f.note else ''}"


@dataclass(frozen=True)
class CleanGrade:
    name: str  # of the row
    skips: int  # steps that were skipped
    alarms: list[OverflowReport]  # findings that call something a fault
    silent: int  # skipped steps without a finding


def _grade(row: Row, found: Sequence[OverflowReport], skips: int) -> CleanGrade:
    return CleanGrade(row.name, skips, [one for one in found if one.alarms], skips - len(found))


def grades_of(row: Row, **options: Any) -> list[FaultGrade]:
    """Run a fault with tracing, and grade the finding of each expected part's last step; `options` of `of_row`."""
    last: dict[str, Any] = {}
    for turn in of_row(row, trace=True, **options):
        if turn.number in row.acting and turn.result.updated:
            last[turn.part] = turn.result
    results = [(expected, last[expected.part]) for expected in row.expected]
    return [FaultGrade(row, expected, result.finding, result.skipped) for expected, result in results]


def grade_of_clean(row: Row, **options: Any) -> CleanGrade:
    skipped = [turn.result for turn in of_row(row, trace=True, **options) if turn.result.skipped]
    return _grade(row, [result.finding for result in skipped if result.finding is not None], len(skipped))


def grades_of_script(row: Row, folder: Path) -> list[FaultGrade]:
    """Run a fault as a plain script under `mezzo run`, and grade the best of its findings."""
    found = [r.finding for r in launched(row, folder) if isinstance(r, OverflowRecord) and r.finding.alarms]
    grades = []
    for expected in row.expected:
        if expected.in_script is not None:
            expected = replace(expected, module=expected.in_script)
        each = [FaultGrade(row, expected, finding) for finding in found or [None]]
        grades.append(max(each, key=lambda g: (g.named, *g.right.values())))
    return grades


def grade_of_clean_script(row: Row, folder: Path) -> CleanGrade:
    told = launched(row, folder)
    found = [r.finding for r in told if isinstance(r, OverflowRecord)]
    return _grade(row, found, sum(isinstance(r, UpdateRecord) and bool(r.skipped) for r in told))


class Trial(NamedTuple):
    """A policy that the remedies of a row's finding name, and whether the step is taken under it."""

    name: str
    policy: str
    mends: bool


def trials_of(graded: FaultGrade) -> list[Trial]:
    offered = [] if graded.found is None else policies(graded.found)
    row, part = graded.row, graded.expected.part
    return [Trial(row.name, policy, mends(row, part, policy)) for policy in offered]
