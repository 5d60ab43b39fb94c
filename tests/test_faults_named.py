"""What the tracer says of the corpus of planted faults: every fault named, no alarm in a clean run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from faults.clean import CLEAN, Clean, of_clean
from faults.marks import ALARMS, CHANGED, FAST, FAST_CLEAN, NOT_MENDED, NOT_NAMED, marked
from faults.rows import FAULTS, Fault
from faults.runs import everything, of_fault
from faults.score import grade_of_clean, grades_of, missed, trials_of


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("row", marked(FAULTS, FAST, NOT_NAMED))
def test_a_fault_is_named(row: Fault) -> None:
    for graded in grades_of(row):
        assert graded.skipped
        assert graded.named, missed(graded)
        assert graded.cause, missed(graded)
        assert graded.line, missed(graded)


@pytest.mark.parametrize("row", marked(CLEAN, FAST_CLEAN, ALARMS))
def test_a_clean_run_raises_no_alarm(row: Clean) -> None:
    graded = grade_of_clean(row)
    assert graded.skips
    assert graded.quiet, [str(alarm) for alarm in graded.alarms]
    assert graded.silent == 0


def _same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.view(-1).nan_to_num(), other[name].view(-1).nan_to_num()), name
            assert torch.equal(value.isnan(), other[name].isnan()), name
        else:
            assert value == other[name], name


@pytest.mark.parametrize("row", marked([*FAULTS, *CLEAN], [*FAST, *FAST_CLEAN], CHANGED))
def test_tracing_changes_nothing(row: Fault | Clean) -> None:
    """Parameters, buffers, carried states, moments, loss scales and the generator: as without it, bit by bit."""
    ends: list[dict[str, Any]] = []
    run: Any = of_fault if isinstance(row, Fault) else of_clean
    for trace in (False, True):
        for _ in run(row, ended=lambda *training: ends.append(everything(*training)), trace=trace):
            pass
    _same(*ends)


OVERFLOWS = [row for row in FAULTS if any(e.cause == "overflow" for e in row.all_expected)]


@pytest.mark.parametrize("row", marked(OVERFLOWS, [FAST[0]], NOT_MENDED))
def test_a_policy_that_a_remedy_names_mends(row: Fault) -> None:
    """The same steps are taken, with the policy in force from the first step on."""
    for graded in grades_of(row):
        for trial in trials_of(row, graded):
            assert trial.mends, trial.policy


def test_an_overflow_that_fp32_holds_has_a_policy_for_remedy() -> None:
    row = next(row for row in FAULTS if row.name == FAST[0])
    (graded,) = grades_of(row)
    assert [trial.policy for trial in trials_of(row, graded) if trial.mends]
