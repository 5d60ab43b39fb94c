"""The score: every fault named by the right module, and no alarm where there is no fault.

A fault counts as named if its finding has the module, the direction and, where the row has one, the operation. Cause
and line are counted too. A clean run counts as quiet if no skipped step is called a fault.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from faults.clean import CLEAN, Clean
from faults.rows import FAULTS, Expected, Fault
from faults.runs import acting, can_be_one, launched, mends, of_clean, of_fault, policies
from mezzo.core.overflow import OverflowReport
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
    """What was found of one fault, compared with its row.

    Args:
        name, family: of the row.
        expected: what is to be found.
        found: the finding of the last step in which it acted; None where nothing was found.
        skipped: whether that step was skipped at all.
        module, direction, op, cause, line: whether each is right.
    """

    name: str
    family: str
    expected: Expected
    found: OverflowReport | None
    skipped: bool
    module: bool = False
    direction: bool = False
    op: bool = False
    cause: bool = False
    line: bool = False

    @property
    def named(self) -> bool:
        """The right module, direction and operation."""
        return self.module and self.direction and self.op


@dataclass(frozen=True)
class CleanGrade:
    """What was reported of one run without a fault.

    Args:
        name: of the row.
        skips: steps that were skipped.
        alarms: findings that call something a fault.
        silent: skipped steps without a finding.
    """

    name: str
    skips: int
    alarms: list[OverflowReport]
    silent: int

    @property
    def quiet(self) -> bool:
        """No alarm was raised."""
        return not self.alarms


def grade(row: Fault, expected: Expected, found: OverflowReport | None, skipped: bool = True) -> FaultGrade:
    """Compare a finding with the row."""
    if found is None:
        return FaultGrade(row.name, row.family, expected, found, skipped)
    return FaultGrade(
        row.name,
        row.family,
        expected,
        found,
        skipped,
        module=found.module in (expected.module, expected.also or expected.module),
        direction=found.direction == expected.direction,
        op=is_op(found.op, expected.op),
        cause=found.cause == expected.cause,
        line=expected.line in found.line,
    )


def grades_of(row: Fault, **options: Any) -> list[FaultGrade]:
    """Run a fault with tracing, and grade the finding of each expected part's last step; `options` of `of_fault`."""
    last: dict[str, Any] = {}
    for turn in of_fault(row, trace=True, **options):
        if turn.number in acting(row) and turn.result.updated:
            last[turn.part] = turn.result
    results = [(expected, last[expected.part]) for expected in row.all_expected]
    return [grade(row, expected, result.finding, result.skipped) for expected, result in results]


def grade_of_clean(row: Clean, **options: Any) -> CleanGrade:
    """Run without a fault, with tracing."""
    found = [turn.result.finding for turn in of_clean(row, trace=True, **options) if turn.result.skipped]
    return _quiet(row, found)


def _quiet(row: Clean, found: Sequence[OverflowReport | None]) -> CleanGrade:
    alarms = [one for one in found if one is not None and one.alarms]
    return CleanGrade(row.name, len(found), alarms, sum(one is None for one in found))


def grades_of_script(row: Fault, folder: Path) -> list[FaultGrade]:
    """Run a fault as a plain script under `mezzo run`, and grade the best of its findings."""
    found = [r.finding for r in launched(row, folder) if isinstance(r, OverflowRecord) and r.finding.alarms]
    grades = []
    for expected in row.all_expected:
        if expected.in_script is not None:
            expected = replace(expected, module=expected.in_script)
        each = [grade(row, expected, finding) for finding in found or [None]]
        grades.append(max(each, key=lambda g: (g.named, g.module, g.cause, g.line)))
    return grades


def grade_of_clean_script(row: Clean, folder: Path) -> CleanGrade:
    """Run without a fault, as a plain script under `mezzo run`."""
    told = launched(row, folder)
    found: list[OverflowReport | None] = [r.finding for r in told if isinstance(r, OverflowRecord)]
    skips = sum(isinstance(r, UpdateRecord) and bool(r.skipped) for r in told)
    return _quiet(row, found + [None] * (skips - len(found)))


@dataclass(frozen=True)
class Trial:
    """A policy that the remedies of a row's finding name, and whether the step is taken under it."""

    name: str
    policy: str
    mends: bool


