"""A remedy names modules: with two models it says whose policy it is, and each that is told is taken."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

import mezzo


class Large(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 7e6 / 7e6


class Critic(nn.Sequential):
    pass


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4)), Critic(nn.Linear(4, 4), nn.Tanh(), Large(), nn.Linear(4, 1))


def trained(model: nn.Module, policy: str) -> Any:
    scale = mezzo.DynamicLossScale(init=1.0)
    return mezzo.MixedPrecision(
        model, torch.optim.SGD(model.parameters(), lr=0.1), policy, trace=True, loss_scale=scale
    )


def step(mine: Any, first: nn.Module, second: nn.Module) -> Any:
    with mine.autocast():
        loss = second(first(torch.randn(8, 4))).square().mean()
    return mine.step(loss)


def of_modules(finding: Any) -> list[str]:
    return [one for one in finding.remedies if "module." in one]


def test_it_is_for_the_other_models_own_policy() -> None:
    generator, critic = networks()
    of_generator, of_critic = trained(generator, "fp16"), trained(critic, "fp16,op.gelu=fp32")
    finding = step(of_generator, generator, critic).finding
    assert finding.module == "2"
    told = of_modules(finding)
    assert told
    assert all("the policy of the MixedPrecision of that module's own model (Critic)" in one for one in told)
    policies = [re.findall(r"`(fp16[^`]*)`", one)[0] for one in told]
    assert all("op.gelu=fp32" in policy for policy in policies)
    of_generator.close()
    of_critic.close()
    for policy in policies:
        of_generator, of_critic = trained(generator, "fp16"), trained(critic, policy)
        assert step(of_generator, generator, critic).moved
        of_generator.close()
        of_critic.close()


def test_its_own_models_is_told_as_it_is() -> None:
    generator, critic = networks()
    of_generator, of_critic = trained(generator, "fp16"), trained(critic, "fp16")
    told = of_modules(step(of_critic, generator, critic).finding)
    assert told
    assert not any("MixedPrecision" in one for one in told)
    of_generator.close()
    of_critic.close()
