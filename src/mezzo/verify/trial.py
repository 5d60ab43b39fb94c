"""Trial: what came of a recommended policy in a run of its own, and which modules it says fp16 can't hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from mezzo.core import records
from mezzo.core.calibration import counted
from mezzo.core.finding import OUTSIDE, Finding
from mezzo.core.patterns import is_pattern
from mezzo.verify.finished import FinishedRun

BY_THE_FORMAT = {"overflow": "overflowed in the trial", "invalid": "made NaN or infinity in the trial"}
"""Causes that a wider format can mend, for the same steps were finite in FP32; and what is told of their modules."""


@dataclass(frozen=True)
class Check:
    """What came of the recommended policy in a run of its own.

    Args:
        steps: updates that were made or skipped.
        skipped: those that were skipped.
        loss_finite: whether every loss was.
        scale: the loss scale after it.
        alarms: whether a step was skipped for another reason than the loss scale.
        findings: what was found out about the skips, a line for each that differs, with how many steps it was so.
        remedies: what to try, without repeats, those that keep a module in FP32 first.
        modules: those that a policy can name, in which a finite number became infinite or NaN; and which it was.
    """

    steps: int
    skipped: int
    loss_finite: bool
    scale: float = 1.0
    alarms: bool = False
    findings: list[str] = field(default_factory=list)
    remedies: list[str] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether no step was skipped and no loss was NaN or infinite."""
        return not self.skipped and self.loss_finite

    def __str__(self) -> str:
        skipped = f"{self.skipped} of {counted(self.steps)} skipped" if self.skipped else "no step skipped"
        loss = "every loss finite" if self.loss_finite else "a loss that is not finite"
        return f"{counted(self.steps)} under this policy: {skipped}, {loss}"


def check_of(run: FinishedRun, written: Iterable[records.Record]) -> Check:
    """The check from a run's updates and losses, and from all that it wrote."""
    overflows = [record for record in written if isinstance(record, records.OverflowRecord)]
    alarms = [record.finding for record in overflows if record.finding.alarms]
    last = run.updates[-1] if run.updates else None
    remedies = dict.fromkeys(remedy for finding in alarms for remedy in finding.remedies)
    return Check(
        steps=len(run.updates),
        skipped=sum(update.skipped for update in run.updates),
        loss_finite=all(math.isfinite(record.loss) for record in run.losses),
        scale=1.0 if last is None else last.loss_scale * (0.5 if last.skipped else 1.0),
        alarms=bool(alarms),
        findings=_lines(overflows),
        remedies=sorted(remedies, key=lambda remedy: "module." not in remedy),
        modules={one.module: BY_THE_FORMAT[one.cause] for one in reversed(alarms) if _can_be_kept(one)},
    )


def _lines(overflows: list[records.OverflowRecord]) -> list[str]:
    """A line for each finding that differs, in the order in which they came."""
    first = {record.finding.place: record for record in reversed(overflows)}
    counts = Counter(record.finding.place for record in overflows)
    return [
        f"{f'step {first[place].update}' if count == 1 else counted(count)}: {first[place].finding}"
        for place, count in counts.items()
    ]


def _can_be_kept(finding: Finding) -> bool:
    named = finding.module != OUTSIDE and is_pattern(finding.module)
    return named and finding.cause in BY_THE_FORMAT
