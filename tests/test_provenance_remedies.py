"""The maker of a number that FP32 holds and fp16 does not, and remedies that were tried."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.core.overflow import OverflowReport
from mezzo.core.records import OverflowRecord, from_line, to_line


class Grows(nn.Module):
    """Makes numbers of a million, which FP32 holds."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.float()) * 1e6


class Raises(nn.Module):
    """By an op that is FP32's by its rule."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x.clamp(-1, 1) + 14.0)


class Calms(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1e-6


def layers(place: nn.Module, *after: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), place, nn.ReLU(), nn.Linear(6, 6), *after, nn.Linear(6, 2))


def found(model: nn.Module, precision: str = "fp16", factor: float = 1.0) -> OverflowReport:
    finding = result(model, precision, factor).finding
    assert finding is not None
    return finding


def result(model: nn.Module, precision: str, factor: float = 1.0) -> Any:
    """Of one step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mp = mezzo.MixedPrecision(model, optimizer, precision, loss_scale=1.0, trace=True)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) * factor
    with mp.autocast():
        loss = model(x).float().mean() * 1e-3
    stepped = mp.step(loss)
    mp.close()
    return stepped


def policies(finding: OverflowReport) -> list[str]:
    return [text for one in finding.remedies for text in re.findall(r"`((?:fp16|bf16)[^`]*)`", one)]


class Both(nn.Module):
    """Makes it, and takes it in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(torch.exp(x.clamp(-1, 1) + 14.0), self.weight) * 1e-6


# model, policy -> where it became infinite, who made it
MADE: dict[str, tuple[Any, str, str, tuple[str, str]]] = {
    "kept in FP32": (Grows, "fp16,module.1=fp32", "3", ("1", "mul")),
    "passed on": (
        lambda: nn.Sequential(Grows(), nn.Identity(), nn.ReLU()),
        "fp16,module.1=fp32",
        "3",
        ("1.0", "mul"),
    ),
    "FP32 by its rule": (Raises, "fp16", "3", ("1", "exp")),
    "within the module": (Both, "fp16", "1", ("1", "exp")),
}


@pytest.mark.parametrize("name", MADE)
def test_who_made_it_is_told_beside_who_took_it_in_fp16(name: str) -> None:
    make, precision, module, made = MADE[name]
    told = found(layers(make()), precision)
    assert (told.cause, told.module, told.op, told.direction) == ("overflow", module, "linear", "forward")
    assert told.maker is not None
    assert (told.maker.module, told.maker.op) == made
    assert told.maker.result.format == "fp32"
    assert told.maker.result.largest > 65504
    assert f"made by {made[1]} in {made[0]} (" in str(told)
    record = OverflowRecord(1, 0, 0.5, 1.0, told)
    assert from_line(to_line(record)) == record


def test_a_weight_and_what_the_model_is_given() -> None:
    model = layers(nn.Identity())
    with torch.no_grad():
        model[3].weight[0, 0] = 1e5
    told = found(model)
    assert str(told).endswith("a weight of 1e+05 does not fit fp16, whose largest number is 65504")

    told = found(layers(nn.Identity()), factor=1e6)
    assert (told.module, told.op) == ("0", "linear")
    assert told.maker is not None
    assert (told.maker.op, told.maker.result.name) == ("", "input 0")
    assert str(told).endswith("; it comes of input 0 of the model")


CASES: dict[str, tuple[Any, str, set[str]]] = {
    "forward, one reader": (
        lambda: layers(Grows(), Calms()),
        "fp16,module.1=fp32",
        {"fp16,module.1=fp32,module.3=fp32", "fp16,op.linear=fp32,module.1=fp32", "bf16"},
    ),
    "forward, several readers": (
        lambda: layers(Grows(), nn.Linear(6, 6)),
        "fp16,module.1=fp32,loss_scale=1",
        {"fp16,loss_scale=1,module.1=fp32,module.3=fp32,module.4=fp32,module.5=fp32", "bf16"},
    ),
    "forward, by rule": (
        lambda: layers(Raises()),
        "fp16",
        {"fp16,module.3=fp32,module.4=fp32", "bf16"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_told_mends_and_is_not_what_was_so_already(name: str) -> None:
    make, precision, some = CASES[name]
    told = found(make(), precision)
    offered = policies(told)
    assert some <= set(offered), offered
    assert precision not in offered
    kept = [text for text in offered if text.startswith("fp16")]
    assert all(set(mezzo.policy(precision).modules) <= set(mezzo.policy(text).modules) for text in kept)
    for text in offered:
        assert result(make(), text).stepped, text
    first = told.remedies[0]
    assert told.maker is not None
    assert f"{told.maker.op} in {told.maker.module}" in first


def test_the_maker_is_told_of_a_loss_that_is_watched_live() -> None:
    model = layers(nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mp = mezzo.MixedPrecision(model, optimizer, "fp16", loss_scale=1.0, trace=True)
    for number in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        with mp.autocast():
            wide = model(x).float() + 1e6
            value = (wide @ torch.ones(2, 1)).square().mean()
        told = mp.step(value).finding
    mp.close()
    assert told is not None
    assert told.maker is not None
    assert told.maker.line.endswith("wide = model(x).float() + 1e6")
    assert told.line.endswith("value = (wide @ torch.ones(2, 1)).square().mean()")


# ------------------------------------------------------------------------- two models: whose policy a remedy is


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
        assert step(of_generator, generator, critic).stepped
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
