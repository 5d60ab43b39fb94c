"""The lines that end a run: skipped steps that nobody looked into, a constant scale, what to try."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launching import Ran, launcher
from mezzo.core.finding import Finding, Maker, TensorFacts
from mezzo.core.records import OverflowRecord
from mezzo.pytorch.launch import summary
from mezzo.pytorch.launch.summary import findings
from mezzo.pytorch.monitor.overflow_tracer import OverflowTracer

BAD = Finding("invalid", module="net", op="log", remedies=["one", "two", "three", "four", "five"])
PROBE = Finding("loss scale")


def records(*found: Finding) -> list[OverflowRecord]:
    return [OverflowRecord(n, 0, 0.0, 1024.0, one) for n, one in enumerate(found)]


# findings, skipped steps -> the last line
LAST: dict[str, tuple[list[Finding], int, str]] = {
    "the tracer's limit": (
        [BAD] * 20,
        40,
        "and 20 more skipped steps that were not looked into: Mezzo stops looking after 20 findings",
    ),
    "one more": (
        [BAD] * 20,
        21,
        "and 1 more skipped step that was not looked into: Mezzo stops looking after 20 findings",
    ),
    "another reason": ([PROBE, BAD], 5, "and 3 more skipped steps that were not looked into"),
    "none": ([], 4, "4 skipped steps that were not looked into"),
    "all": ([PROBE], 1, "1 skipped step was the loss scale finding its place"),
}


@pytest.mark.parametrize("case", LAST)
def test_skipped_steps_that_nobody_looked_into_are_counted(case: str) -> None:
    found, skipped, said = LAST[case]
    assert findings(records(*found), skipped=skipped)[-1] == said


def test_the_limit_that_is_told_is_the_tracer_s() -> None:
    assert inspect.signature(OverflowTracer).parameters["limit"].default == summary._LOOKED_INTO


def test_three_remedies_are_told_and_where_the_others_are() -> None:
    told = findings(records(BAD), recorded=True)[1:]
    assert told == [
        "  try: one",
        "   or: two",
        "   or: three",
        "  and 2 more in the records and the report that is made of them",
    ]
    assert findings(records(BAD))[-1] == "  and 2 more in the report of --out DIR"


def test_one_place_is_told_once_whatever_its_numbers() -> None:
    def too_large(size: float) -> Finding:
        went_in = TensorFacts("input 0", [2], "fp32", size, 1.0, 0, 0, 0)
        came_out = TensorFacts("output", [2], "fp16", 1.0, 1.0, 0, 1, 0)
        maker = Maker("1", "mul", "net.py:3: x * 1e6", replace(went_in, name="output"))
        return Finding("overflow", "2", "linear", inputs=[went_in], outputs=[came_out], maker=maker)

    told = findings(records(too_large(1e6), too_large(2e6), too_large(3e6)))
    assert told == [
        "update 0 skipped, and 2 later ones: forward of linear in 2: an input of 1e+06 does not fit fp16, whose "
        "largest number is 65504; it was made by mul in 1 (net.py:3: x * 1e6), in fp32"
    ]
    assert len(findings(records(too_large(1e6), replace(too_large(1e6), maker=None)))) == 2


def test_a_constant_scale_finds_no_place() -> None:
    told = findings(records(*[PROBE] * 50), skipped=50, constant=1024.0)
    assert (
        told[0] == "50 steps were skipped because the constant loss scale 2^10 is too large for the gradients"
    )
    assert "`fp16,loss_scale=64`" in told[1]
    assert "finding its place" not in "".join(told)
    assert findings(records(PROBE), constant=1e3)[0] == (
        "1 step was skipped because the constant loss scale 1000 is too large for the gradients"
    )


CONSTANT = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for _ in range(STEPS):
    loss = model(torch.full((2, 4), VALUE)).sum()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.fixture
def launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    return launcher(tmp_path, capsys)


def test_a_run_says_all_of_it(launch: Callable[..., Ran]) -> None:
    ran = launch(CONSTANT.replace("STEPS", "3").replace("VALUE", "1.0"), policy="fp16,loss_scale=1073741824")
    assert "mezzo: 3 steps were skipped because the constant loss scale 2^30 is too large" in ran.err
    assert "`fp16,loss_scale=67108864`" in ran.err
    assert "mezzo: loss scale 2^30 at the end" in ran.err
    ran = launch(CONSTANT.replace("STEPS", "22").replace("VALUE", "3e20"), policy="fp16,loss_scale=1024")
    assert "an input of 3e+20 does not fit fp16, whose largest number is 65504" in ran.err
    assert "mezzo: and 2 more skipped steps that were not looked into: Mezzo stops" in ran.err
