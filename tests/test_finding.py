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
        f"backward of div in the model: {CAUSES['invalid']}",
    ),
    "outside": (
        Finding("invalid", OUTSIDE, "log", "forward"),
        f"forward of log outside the model: {CAUSES['invalid']}",
    ),
    "an input": (Finding("input", inputs=[FACTS]), f"input 0: {CAUSES['input']}"),
    "a parameter": (
        Finding("state", "head", "weight", inputs=[TensorFacts("weight", [2], "fp32", 0.0, 0.0, 0, 1, 0)]),
        f"weight of head: {CAUSES['state']}",
    ),
    "nothing": (Finding("unknown", note="a call raised"), f"{CAUSES['unknown']}: a call raised"),
}


@pytest.mark.parametrize("name", SAID)
def test_the_sentence(name: str) -> None:
    finding, said = SAID[name]
    assert str(finding) == said


def test_a_tensor() -> None:
    assert str(FACTS) == "input 0 fp32 2x3, largest 1.5, 4 NaN"
    assert not FACTS.finite


def test_the_loss_scale_alone_does_not_alarm() -> None:
    assert [cause for cause in CAUSES if not Finding(cause).alarms] == ["loss scale"]
