"""The corpus of planted faults: each row is true, and the judge can tell right from wrong.

That a row is true is found out without a tracer (`faults/plain.py`): the fault makes its step fail and no other, in the
module that the row names; a clean run overflows, and is finite at a scale of 1 in every step. A few rows run with the
fast tests, all of them with the heavy ones. What the tracer says of them: `test_faults_named.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from faults.clean import CLEAN, AtScaleOne, Clean, of_clean
from faults.marks import FAST, FAST_CLEAN, marked
from faults.plain import Look, Looks
from faults.rows import FAULTS, Expected, Fault
from faults.runs import acting, of_fault
from faults.score import FaultGrade, grade, is_op, plain_name
from mezzo.core.finding import CAUSES, OUTSIDE, Finding

LOOKING = 14  # steps after which a scale that starts at 2^24 has found its place


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _before(row: Fault) -> int:
    return LOOKING if row.scale > 2.0**20 else 0


def test_the_corpus_is_large_enough_and_its_names_are_its_own() -> None:
    names = [row.name for row in (*FAULTS, *CLEAN)]
    assert len(names) == len(set(names))
    assert len(FAULTS) >= 40
    assert len(CLEAN) >= 20
    assert {row.family for row in FAULTS} == {"CNN", "transformer", "recurrent", "GAN", "perceptron"}
    assert {row.family for row in CLEAN} == {"CNN", "transformer", "recurrent", "GAN", "perceptron"}
    expected = [e for row in FAULTS for e in row.all_expected]
    assert {e.cause for e in expected} == {"overflow", "invalid", "input", "state"}
    assert {e.cause for e in expected} <= set(CAUSES)


@pytest.mark.parametrize("row", marked(FAULTS, FAST))
def test_a_fault_is_what_its_row_says(row: Fault) -> None:
    """The step fails when the fault acts and not before, where the row says, and in FP32 as the row says."""
    looks = Looks({})

    def make() -> Any:
        trainee = row.make()
        looks.models = trainee.models
        return trainee

    turns = list(of_fault(replace(row, make=make), looks, _before(row), trace=False))
    acts = acting(row)
    skipped = {(turn.number, turn.part) for turn in turns if turn.result.skipped and turn.number >= 0}
    parts = {e.part for e in row.all_expected}
    assert {number for number, _ in skipped} == set(acts)
    assert parts <= {part for _, part in skipped}

    if row.seen:
        for expected in row.all_expected:
            told = [look.says() for part, look in looks.looks if part == expected.part]
            made = (
                "made"
                if expected.cause in ("overflow", "invalid") or expected.module == OUTSIDE
                else expected.cause
            )
            paths = [expected.module, expected.also] if expected.also else [expected.module]
            assert any((path, expected.direction, made) in told for path in paths)

    if row.mended is not None and "weights" not in row.options:
        fp32 = of_fault(row, precision="fp32", scale=1.0, trace=False)
        assert any(turn.result.skipped for turn in fp32) is not row.mended


@pytest.mark.parametrize("row", marked(CLEAN, FAST_CLEAN))
def test_a_clean_run_is_clean(row: Clean) -> None:
    """It overflows, and every step of it is finite at a scale of 1, in the same formats."""
    plain = AtScaleOne()
    turns = list(of_clean(row, plain, trace=False))
    assert any(turn.result.skipped for turn in turns)
    assert all(plain.finite)
    # Looking twice has changed nothing.
    again = list(of_clean(row, trace=False))
    assert [t.result.skipped for t in again] == [t.result.skipped for t in turns]
    assert [t.result.loss for t in again] == pytest.approx([t.result.loss for t in turns], rel=0, abs=0)


# ------------------------------------------------------------------------------------ the judge, judged

_ROW = FAULTS[0]
_RIGHT = Finding("overflow", "tail", "mul", line="plants.py:1: x * self.times(1e7)")


def _graded(found: Finding | None, expected: Expected | None = None) -> FaultGrade:
    return grade(_ROW, expected or _ROW.all_expected[0], found, True, None)


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (_RIGHT, []),
        (None, ["module", "direction", "op", "cause", "line"]),
        (replace(_RIGHT, module="head"), ["module"]),
        (replace(_RIGHT, module=OUTSIDE), ["module"]),
        (replace(_RIGHT, direction="backward"), ["direction"]),
        (replace(_RIGHT, op="exp"), ["op"]),
        (replace(_RIGHT, cause="loss scale"), ["cause"]),
        (replace(_RIGHT, line=""), ["line"]),
        (replace(_RIGHT, op="MulBackward0"), []),
        (replace(_RIGHT, op="Tensor.__mul__"), []),
    ],
    ids=lambda value: None,
)
def test_a_grade_says_what_is_wrong(found: Finding | None, wrong: list[str]) -> None:
    graded = _graded(found)
    named = {"module", "direction", "op"}
    assert [
        what for what in ("module", "direction", "op", "cause", "line") if not getattr(graded, what)
    ] == wrong
    assert graded.named is not bool(named & set(wrong))


def test_a_grade_takes_either_of_two_paths_and_any_op_where_none_is_named() -> None:
    expected = Expected("", "", "input", also="conv1")
    for module, right in (("", True), ("conv1", True), ("conv2", False)):
        assert _graded(Finding("input", module, "whatever"), expected).named is right


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("Tensor.__truediv__", "truediv"),
        ("DivBackward0", "div"),
        ("torch.nn.functional.layer_norm", "layernorm"),
        ("ToCopyBackward0", "tocopy"),
        ("_CarelessBackward", "careless"),
    ],
)
def test_names_of_operations(op: str, name: str) -> None:
    assert plain_name(op) == name


def test_families_of_operations() -> None:
    assert is_op("AddmmBackward0", "linear")
    assert is_op("aten::native_layer_norm", "layer_norm")
    assert is_op("exp", "exp")
    assert not is_op("exp", "log")
    assert is_op("exp", "")


@pytest.mark.parametrize(
    ("look", "says"),
    [
        (Look(inputs_finite=False, bad_state=["head"]), ("", "forward", "input")),
        (Look(bad_state=["head"], outputs_finite=False), ("head", "forward", "state")),
        (Look(loss_finite=False), (OUTSIDE, "forward", "made")),
        (Look(outputs_finite=False, loss_finite=False, forward=["a", ""]), ("a", "forward", "made")),
        (Look(arriving_finite=False, backward=["a"]), (OUTSIDE, "backward", "made")),
        (Look(backward=["a", ""]), ("a", "backward", "made")),
    ],
    ids=["input", "state", "loss", "forward", "from outside", "backward"],
)
def test_what_a_plain_look_says(look: Look, says: tuple[str, str, str]) -> None:
    assert look.says() == says
