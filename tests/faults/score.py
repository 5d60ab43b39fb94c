"""The score: every fault named by the right module, and no alarm where there is no fault.

A fault counts as named if its finding has the module, the direction and, where the row has one, the operation. Cause
and line are counted beside it. A clean run counts as quiet if no step that was skipped is called a fault.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from faults.clean import CLEAN, Clean
from faults.rows import FAULTS, Expected, Fault
from faults.runs import acting, can_be_one, launched, mends, of_clean, of_fault, policies
from mezzo.core.overflow import OUTSIDE, OverflowReport
from mezzo.core.records import OverflowRecord, UpdateRecord

FAMILIES: dict[str, set[str]] = {
    "mul": {"mul", "imul", "rmul", "multiply"},
    "add": {"add", "iadd", "radd"},
    "div": {"div", "truediv", "itruediv", "rtruediv", "truedivide", "divide"},
    "inverse": {"div", "truediv", "rtruediv", "reciprocal"},  # PyTorch's 1 / x is x.reciprocal()
    "pow": {"pow", "rpow"},
    "matmul": {"matmul", "rmatmul", "bmm", "mm", "baddbmm", "einsum"},
    "linear": {"linear", "addmm", "mm", "bmm", "matmul"},
    "conv": {"conv2d", "convolution", "convolutionoverrideable", "mkldnnconvolution"},
    "half": {"half", "to", "tocopy"},
    "cast": {"float", "to", "tocopy"},
    "lstm": {"lstm"},
    "gru": {"gru"},
    "layer_norm": {"layernorm", "nativelayernorm"},
    "group_norm": {"groupnorm", "nativegroupnorm"},
    "batch_norm": {"batchnorm", "nativebatchnorm"},
    "rms_norm": {"rmsnorm", "fusedrmsnorm"},
    "normalize": {"normalize", "div", "truediv", "to", "tocopy"},
    "softmax": {"softmax"},
    "conv_transpose": {"convtranspose2d", "convolution", "convolutionoverrideable", "mkldnnconvolution"},
    "attention": {"softmax", "scaleddotproductattention", "multiheadattentionforward"},
    "density": {"log", "div", "truediv"},  # the logarithm of the deviation, and the division by it
    "eigh": {"linalgeigh", "eigh"},
}
"""What an operation of a row may be called, in small letters, without what Python, autograd and ATen add to it."""


def plain_name(op: str) -> str:
    """An operation's name without `Tensor.`, underscores and `Backward0`.

    >>> plain_name("Tensor.__truediv__"), plain_name("DivBackward0"), plain_name("_CarelessBackward")
    ('truediv', 'div', 'careless')
    """
    return re.sub(r"backward\d*$", "", re.split(r"\.|::", op)[-1].lower().replace("_", ""))


def is_op(op: str, wanted: str) -> bool:
    """Whether `op` is one of those that a row calls `wanted`; any is where the row names none."""
    name = plain_name(op)
    return not wanted or name in FAMILIES.get(wanted, {wanted.replace("_", "")})


@dataclass(frozen=True)
class FaultGrade:
    """What was found of one fault, beside what is so.

    Args:
        name, family: of the row.
        expected: what is to be found.
        found: what was, of the last step in which it acted; None where nothing was found.
        skipped: whether that step was skipped at all.
        module, direction, op, cause, line: whether each is right.
        first: module that the finding of the fault's first step named.
    """

    name: str
    family: str
    expected: Expected
    found: OverflowReport | None
    skipped: bool
    module: bool
    direction: bool
    op: bool
    cause: bool
    line: bool
    first: str | None = None

    @property
    def named(self) -> bool:
        """The right module, direction and operation."""
        return self.module and self.direction and self.op


@dataclass(frozen=True)
class CleanGrade:
    """What was said of one run without a fault.

    Args:
        name, family: of the row.
        skips: steps that were skipped.
        alarms: findings that call something a fault.
        silent: skipped steps without a finding.
    """

    name: str
    family: str
    skips: int
    alarms: list[OverflowReport] = field(default_factory=list)
    silent: int = 0

    @property
    def quiet(self) -> bool:
        """No alarm was raised."""
        return not self.alarms


def grade(
    row: Fault, expected: Expected, found: OverflowReport | None, skipped: bool, first: str | None
) -> FaultGrade:
    """Compare a finding with the row."""
    paths = {expected.module, expected.also} if expected.also else {expected.module}
    right = {
        "module": found is not None and found.module in paths,
        "direction": found is not None and found.direction == expected.direction,
        "op": found is not None and is_op(found.op, expected.op),
        "cause": found is not None and found.cause == expected.cause,
        "line": found is not None and expected.line in found.line,
    }
    return FaultGrade(row.name, row.family, expected, found, skipped, first=first, **right)


def grades_of(row: Fault, **options: Any) -> list[FaultGrade]:
    """Run a fault with tracing, and grade what each expected part's step found.

    Args:
        row: the fault.
        options: of `of_fault`, in place of the row's.
    """
    seen: dict[str, list[Any]] = {}
    for turn in of_fault(row, trace=True, **options):
        if turn.number in acting(row) and turn.result.updated:
            seen.setdefault(turn.part, []).append(turn.result)
    grades = []
    for expected in row.all_expected:
        results = seen[expected.part]
        first = results[0].finding
        last = results[-1]
        grades.append(
            grade(row, expected, last.finding, last.skipped, None if first is None else first.module)
        )
    return grades


def grade_of_clean(row: Clean, **options: Any) -> CleanGrade:
    """Run without a fault, with tracing."""
    skipped = [turn.result for turn in of_clean(row, trace=True, **options) if turn.result.skipped]
    alarms = [result.finding for result in skipped if result.finding is not None and result.finding.alarms]
    silent = sum(result.finding is None for result in skipped)
    return CleanGrade(row.name, row.family, len(skipped), alarms, silent)


def grades_of_script(row: Fault, folder: Path) -> list[FaultGrade]:
    """Run a fault as a plain script under `mezzo run`, and grade the best of what was found in it.

    Args:
        row: the fault, one that `scripted.can_be_one`.
        folder: for script and records.
    """
    found = [r.finding for r in launched(row, folder) if isinstance(r, OverflowRecord) and r.finding.alarms]
    grades = []
    for expected in row.all_expected:
        if expected.in_script is not None:
            expected = replace(expected, module=expected.in_script)
        each = [grade(row, expected, finding, True, None) for finding in found]
        each = each or [grade(row, expected, None, False, None)]
        grades.append(max(each, key=lambda g: (g.named, g.module, g.cause, g.line)))
    return grades


def grade_of_clean_script(row: Clean, folder: Path) -> CleanGrade:
    """Run without a fault, as a plain script under `mezzo run`."""
    told = launched(row, folder)
    found = [r.finding for r in told if isinstance(r, OverflowRecord)]
    skips = sum(isinstance(r, UpdateRecord) and bool(r.skipped) for r in told)
    return CleanGrade(row.name, row.family, skips, [f for f in found if f.alarms], skips - len(found))


@dataclass(frozen=True)
class Trial:
    """A policy that a finding's remedies name, put into force.

    Args:
        name: of the row.
        policy: the policy.
        mends: whether the step is taken under it, at some loss scale.
    """

    name: str
    policy: str
    mends: bool


def trials_of(row: Fault, graded: FaultGrade) -> list[Trial]:
    """Try each policy that the remedies of a fault's finding name."""
    if graded.found is None:
        return []
    part = graded.expected.part
    return [Trial(row.name, policy, mends(row, part, policy)) for policy in policies(graded.found)]


