"""What a finding says of itself, in a sentence."""

from __future__ import annotations

import pytest

from mezzo.core.finding import CAUSES, OUTSIDE, Finding, TensorFacts

FACTS = TensorFacts("input 0", [2, 3], "fp32", 1.5, 0.5, 0, 0, 4)

# finding -> its sentence
SAID: dict[str, tuple[Finding, str]] = {
    "an operation": (
        Finding("overflow", "blocks.2", "exp", "forward", line="net.py:9: x.exp()"),
        f"forward of exp in blocks.2 (net.py:9: x.exp()): {CAUSES['overflow']}",
    ),
    "in the model itself": (
        Finding("invalid", "", "div", "backward"),
        "backward of div in the model: the operation has no finite slope for what went in: that of a division is "
        "infinite where the divisor is 0",
    ),
    "outside": (
        Finding("invalid", OUTSIDE, "log", "forward"),
        "forward of log outside the model: the operation has no finite result for what went in: a logarithm has one "
        "only above 0",
    ),
    "an operation of which no case is known": (
        Finding("invalid", "", "my_op", "forward"),
        "forward of my_op in the model: the operation has no finite result for what went in",
    ),
    "an input": (Finding("input", inputs=[FACTS]), f"input 0: {CAUSES['input']}"),
    "a parameter": (
        Finding("state", "head", "weight", inputs=[TensorFacts("weight", [2], "fp32", 0.0, 0.0, 0, 1, 0)]),
        f"weight of head: {CAUSES['state']}",
    ),
    "nothing": (Finding("unknown", note="a call raised"), f"{CAUSES['unknown']}: a call raised"),
    "nothing, of a step that was not run again": (
        Finding("unknown", note="no update was kept", how="Concluded from what followed"),
        "what made it is not known, and the step can't be run again: no update was kept",
    ),
    "the loss": (Finding("loss", note="the loss was nan"), f"{CAUSES['loss']} (the loss was nan)"),
}


@pytest.mark.parametrize("name", SAID)
def test_the_sentence(name: str) -> None:
    finding, said = SAID[name]
    assert str(finding) == said


def test_a_tensor() -> None:
    assert str(FACTS) == "input 0 fp32 2x3, largest 1.5, 4 NaN"
    assert not FACTS.finite


def test_a_loss_that_is_nan_is_another_finding_than_one_that_is_infinite() -> None:
    nan, infinite = (Finding("loss", note=f"the loss was {number}") for number in ("nan", "inf"))
    assert nan.place != infinite.place


def test_the_loss_scale_alone_does_not_alarm() -> None:
    assert [cause for cause in CAUSES if not Finding(cause).alarms] == ["loss scale"]


def facts(name: str, form: str, largest: float, infinities: int = 0) -> TensorFacts:
    return TensorFacts(name, [2], form, largest, 0.5, 0, infinities, 0)


# what went in -> the format of what came out -> what is said of it
BEYOND: dict[str, tuple[list[TensorFacts], str, str]] = {
    "an input": (
        [facts("input 0", "fp32", 3e20), facts("weight", "fp32", 1.0)],
        "fp16",
        "an input of 3e+20 does not fit fp16, whose largest number is 65504: the place that made it is before this one",
    ),
    "a weight": (
        [facts("input 0", "fp32", 1.0), facts("weight", "fp32", 7e4)],
        "fp16",
        "a weight of 7e+04 does not fit fp16, whose largest number is 65504",
    ),
    "rounded to the largest": ([facts("input 0", "fp32", 65519.0)], "fp16", CAUSES["overflow"]),
    "rounded to infinity": (
        [facts("input 0", "fp32", 65520.0)],
        "fp16",
        "an input of 6.552e+04 does not fit fp16",
    ),
    "bf16 holds it": ([facts("input 0", "fp32", 3e20)], "bf16", CAUSES["overflow"]),
    "FP32 computes": ([facts("input 0", "fp32", 3e20)], "fp32", CAUSES["overflow"]),
    "nothing known": ([], "fp16", CAUSES["overflow"]),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_number_that_did_not_fit_before_is_told_from_a_result_that_does_not(name: str) -> None:
    inputs, form, said = BEYOND[name]
    found = Finding("overflow", "head", "linear", inputs=inputs, outputs=[facts("output", form, 1.0, 1)])
    assert str(found).startswith(f"forward of linear in head: {said}")


def test_the_loss_scale_is_told_so_that_it_is_true_of_a_constant_as_well() -> None:
    assert CAUSES["loss scale"].endswith("a dynamic scale probes for that, a constant one is too large")
