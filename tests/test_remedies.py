"""Remedies: each cause has one, each policy that is suggested is a policy, and none is suggested that can't help."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import mezzo
from mezzo.core.overflow import CAUSES, OUTSIDE, Maker, OverflowReport, TensorFacts
from mezzo.core.remedies import of_constant_scale, remedies
from mezzo.core.rules import RULES
from mezzo.core.weak_ops import WEAK_OPS, mends_of

OPS = sorted({*WEAK_OPS, "exp", "mul", "linear", "half", "sum of gradients", "my own op", ""})


def fact(form: str = "fp16", largest: float = 12.0, name: str = "input 0", **counts: int) -> TensorFacts:
    told = {"zeros": 0, "infinities": 0, "nans": 0, **counts}
    return TensorFacts(name, [2, 3], form, largest, 0.5, **told)


def finding(cause: str = "overflow", op: str = "mul", **more: Any) -> OverflowReport:
    given: dict[str, Any] = {
        "module": "blocks.1.mlp",
        "inputs": [fact(), fact(name="input 1")],
        "outputs": [fact(infinities=1, name="output")],
    }
    return OverflowReport(cause, op=op, **{**given, **more})


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("module", ["blocks.1.mlp", "", OUTSIDE, "a module's own name"])
@pytest.mark.parametrize("cause", list(CAUSES))
def test_every_cause_has_a_remedy_and_every_policy_in_it_is_one(
    cause: str, module: str, direction: str
) -> None:
    for op in OPS:
        for form in ("fp16", "bf16", "fp32"):
            told = remedies(
                finding(
                    cause, op, module=module, direction=direction, inputs=[fact(form)], outputs=[fact(form)]
                )
            )
            assert bool(told) == (cause != "unknown"), (op, form)
            assert len(told) == len(set(told))
            for sentence in told:
                for text in re.findall(r"`((?:fp16|bf16|fp32)[^`]*)`", sentence):
                    mezzo.policy(text)


def first(cause: str, op: str, **more: Any) -> str:
    return remedies(finding(cause, op, **more))[0]


# what was found -> words that its remedies have -> words that they must not have
TOLD: dict[str, tuple[OverflowReport, list[str], list[str]]] = {
    "a product that FP32 holds": (
        finding(inputs=[fact(largest=60000.0)] * 2),
        ["`fp16,op.mul=fp32`", "`fp16,module.blocks.1.mlp=fp32`", "`bf16`"],
        ["clamp"],
    ),
    "a product that FP32 does not hold": (
        finding(inputs=[fact("bf16", 1e20)] * 2, outputs=[fact("bf16", infinities=1)]),
        ["clamp"],
        ["fp32`"],
    ),
    "an exponential that FP32 does not hold": (
        finding(op="exp", inputs=[fact(largest=2000.0)]),
        ["88"],
        ["fp32`", "`bf16`"],
    ),
    "an overflow of FP32 itself": (
        finding(op="linear", inputs=[fact("fp32")], outputs=[fact("fp32", infinities=1)]),
        ["clamp"],
        ["fp32`", "`bf16`"],
    ),
    "an op that is FP32's already": (
        finding(op="exp", inputs=[fact(largest=20.0)]),
        ["`fp16,module.blocks.1.mlp=fp32`"],
        ["op.exp"],
    ),
    "an op that no table has": (finding(op="my own op"), ["`fp16,module.blocks.1.mlp=fp32`"], ["op.my"]),
    "bf16": (
        finding(inputs=[fact("bf16")], outputs=[fact("bf16", infinities=1)]),
        ["`bf16,op.mul=fp32`"],
        ["`bf16`", "fp16"],
    ),
    "grown weights": (
        finding(op="linear", inputs=[fact(), fact(largest=5e4, name="weight")]),
        ["a lower learning rate: the weights have grown large; clipping the gradients' norm helps where"],
        ["clip_norm"],
    ),
    "1e-8 in fp16": (
        finding("invalid", "div"),
        ["2**-24", "eps to the denominator", "`fp16,module.blocks.1.mlp=fp32`"],
        ["op.div"],
    ),
    "1e-8 in FP32": (
        finding("invalid", "div", inputs=[fact("fp32")], outputs=[fact("fp32", nans=1)]),
        ["eps to the denominator"],
        ["2**-24", "fp32`"],
    ),
    "a root in backward": (finding("invalid", "sqrt", direction="backward"), ["slope is infinite at 0"], []),
    "outside": (finding(module=OUTSIDE), ['mezzo.autocast("fp32")'], ["module."]),
    "a bad batch": (finding("input", "", module="", inputs=[fact(nans=3)]), ["3 NaN"], ["fp32`"]),
    "a running mean": (finding("state", "running_mean"), ["reset_running_stats()"], ["fp32`"]),
    "a weight": (
        finding("state", "weight"),
        ["blocks.1.mlp.weight", "clipping the gradients' norm"],
        ["clip_norm", "fp32`"],
    ),
    "the loss scale": (
        finding("loss scale"),
        ["if the loss scale is dynamic", "if it is a constant"],
        ["module."],
    ),
}


@pytest.mark.parametrize("case", list(TOLD))
def test_what_is_told(case: str) -> None:
    given, words, never = TOLD[case]
    told = "\n".join(remedies(given))
    assert [word for word in words if word not in told] == []
    assert [word for word in never if word in told] == []


def test_ops_with_a_sentence_of_their_own_are_called_as_the_table_calls_them() -> None:
    beyond = {"atanh", "gradient hook", "sqrt"}
    assert {op for op in WEAK_OPS if op not in RULES} <= beyond


@pytest.mark.parametrize("op", WEAK_OPS)
def test_where_it_is_said_what_an_op_lacks_it_is_said_what_mends_that(op: str) -> None:
    weak = WEAK_OPS[op]
    assert not weak.result or list(mends_of(op, "forward"))
    assert not weak.slope or list(mends_of(op, "backward"))


def test_what_is_nearest_to_the_finding_comes_first() -> None:
    told = remedies(finding("invalid", "div"))
    assert told[0].startswith("an eps of at least 2**-24 (6e-8), better 1e-5")
    assert told[1].startswith("add an eps")
    told = remedies(finding(propagators=["blocks.2: linear"]))
    policies = [text for one in told for text in re.findall(r"`(fp16,[^`]*)`", one)]
    assert policies == [
        "fp16,module.blocks.1.mlp=fp32",
        "fp16,module.blocks.1.mlp=fp32,module.blocks.2=fp32",
        "fp16,op.mul=fp32",
    ]


def policies(told: list[str]) -> list[str]:
    return [text for one in told for text in re.findall(r"`((?:fp16|bf16)[^`]*)`", one)]


# the run's policy, direction -> the policies that are told
KEPT: dict[tuple[str, str], list[str]] = {
    ("fp16,module.front=fp32,loss_scale=1024", "forward"): [
        "fp16,loss_scale=1024,module.front=fp32,module.blocks.1.mlp=fp32",
        "fp16,loss_scale=1024,module.front=fp32,module.blocks.1.mlp=fp32,module.blocks.2=fp32",
        "fp16,loss_scale=1024,op.mul=fp32,module.front=fp32",
        "bf16",
    ],
    ("fp16,module.blocks.1.mlp=fp32", "forward"): [
        "fp16,module.blocks.1.mlp=fp32,module.blocks.2=fp32",
        "fp16,op.mul=fp32,module.blocks.1.mlp=fp32",
        "bf16",
    ],
    ("fp16,op.mul=fp32", "backward"): [
        "fp16,op.mul=fp32,module.blocks.1.mlp=fp32",
        "fp16,op.mul=fp32,module.blocks.1.mlp=fp32,module.blocks.2=fp32",
        "bf16",
    ],
    ("fp16,module.blocks.1.mlp=bf16", "forward"): [
        "fp16,module.blocks.1.mlp=fp32",
        "fp16,module.blocks.1.mlp=fp32,module.blocks.2=fp32",
        "fp16,op.mul=fp32,module.blocks.1.mlp=bf16",
        "bf16",
    ],
    ("fp16,module.blocks.**=fp32", "forward"): ["fp16,op.mul=fp32,module.blocks.**=fp32", "bf16"],
}


@pytest.mark.parametrize(("used", "direction"), KEPT)
def test_a_policy_that_is_told_keeps_the_run_s_own_and_is_another(used: str, direction: str) -> None:
    given = finding(propagators=["blocks.2: linear"], direction=direction)
    assert policies(remedies(given, mezzo.policy(used))) == KEPT[used, direction]


def test_a_number_made_before_is_to_be_made_smaller_there_and_may_take_several_modules() -> None:
    maker = Maker("front", "exp", "net.py:3: x.exp()", fact("fp32", 1e6, "output"))
    passed = [f"blocks.{n}: linear" for n in (2, 3, 4, 5)]
    told = remedies(finding(op="linear", maker=maker, propagators=passed), mezzo.policy("fp16"))
    assert told[0] == "scale, normalise or clamp what is made by exp in front (net.py:3: x.exp())"
    assert [text.count("module.") for text in policies(told)] == [1, 2, 3, 4, 0, 0]
    assert "this module and the 3 after it in FP32" in told[4]
    back = remedies(finding(op="float", maker=maker, propagators=passed, direction="backward"))
    assert back[0].startswith("smaller gradients where they are made, exp in front")
    assert "the one before it in FP32" in back[2]
    given = replace(maker, op="", module="", result=fact("fp32", 1e6))
    assert remedies(finding(maker=given))[0] == "smaller numbers in input 0 of the model: normalised, say"


@pytest.mark.parametrize(
    ("scale", "smaller"), [(2.0**30, 2.0**26), (1000.0, 32.0), (4.0, 1.0), (1.0, 1 / 16), (0.5, 0.5 / 16)]
)
def test_a_constant_scale_has_a_smaller_one_to_try(scale: float, smaller: float) -> None:
    told = of_constant_scale(scale)
    first = re.findall(r"`(fp16,[^`]*)`", told[0])[0]
    assert mezzo.policy(first).loss_scale == mezzo.policy(f"fp16,loss_scale={smaller!r}").loss_scale
    assert "fp16,loss_scale=dynamic" in told[1]


# ------------------------------------------------------------------------------------------ the sentence of a finding

BAD = fact("fp32", 1.5, nans=4)

# finding -> what its sentence has to name
SAID: dict[str, tuple[OverflowReport, list[str]]] = {
    "an operation": (
        OverflowReport("overflow", "blocks.2", "exp", "forward", line="net.py:9: x.exp()"),
        ["forward of exp in blocks.2 (net.py:9: x.exp())", CAUSES["overflow"]],
    ),
    "a slope": (
        OverflowReport("invalid", "", "div", "backward"),
        ["backward of div in the model", "divisor is 0"],
    ),
    "outside": (
        OverflowReport("invalid", OUTSIDE, "log"),
        ["forward of log outside the model", "only above 0"],
    ),
    "no known case": (OverflowReport("invalid", "", "my_op"), ["my_op in the model", "no finite result"]),
    "an input": (OverflowReport("input", inputs=[BAD]), ["input 0", CAUSES["input"]]),
    "a parameter": (
        OverflowReport("state", "head", "weight", inputs=[fact("fp32", 0.0, "weight", infinities=1)]),
        ["weight of head", CAUSES["state"]],
    ),
    "nothing": (OverflowReport("unknown", note="a call raised"), [CAUSES["unknown"], "a call raised"]),
    "not run again": (
        OverflowReport("unknown", note="no update", how="Concluded"),
        ["can't be run again", "no update"],
    ),
    "the loss": (OverflowReport("loss", note="the loss was nan"), [CAUSES["loss"], "the loss was nan"]),
}


@pytest.mark.parametrize("name", SAID)
def test_a_finding_s_sentence_names_place_and_cause(name: str) -> None:
    given, words = SAID[name]
    assert [word for word in words if word not in str(given)] == []


def test_what_is_told_of_a_tensor_and_which_findings_alarm_and_are_the_same() -> None:
    assert str(BAD) == "input 0 fp32 2x3, largest 1.5, 4 NaN"
    assert not BAD.finite
    assert [cause for cause in CAUSES if not OverflowReport(cause).alarms] == ["loss scale"]
    nan, infinite = (OverflowReport("loss", note=f"the loss was {number}") for number in ("nan", "inf"))
    assert nan.place != infinite.place


# what went in -> the format of what came out -> what does not fit
BEYOND: dict[str, tuple[list[TensorFacts], str, str]] = {
    "an input": ([fact("fp32", 3e20), fact("fp32", 1.0, "weight")], "fp16", "an input of 3e+20"),
    "a weight": ([fact("fp32", 1.0), fact("fp32", 7e4, "weight")], "fp16", "a weight of 7e+04"),
    "rounded to the largest": ([fact("fp32", 65519.0)], "fp16", ""),
    "rounded to infinity": ([fact("fp32", 65520.0)], "fp16", "an input of 6.552e+04"),
    "bf16 holds it": ([fact("fp32", 3e20)], "bf16", ""),
    "FP32 computes": ([fact("fp32", 3e20)], "fp32", ""),
    "nothing known": ([], "fp16", ""),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_number_that_did_not_fit_before_is_told_from_a_result_that_does_not(name: str) -> None:
    inputs, form, what = BEYOND[name]
    given = OverflowReport(
        "overflow", "head", "linear", inputs=inputs, outputs=[fact(form, 1.0, infinities=1)]
    )
    assert f"{what} does not fit fp16" in str(given) if what else CAUSES["overflow"] in str(given)