def _short(g: FaultGrade) -> dict[str, Any]:
    told = ("module", "op", "direction", "cause", "line", "how", "seconds", "kept_bytes", "note")
    found = None if g.found is None else {name: getattr(g.found, name) for name in told}
    right = {name: getattr(g, name) for name in ("named", "cause", "line")}
    return {"name": g.name, "family": g.family, "right": right, "found": found}


@dataclass(frozen=True)
class Score:
    """All grades: of loops with `MixedPrecision`, and of plain scripts."""

    faults: list[FaultGrade]
    clean: list[CleanGrade]
    scripts: list[FaultGrade] = field(default_factory=list)
    clean_scripts: list[CleanGrade] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)

    @property
    def perfect(self) -> bool:
        """Every fault named, and no alarm without one, in loops with `MixedPrecision`; none without one in scripts."""
        quiet = all(g.quiet for g in (*self.clean, *self.clean_scripts))
        return quiet and all(g.named for g in self.faults)

    def counts(self) -> dict[str, list[int]]:
        """What was asked -> [how often it was right, of how many]."""
        faults, clean = len(self.faults), len(self.clean)
        rows: dict[str, list[int]] = {
            "named (module, direction, operation)": [sum(g.named for g in self.faults), faults]
        }
        for what in ("module", "direction", "op", "cause"):
            rows[f"right {what}"] = [sum(getattr(g, what) for g in self.faults), faults]
        lines = [g for g in self.faults if g.expected.line]
        rows["right line, of those with one in the script"] = [sum(g.line for g in lines), len(lines)]
        rows["clean runs without an alarm"] = [sum(g.quiet for g in self.clean), clean]
        rows["skipped steps of clean runs put down to the loss scale"] = [
            sum(g.skips - len(g.alarms) - g.silent for g in self.clean),
            sum(g.skips for g in self.clean),
        ]
        scripts, quiet = self.scripts, self.clean_scripts
        rows["as plain scripts: module and direction"] = [
            sum(g.module and g.direction for g in scripts),
            len(scripts),
        ]
        rows["as plain scripts: named"] = [sum(g.named for g in scripts), len(scripts)]
        rows["as plain scripts: clean runs without an alarm"] = [sum(g.quiet for g in quiet), len(quiet)]
        rows["policies that remedies name: the step is taken under them"] = [
            sum(t.mends for t in self.trials),
            len(self.trials),
        ]
        return rows

    def by_family(self) -> dict[str, list[int]]:
        """Kind of model -> [faults named, faults]."""
        families = dict.fromkeys(g.family for g in self.faults)
        return {
            family: [
                sum(g.named for g in self.faults if g.family == family),
                sum(g.family == family for g in self.faults),
            ]
            for family in families
        }

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "counts": self.counts(),
            "by_family": self.by_family(),
            "faults": [_short(g) for g in self.faults],
            "clean": [{"name": g.name, "skips": g.skips, "alarms": len(g.alarms)} for g in self.clean],
            "scripts": [_short(g) for g in self.scripts],
            "clean_scripts": [
                {"name": g.name, "skips": g.skips, "alarms": len(g.alarms)} for g in self.clean_scripts
            ],
            "trials": [asdict(t) for t in self.trials],
        }


