"""Remedies: each cause has one, each policy in them is a policy, and none is offered that cannot help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import mezzo
from mezzo.core.overflow import CAUSES, OUTSIDE, WEAK_OPS, OverflowReport, TensorFacts
from mezzo.core.remedies import POLICY, remedies, training_code, with_fix

MLP = "fp16,module.blocks.1.mlp=fp32"
NEXT = f"{MLP},module.blocks.2=fp32"
OPS = sorted({*WEAK_OPS, "exp", "mul", "linear", "half", "sum of gradients", "my own op", ""})


def fact(form: str = "fp16", largest: float = 12.0, name: str = "input 0", **counts: int) -> TensorFacts:
    return TensorFacts(name, [2, 3], form, largest, 0.5, **{"zeros": 0, "infinities": 0, "nans": 0, **counts})


def report(cause: str = "overflow", op: str = "mul", form: str = "fp16", **more: Any) -> OverflowReport:
    """A report with two inputs and an infinite output of a format."""
    given: dict[str, Any] = {
        "module": "blocks.1.mlp",
        "inputs": [fact(form), fact(form, name="input 1")],
        "outputs": [fact(form, infinities=1, name="output")],
    }
    return OverflowReport(cause, op=op, **{**given, **more})


def policies(told: list[str]) -> list[str]:
    return [text for one in told for text in POLICY.findall(one)]


@pytest.mark.parametrize("cause", list(CAUSES))
def test_every_cause_has_a_remedy_and_every_policy_in_it_is_one(cause: str) -> None:
    modules = ("blocks.1.mlp", "", OUTSIDE, "a module's own name")
    for direction in ("forward", "backward"):
        for module in modules:
            for op in OPS:
                for form in ("fp16", "bf16", "fp32"):
                    told = remedies(report(cause, op, form, module=module, direction=direction))
                    assert bool(told) == (cause != "unknown"), (op, form)
                    assert len(told) == len(set(told))
                    for text in policies(told):
                        mezzo.policy(text)


# case -> report, what its remedies name, what they must not
TOLD: dict[str, tuple[OverflowReport, list[str], list[str]]] = {
    "a product that FP32 holds": (report(inputs=[fact(largest=60000.0)] * 2), ["`fp16,op.mul=fp32`", f"`{MLP}`",
     "`bf16`"], ["clamp"]),
    "exp beyond FP32": (report(op="exp", outputs=[fact("fp32", infinities=1)]), ["88"], ["fp32`", "`bf16`"]),
    "an overflow of FP32 itself": (report(op="linear", form="fp32"), ["clamp"], ["fp32`", "`bf16`"]),
    "an op of FP32": (report(op="exp", inputs=[fact(largest=20.0)]), [f"`{MLP}`"], ["op.exp"]),
    "an op that no table has": (report(op="my own op"), [f"`{MLP}`"], ["op.my"]),
    "bf16": (report(form="bf16"), ["`bf16,op.mul=fp32`"], ["`bf16`", "fp16"]),
    "grown weights": (report(op="linear", inputs=[fact(), fact(largest=5e4, name="weight")]), ["lower learning rate",
     "clipping"], ["clip_norm"]),
    "1e-8 in fp16": (report("invalid", "div"), ["2**-24", "eps to the denominator", f"`{MLP}`"], ["op.div"]),
    "1e-8 in FP32": (report("invalid", "div", "fp32"), ["eps to the denominator"], ["2**-24", "fp32`"]),
    "a root in backward": (report("invalid", "sqrt", direction="backward"), ["infinite at 0"], []),
    "outside": (report(module=OUTSIDE), ['mezzo.autocast("fp32")'], ["module."]),
    "a bad batch": (report("input", "", module="", inputs=[fact(nans=3)]), ["3 NaN"], ["fp32`"]),
    "a running mean": (report("state", "running_mean"), ["reset_running_stats()"], ["fp32`"]),
    "a weight": (report("state", "weight"), ["blocks.1.mlp.weight", "clipping"], ["clip_norm", "fp32`"]),
    "the loss scale": (report("loss scale"), ["is dynamic", "growth_interval"], ["constant", "module."]),
}  # fmt: skip


@pytest.mark.parametrize("case", TOLD)
def test_what_is_offered(case: str) -> None:
    given, words, never = TOLD[case]
    told = "\n".join(remedies(given))
    assert [word for word in words if word not in told] == []
    assert [word for word in never if word in told] == []


# the run's policy (None: unknown), direction -> the policies that are offered
KEPT: dict[tuple[str | None, str], list[str]] = {
    (None, "forward"): [MLP, NEXT, "fp16,op.mul=fp32"],
    ("fp16,module.front=fp32,loss_scale=1024", "forward"): [
        "fp16,loss_scale=1024,module.front=fp32,module.blocks.1.mlp=fp32",
        "fp16,loss_scale=1024,module.front=fp32,module.blocks.1.mlp=fp32,module.blocks.2=fp32",
        "fp16,loss_scale=1024,op.mul=fp32,module.front=fp32",
    ],
    (MLP, "forward"): [NEXT, "fp16,op.mul=fp32,module.blocks.1.mlp=fp32"],
    ("fp16,op.mul=fp32", "backward"): [
        "fp16,op.mul=fp32,module.blocks.1.mlp=fp32",
        "fp16,op.mul=fp32,module.blocks.1.mlp=fp32,module.blocks.2=fp32",
    ],
    ("fp16,module.blocks.1.mlp=bf16", "forward"): [MLP, NEXT, "fp16,op.mul=fp32,module.blocks.1.mlp=bf16"],
    ("fp16,module.blocks.**=fp32", "forward"): ["fp16,op.mul=fp32,module.blocks.**=fp32"],
}


@pytest.mark.parametrize(("used", "direction"), KEPT)
def test_an_offered_policy_adds_to_the_runs_own(used: str | None, direction: str) -> None:
    given = report(propagators=["blocks.2: linear"], direction=direction)
    offered = policies(remedies(given, None if used is None else mezzo.policy(used)))
    assert offered == [*KEPT[used, direction], "bf16"]


def test_a_gpu_without_bf16_is_offered_fp32_and_policies_become_code() -> None:
    told = remedies(report(), has_bf16=False)
    assert "bf16" not in policies(told)
    assert policies(told)[-1] == "fp32"
    assert '`precision="fp32"` (FP32' in with_fix(told[-1], training_code)
    assert with_fix("clamp it: `x.clamp(max=3)`", training_code) == "clamp it: `x.clamp(max=3)`"


def test_a_number_that_did_not_fit_already_may_take_several_modules() -> None:
    passed = [f"blocks.{n}: linear" for n in (2, 3, 4, 5)]
    given = report(op="linear", inputs=[fact("fp32", 1e6)], propagators=passed)
    told = remedies(given, mezzo.policy("fp16"))
    assert "clamp the input" in told[0]
    assert [text.count("module.") for text in policies(told)] == [1, 2, 3, 4, 0, 0]
    back = remedies(replace(given, direction="backward"))
    assert "smaller gradients" in back[0]
    assert "module before it" in back[2]


@pytest.mark.parametrize(
    ("scale", "smaller"), [(2.0**30, 2.0**26), (1000.0, 32.0), (4.0, 1.0), (1.0, 1 / 16), (0.5, 0.5 / 16)]
)
def test_a_constant_scale_has_a_smaller_one_to_try(scale: float, smaller: float) -> None:
    offered = policies(remedies(report("loss scale"), scaling=mezzo.StaticLossScale(scale)))
    assert mezzo.policy(offered[0]).loss_scale == mezzo.policy(f"fp16,loss_scale={smaller!r}").loss_scale
    assert offered[1] == "fp16,loss_scale=dynamic"
