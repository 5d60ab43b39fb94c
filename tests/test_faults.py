"""The corpus of planted faults (tests/faults): every fault is named, and no clean run raises an alarm.

Both under `MixedPrecision` and in plain scripts; and tracing changes nothing, bit for bit.

A fault makes its step fail and no other; a clean run overflows, and begins finite at a loss scale of 1. A few rows run
with the fast tests, all of them with the heavy ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.clean import CLEAN
from faults.rows import FAULTS, Row
from faults.runs import everything, of_row
from faults.score import (
    FaultGrade,
    grade_of_clean,
    grade_of_clean_script,
    grades_of,
    grades_of_script,
    trials_of,
)
from mezzo.core.loss_scale import StaticLossScale

pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows

FAST = [
    "an activation multiplied by 1e7",
    "a sentence whose every token is padding",
    "the slope of a length at the origin",
    "a NaN in the head's weight",
    "a NaN pixel",
    "the loss takes the logarithm of 0",
]
FAST_CLEAN = ["a CNN from 2^24", "a causal mask of -inf", "a GAN"]

NOT_NAMED_IN_SCRIPTS = {
    "afterwards: a learned uncertainty": "its exp runs before the step's first call, from which on a script is watched",
}
"""Faults that are not named in a plain script, and why."""


def marked(rows: Sequence[Any], fast: Sequence[str], gaps: Mapping[str, str] | None = None) -> list[Any]:
    """Rows as parameters, named; those of `gaps` have to fail, so that a gap that is closed is noticed."""
    gaps = gaps or {}
    assert {*fast, *gaps} <= {row.name for row in rows}
    found = []
    for row in rows:
        marks = [pytest.mark.heavy] * (row.name not in fast)
        marks += [pytest.mark.xfail(reason=gaps[name]) for name in gaps if name == row.name]
        found.append(pytest.param(row, id=row.name, marks=marks))
    return found


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_corpus_is_large_enough_and_its_names_are_its_own() -> None:
    names = [row.name for row in (*FAULTS, *CLEAN)]
    assert len(names) == len(set(names))
    assert len(FAULTS) >= 150
    assert len(CLEAN) >= 59
    families = {"CNN", "transformer", "recurrent", "GAN", "perceptron"}
    assert {row.family for row in FAULTS} == {row.family for row in CLEAN} == families
    assert {e.cause for row in FAULTS for e in row.expected} == {"overflow", "invalid", "input", "state"}


def _same_without(row: Row, traced: dict[str, Any]) -> set[tuple[int, str]]:
    """Parameters, buffers, states, moments, loss scales and generators are as without tracing, bit by bit.

    Returns the (step, part) that are skipped.
    """
    ends: list[dict[str, Any]] = []
    turns = list(of_row(row, ended=lambda *training: ends.append(everything(*training)), trace=False))
    assert ends[0].keys() == traced.keys()
    for name, value in ends[0].items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, traced[name], rtol=0, atol=0, equal_nan=True)
        else:
            assert value == traced[name], name
    return {(turn.number, turn.part) for turn in turns if turn.result.skipped}


_GRADES: dict[str, list[FaultGrade]] = {}


@pytest.mark.parametrize("row", marked(FAULTS, FAST))
def test_a_fault_is_named_and_tracing_changes_nothing(row: Row) -> None:
    """And it acts in its steps, and in FP32, as its row says."""
    ends: list[dict[str, Any]] = []
    _GRADES[row.name] = grades_of(row, ended=lambda *training: ends.append(everything(*training)))
    for graded in _GRADES[row.name]:
        assert graded.skipped
        assert all(graded.right.values()), graded
    skipped = _same_without(row, ends[0])
    assert {e.part for e in row.expected} <= {part for _, part in skipped}
    if row.scale < 2.0**20:  # from 2^24 a scale still looks for its place
        assert {number for number, _ in skipped} == set(row.acting)
    if row.mended is not None and "masters" not in row.options:
        fp32 = of_row(row, precision="fp32", scale=1.0, trace=False)
        assert any(turn.result.skipped for turn in fp32) is not row.mended


@pytest.mark.parametrize("row", marked(CLEAN, FAST_CLEAN))
def test_a_clean_run_raises_no_alarm_and_tracing_changes_nothing(row: Row) -> None:
    """And it overflows, but not at a loss scale of 1."""
    ends: list[dict[str, Any]] = []
    graded = grade_of_clean(row, ended=lambda *training: ends.append(everything(*training)))
    assert not graded.alarms
    assert graded.silent == 0
    assert len(_same_without(row, ends[0])) == graded.skips > 0
    plain = of_row(row, scale=StaticLossScale(1.0), trace=False)
    assert not any(turn.result.skipped for turn in plain if turn.number == 0)


OVERFLOWS = [row for row in FAULTS if any(e.cause == "overflow" for e in row.expected)]


@pytest.mark.parametrize("row", marked(OVERFLOWS, [FAST[0]]))
def test_a_policy_that_a_remedy_names_mends(row: Row) -> None:
    """The same steps are taken, with the policy in force from the first step on."""
    grades = _GRADES.get(row.name) or grades_of(row)
    trials = [trial for graded in grades for trial in trials_of(graded)]
    assert all(trial.mends for trial in trials), trials
    assert trials or row.name != FAST[0]


SCRIPTS = ["an activation multiplied by 1e7", "the slope of a length at the origin"]


FAULTY_SCRIPTS = [row for row in FAULTS if row.can_be_a_script]


@pytest.mark.parametrize("row", marked(FAULTY_SCRIPTS, SCRIPTS, NOT_NAMED_IN_SCRIPTS))
def test_a_script_s_fault_is_named(row: Row, tmp_path: Path) -> None:
    """Module, direction, operation, cause and line; of some by the second time, as it happens."""
    for graded in grades_of_script(row, tmp_path):
        assert all(graded.right.values()), graded


@pytest.mark.parametrize("row", marked([row for row in CLEAN if row.can_be_a_script], [FAST_CLEAN[1]]))
def test_a_clean_script_raises_no_alarm(row: Row, tmp_path: Path) -> None:
    graded = grade_of_clean_script(row, tmp_path)
    assert not graded.alarms
    assert graded.silent == 0