def trials_of(row: Fault, graded: FaultGrade) -> list[Trial]:
    """Try each policy that the remedies of a fault's finding name."""
    offered = [] if graded.found is None else policies(graded.found)
    return [Trial(row.name, policy, mends(row, graded.expected.part, policy)) for policy in offered]


def _share(told: Sequence[bool]) -> list[int]:
    return [sum(told), len(told)]


@dataclass(frozen=True)
class Score:
    """All grades: of loops with `MixedPrecision`, and of plain scripts."""

    faults: list[FaultGrade]
    clean: list[CleanGrade]
    scripts: list[FaultGrade]
    clean_scripts: list[CleanGrade]
    trials: list[Trial]

    @property
    def perfect(self) -> bool:
        """Every fault named, and no alarm without one, in loops with `MixedPrecision`; none without one in scripts."""
        quiet = all(g.quiet for g in (*self.clean, *self.clean_scripts))
        return quiet and all(g.named for g in self.faults)

    def counts(self) -> dict[str, list[int]]:
        """What was asked -> [how often it was right, of how many]."""
        faults, scripts = self.faults, self.scripts
        explained = sum(g.skips - len(g.alarms) - g.silent for g in self.clean)
        return {
            "named (module, direction, operation)": _share([g.named for g in faults]),
            **{
                f"right {what}": _share([getattr(g, what) for g in faults])
                for what in ("module", "direction", "op", "cause")
            },
            "right line, of those with one in the script": _share(
                [g.line for g in faults if g.expected.line]
            ),
            "clean runs without an alarm": _share([g.quiet for g in self.clean]),
            "skipped steps of clean runs put down to the loss scale": [
                explained,
                sum(g.skips for g in self.clean),
            ],
            "as plain scripts: module and direction": _share([g.module and g.direction for g in scripts]),
            "as plain scripts: named": _share([g.named for g in scripts]),
            "as plain scripts: clean runs without an alarm": _share([g.quiet for g in self.clean_scripts]),
            "policies that remedies name: the step is taken under them": _share(
                [t.mends for t in self.trials]
            ),
        }

    def by_family(self) -> dict[str, list[int]]:
        """Kind of model -> [faults named, faults]."""
        families = dict.fromkeys(g.family for g in self.faults)
        return {one: _share([g.named for g in self.faults if g.family == one]) for one in families}

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "counts": self.counts(),
            "by_family": self.by_family(),
            "faults": [_fault_values(g) for g in self.faults],
            "clean": [_clean_values(g) for g in self.clean],
            "scripts": [_fault_values(g) for g in self.scripts],
            "clean_scripts": [_clean_values(g) for g in self.clean_scripts],
            "trials": [asdict(t) for t in self.trials],
        }


def _fault_values(g: FaultGrade) -> dict[str, Any]:
    told = ("module", "op", "direction", "cause", "line", "how", "seconds", "kept_bytes", "note")
    found = None if g.found is None else {name: getattr(g.found, name) for name in told}
    right = {name: getattr(g, name) for name in ("named", "cause", "line")}
    return {"name": g.name, "family": g.family, "right": right, "found": found}


def _clean_values(g: CleanGrade) -> dict[str, Any]:
    return {"name": g.name, "skips": g.skips, "alarms": len(g.alarms)}


def score(folder: Path, faults: Sequence[Fault] = FAULTS, clean: Sequence[Clean] = CLEAN) -> Score:
    """Run and grade all rows; scripts and records go to a folder."""
    graded = [(row, g) for row in faults for g in grades_of(row)]
    return Score(
        [g for _, g in graded],
        [grade_of_clean(row) for row in clean],
        [g for row in faults if can_be_one(row) for g in grades_of_script(row, folder)],
        [grade_of_clean_script(row, folder) for row in clean if can_be_one(row)],
        [trial for row, g in graded for trial in trials_of(row, g)],
    )


def missed(g: FaultGrade) -> str:
    """The expected and the actual finding, in a line."""
    e, f = g.expected, g.found
    wanted = f"{e.cause} {e.direction} {e.op or 'any op'} in {e.module or 'the model'}"
    if f is None:
        return f"{g.name}: {wanted}; found nothing{'' if g.skipped else ', and the step was not skipped'}"
    told = f"{f.cause} {f.direction} {f.op or 'no op'} in {f.module!r} line {f.line!r}"
    return f"{g.name}: {wanted}; found {told}{f', note: {f.note}' if f.note else ''}"
