"""Exact masters: the remainder's are those of a separate FP32 copy to the bit, and torch's to rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mezzo.optim import FusedOptimizer
from optimizer_steps import RULES, SHAPES, Rule, bits, gradients, parameters, run

STEPS = range(200)


def masters(optimizer: FusedOptimizer) -> list[Tensor]:
    return [optimizer.master(param) for group in optimizer.param_groups for param in group["params"]]


def furthest(left: list[Tensor], right: list[Tensor]) -> float:
    return max(float((one.double() - other.double()).abs().max()) for one, other in zip(left, right))


def trained(rule: Rule, dtype: torch.dtype, mode: str) -> FusedOptimizer:
    params = parameters(dtype)
    optimizer = rule.make(params, masters=mode)
    run(optimizer, params, STEPS, torch.bfloat16 if dtype is torch.bfloat16 else None)
    return optimizer


def torch_trained(rule: Rule, dtype: torch.dtype = torch.float32, **how: bool) -> list[Tensor]:
    params = parameters(dtype)
    run(rule.torch(params, **how), params, STEPS)
    return [param.detach() for param in params]


def loop_lion(lr: float, weight_decay: float, dtype: torch.dtype) -> list[Tensor]:
    weights = [param.detach().to(dtype) for param in parameters()]
    momenta = [torch.zeros_like(weight) for weight in weights]
    for step in STEPS:
        for w, m, grad in zip(weights, momenta, gradients(step)):
            g = grad.to(dtype)
            w.mul_(1 - lr * weight_decay)
            w.sub_(lr * (0.9 * m + (1 - 0.9) * g).sign())
            m.mul_(0.99).add_((1 - 0.99) * g)
    return weights


@pytest.mark.heavy
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_split_masters_equal_separate_ones_to_the_bit(rule: Rule) -> None:
    split, separate = trained(rule, torch.bfloat16, "split"), trained(rule, torch.bfloat16, "fp32")
    for one, other in zip(masters(split), masters(separate)):
        assert torch.equal(bits(one), bits(other))
    for one, other in zip(split.param_groups[0]["params"], separate.param_groups[0]["params"]):
        assert torch.equal(bits(one), bits(other))
        states = [name for name in split.state[one] if name.startswith(("exp", "mom"))]
        for name in states:
            assert torch.equal(bits(split.state[one][name]), bits(separate.state[other][name]))


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["split", "own"])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.theirs], ids=lambda rule: rule.name)
def test_masters_are_as_near_to_torch_s_loop_as_torch_s_fused_one(rule: Rule, dtype: torch.dtype) -> None:
    loop = torch_trained(rule, foreach=False, fused=False)
    allowed = 3 * furthest(torch_trained(rule, fused=True), loop) + 1e-7
    assert furthest(masters(trained(rule, dtype, "split")), loop) <= allowed


@pytest.mark.heavy
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.theirs], ids=lambda rule: rule.name)
def test_masters_are_as_near_to_fp64_as_torch_s_fused_one_is(rule: Rule) -> None:
    exact = torch_trained(rule, torch.float64, foreach=False, fused=False)
    allowed = 3 * furthest(torch_trained(rule, fused=True), exact) + 1e-7
    assert furthest(masters(trained(rule, torch.bfloat16, "split")), exact) <= allowed


@pytest.mark.heavy
def test_lion_is_as_near_to_a_loop_in_fp64_as_a_loop_in_fp32() -> None:
    rule = next(rule for rule in RULES if rule.name == "Lion")
    settings = (rule.settings["lr"], rule.settings["weight_decay"])
    exact, loop = loop_lion(*settings, torch.float64), loop_lion(*settings, torch.float32)
    assert (
        furthest(masters(trained(rule, torch.bfloat16, "split")), exact) <= 3 * furthest(loop, exact) + 1e-7
    )


def test_the_shapes_are_awkward() -> None:
    assert {len(shape) for shape in SHAPES} == {0, 1, 2}
    assert any(torch.Size(shape).numel() % 64 for shape in SHAPES)