def score(folder: Path, faults: Sequence[Fault] = FAULTS, clean: Sequence[Clean] = CLEAN) -> Score:
    """Run and grade all of it.

    Args:
        folder: for scripts and records.
        faults, clean: which rows.
    """
    graded = [(row, g) for row in faults for g in grades_of(row)]
    return Score(
        [g for _, g in graded],
        [grade_of_clean(row) for row in clean],
        [g for row in faults if can_be_one(row) for g in grades_of_script(row, folder)],
        [grade_of_clean_script(row, folder) for row in clean if can_be_one(row)],
        [trial for row, g in graded for trial in trials_of(row, g)],
    )


def missed(g: FaultGrade) -> str:
    """What a fault's finding should have said, and did say, in a line."""
    e = g.expected
    wanted = f"{e.cause} {e.direction} {e.op or 'any op'} in {e.module or 'the model'}"
    if g.found is None:
        return f"{g.name}: {wanted}; found nothing{'' if g.skipped else ', and the step was not skipped'}"
    f = g.found
    where = f.module if f.module != OUTSIDE else OUTSIDE
    note = f", note: {f.note}" if f.note else ""
    return f"{g.name}: {wanted}; found {f.cause} {f.direction} {f.op or 'no op'} in {where!r} line {f.line!r}{note}"
