"""The maker of a number that FP32 holds and fp16 does not, and remedies that were tried."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.core.overflow import OverflowReport
from mezzo.core.records import OverflowRecord, from_line, to_line


class Layer(nn.Module):
    """Computes a function of its input and a weight of ones."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute, self.weight = compute, nn.Parameter(torch.ones(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight)


def grows() -> nn.Module:
    """Makes numbers of a million, which FP32 holds."""
    return Layer(lambda x, _: torch.tanh(x.float()) * 1e6)


def raises() -> nn.Module:
    """Makes them by an op that is FP32's by its rule."""
    return Layer(lambda x, _: torch.exp(x.clamp(-1, 1) + 14.0))


def both() -> nn.Module:
    """Makes them, and takes them in fp16."""
    return Layer(lambda x, w: nn.functional.linear(torch.exp(x.clamp(-1, 1) + 14.0), w) * 1e-6)


def calms() -> nn.Module:
    return Layer(lambda x, _: x * 1e-6)


def layers(place: nn.Module, *after: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), place, nn.ReLU(), nn.Linear(6, 6), *after, nn.Linear(6, 2))


def trained(model: nn.Module, precision: str) -> mezzo.MixedPrecision:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = (
        mezzo.DynamicLossScale(init=1.0) if "fp16" in precision and "loss_scale" not in precision else None
    )
    return mezzo.MixedPrecision(model, optimizer, precision, loss_scale=scale, trace=True)


def result(model: nn.Module, precision: str, factor: float = 1.0) -> Any:
    """Of one step."""
    mp = trained(model, precision)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) * factor
    with mp.autocast():
        loss = model(x).float().mean() * 1e-3
    stepped = mp.step(loss)
    mp.close()
    return stepped


def policies(found: OverflowReport) -> list[str]:
    return [text for one in found.remedies for text in re.findall(r"`((?:fp16|bf16)[^`]*)`", one)]


# model, policy, where it became infinite, who made it
MADE: list[tuple[Callable[[], nn.Module], str, str, tuple[str, str]]] = [
    (grows, "fp16,module.1=fp32", "3", ("1", "mul")),
    (lambda: nn.Sequential(grows(), nn.Identity(), nn.ReLU()), "fp16,module.1=fp32", "3", ("1.0", "mul")),
    (raises, "fp16", "3", ("1", "exp")),
    (both, "fp16", "1", ("1", "exp")),
]


@pytest.mark.parametrize(("make", "precision", "module", "made"), MADE)
def test_the_maker_is_told_with_the_operation_that_took_it_in_fp16(
    make: Callable[[], nn.Module], precision: str, module: str, made: tuple[str, str]
) -> None:
    told = result(layers(make()), precision).finding
    assert (told.cause, told.module, told.op, told.direction) == ("overflow", module, "linear", "forward")
    assert (told.maker.module, told.maker.op) == made
    assert told.maker.result.format == "fp32"
    assert told.maker.result.largest > 65504
    assert f"made by {made[1]} in {made[0]} (" in str(told)
    record = OverflowRecord(1, 0, 0.5, 1.0, told)
    assert from_line(to_line(record)) == record


def test_a_weight_and_an_input_beyond_fp16() -> None:
    model = layers(nn.Identity())
    with torch.no_grad():
        model[3].weight[0, 0] = 1e5
    assert "a weight of 1e+05 does not fit fp16" in str(result(model, "fp16").finding)
    told = result(layers(nn.Identity()), "fp16", factor=1e6).finding
    assert (told.module, told.op) == ("0", "linear")
    assert (told.maker.op, told.maker.result.name) == ("", "input 0")


CASES: list[tuple[Callable[[], nn.Module], str, set[str]]] = [
    (
        lambda: layers(grows(), calms()),
        "fp16,module.1=fp32",
        {"fp16,module.1=fp32,module.3=fp32", "fp16,op.linear=fp32,module.1=fp32", "bf16"},
    ),
    (
        lambda: layers(grows(), nn.Linear(6, 6)),
        "fp16,module.1=fp32,loss_scale=1",
        {"fp16,loss_scale=1,module.1=fp32,module.3=fp32,module.4=fp32,module.5=fp32", "bf16"},
    ),
    (lambda: layers(raises()), "fp16", {"fp16,module.3=fp32,module.4=fp32", "bf16"}),
]


@pytest.mark.parametrize(("make", "precision", "some"), CASES, ids=["one reader", "several", "by rule"])
def test_what_is_offered_helps_and_adds_to_the_runs_policy(
    make: Callable[[], nn.Module], precision: str, some: set[str]
) -> None:
    told = result(make(), precision).finding
    offered = policies(told)
    assert some <= set(offered), offered
    assert precision not in offered
    kept = [text for text in offered if text.startswith("fp16")]
    assert all(set(mezzo.policy(precision).modules) <= set(mezzo.policy(text).modules) for text in kept)
    for text in offered:
        assert result(make(), text).stepped, text
    assert f"{told.maker.op} in {told.maker.module}" in told.remedies[0]


def test_the_maker_is_told_of_a_loss_that_is_watched_live() -> None:
    model = layers(nn.Identity())
    mp = trained(model, "fp16")
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


@pytest.mark.parametrize("whose", ["the other model's", "its own"])
def test_a_remedy_in_another_model_is_for_that_models_policy(whose: str) -> None:
    torch.manual_seed(0)
    large = Layer(lambda x, _: x * 7e6 / 7e6)
    generator = nn.Sequential(nn.Linear(4, 4))
    critic = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), large, nn.Linear(4, 1))

    def stepped(policy: str) -> Any:
        of_generator, of_critic = trained(generator, "fp16"), trained(critic, policy)
        mine = of_critic if whose == "its own" else of_generator
        with mine.autocast():
            loss = critic(generator(torch.randn(8, 4))).square().mean()
        told = mine.step(loss)
        of_generator.close()
        of_critic.close()
        return told

    finding = stepped("fp16,op.gelu=fp32").finding
    assert finding.module == "2"
    told = [one for one in finding.remedies if "module." in one]
    assert told
    assert all(("own model (Sequential)" in one) is (whose != "its own") for one in told)
    for policy in (re.findall(r"`(fp16[^`]*)`", one)[0] for one in told):
        assert "op.gelu=fp32" in policy
        assert stepped(policy).stepped
