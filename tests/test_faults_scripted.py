"""The corpus as plain scripts under `mezzo run`: the same findings, though nothing in the script knows of Mezzo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from faults.clean import CLEAN, Clean
from faults.marks import NOT_NAMED_IN_SCRIPTS, marked
from faults.rows import FAULTS, Fault
from faults.score import grade_of_clean_script, grades_of_script, missed
from faults.scripted import can_be_one

FAST = ["an activation multiplied by 1e7", "the slope of a length at the origin"]
FAST_CLEAN = ["a causal mask of -inf"]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "row", marked([row for row in FAULTS if can_be_one(row)], FAST, NOT_NAMED_IN_SCRIPTS)
)
def test_a_script_s_fault_is_named(row: Fault, tmp_path: Path) -> None:
    """Module, direction, operation, cause and line; of some by the second time, as it happens."""
    for graded in grades_of_script(row, tmp_path):
        assert graded.found is not None, missed(graded)
        assert graded.named, missed(graded)
        assert graded.cause, missed(graded)
        assert graded.line, missed(graded)


@pytest.mark.parametrize("row", marked([row for row in CLEAN if can_be_one(row)], FAST_CLEAN))
def test_a_clean_script_raises_no_alarm(row: Clean, tmp_path: Path) -> None:
    graded = grade_of_clean_script(row, tmp_path)
    assert not graded.alarms
    assert graded.silent == 0
