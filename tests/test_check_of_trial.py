"""A trial's check: a line for each place that failed, however its numbers varied."""

from __future__ import annotations

from pathlib import Path

from mezzo.core.finding import Finding, TensorFacts
from mezzo.core.records import OverflowRecord
from mezzo.verify.calibrate import check_of
from mezzo.verify.runs import FinishedRun

RUN = FinishedRun("trial", None, (), (), None, None, Path("none.log"))


def found(update: int, size: float, op: str = "linear") -> OverflowRecord:
    went_in = [TensorFacts("input 0", [2], "fp32", size, 1.0, 0, 0, 0)]
    came_out = [TensorFacts("output", [2], "fp16", 1.0, 1.0, 0, 1, 0)]
    return OverflowRecord(update, 0, 0.0, 1.0, Finding("overflow", "2", op, inputs=went_in, outputs=came_out))


def test_one_place_is_one_line() -> None:
    told = check_of(RUN, [found(3, 1e6), found(4, 2e6), found(5, 7e4, "conv2d"), found(6, 3e6)]).findings
    assert len(told) == 2
    assert told[0].startswith("3 steps: forward of linear in 2: an input of 1e+06 does not fit fp16")
    assert told[1].startswith("step 5: forward of conv2d in 2")
