"""`mezzo.calibrate`: what it recommends for small models, and that it leaves everything as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from faults.models import Net
from mezzo.core.calibration import conclusions
from mezzo.core.errors import UsageError
from training_steps import batch, network

pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows


def times(factor: float) -> nn.Module:
    return Net(lambda self, x: x * factor)


def loss_of(model: nn.Module, one: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(one[0]), one[1])


def batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    return [batch(seed) for seed in range(count)]


def test_the_largest_gradient_is_exact() -> None:
    net = network()
    truth = 0.0
    for one in batches():
        net.zero_grad()
        x, outputs = one[0], []
        for layer in net:
            x = layer(x)
            x.retain_grad()
            outputs.append(x)
        nn.functional.cross_entropy(x, one[1]).backward()
        grads = [out.grad for out in outputs] + [param.grad for param in net.parameters()]
        truth = max(truth, *(float(grad.abs().max()) for grad in grads))
    found = mezzo.calibrate(network(), loss_of, batches())
    assert found.gradient.histogram.largest == truth
    assert found.constant * truth * 2 <= 65504 < found.constant * truth * 4


# A division turns the infinity inside into 0, and its gradients are exactly 0.
NORMED = Net(lambda self, x: (x := x * 3000) / ((x * x).mean(1, keepdim=True) + 1e-8).sqrt())


def planted(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("layers", "kept", "skips", "zeros"),
    [
        ([nn.Sequential(nn.Tanh(), times(1e6)), times(1e-6)], "1.1", True, False),  # "2" has no product
        ([NORMED], "1", False, True),
    ],
)
def test_what_overflows_is_kept_and_then_trains(
    layers: list[nn.Module], kept: str, skips: bool, zeros: bool
) -> None:
    found = mezzo.calibrate(planted(*layers), loss_of, batches(), format="fp16")
    assert [one.module for one in found.kept] == [kept]
    assert kept in [one.module for one in found.sensitivity.modules if one.refuses("fp16")]
    for policy, harmed in (("fp16", True), (found.policy, False)):
        net = planted(*layers)
        mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), policy, watch=1)
        with mp.autocast():
            loss = loss_of(net, batch(0))
        assert mp.step(loss).stepped == (not (skips and harmed))
        if not skips:
            assert ["exactly 0" in line for line in conclusions(mp.ranges)] == [zeros and harmed]
        mp.close()


def test_the_modules_are_ranked_by_what_low_precision_does_to_the_loss() -> None:
    """A planted cancellation is the first; a planted product is out of fp16's range and not of bf16's."""
    offset = Net(lambda self, x: (x + 4096.0) - 4096.0)
    found = mezzo.calibrate(planted(offset, nn.Tanh(), times(1e6), times(1e-6)), loss_of, batches(8))
    ranking = found.sensitivity
    assert (ranking.steps, ranking.formats) == (4, ["bf16", "fp16", "e5m2", "e4m3fn"])
    modules = {one.module: one for one in ranking.modules}
    assert next(iter(modules)) == "1"
    assert modules["1"].lowest == "fp32"
    assert modules["3"].bears == ["bf16"]
    assert modules["3"].causes == {"fp16": "mul"}
    assert modules["0"].changes["bf16"] > 4 * modules["0"].changes["fp16"]
    row = next(line.split() for line in str(found).splitlines() if line.startswith("  1 "))
    assert row[2] == "over"
    assert json.loads(found.to_json())["sensitivity"]["modules"][0]["module"] == "1"


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [value for entry in optimizer.state.values() for value in entry.values()]
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    kept = *net.parameters(), *net.buffers(), *moments, *grads, torch.get_rng_state()
    return [tensor.detach().clone() for tensor in kept]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("error", [None, OSError])
def test_everything_is_put_back(given: bool, error: Any) -> None:
    net = network()
    net.insert(1, nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    loss_of(net, batch(9)).backward()
    optimizer.step()
    net.eval()
    before = everything(net, optimizer)

    def source() -> Iterator[tuple[Tensor, Tensor]]:
        yield from batches(3)
        if error:
            raise error("planted")

    with pytest.raises(error, match="planted") if error else nullcontext():
        mezzo.calibrate(net, loss_of, source(), optimizer=optimizer if given else None)
    after = everything(net, optimizer)
    assert len(before) == len(after)
    assert all(map(torch.equal, before, after))
    assert not net.training
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in net.modules())


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (network, {"steps": 0}, r"no batches \(steps=0\)"),
    (network, {"batches": []}, r"no batches \(steps=8\)"),
    (network, {"batches": 8}, "batches is 8.*DataLoader"),
    (
        network,
        {"loss_fn": torch.optim.SGD(network().parameters())},
        r"loss_fn\(model, batch\): 'SGD'.*Pass lambda",
    ),
    (network, {"loss_fn": nn.functional.cross_entropy}, r"loss_fn\(model, batch\): .*Pass lambda"),
    (network, {"loss_fn": nn.CrossEntropyLoss()}, r"loss_fn\(model, batch\): .*Pass lambda"),
    (network, {"loss_fn": lambda batch: batch}, r"takes 1 positional argument.*Pass lambda model, batch"),
    (
        network,
        {"loss_fn": lambda model, one: model(one[0])},
        r"shape \(16, 2\): it must return a scalar tensor",
    ),
    (network, {"loss_fn": lambda model, one: 1.0}, "loss_fn returned a float"),
    (network, {"loss_fn": lambda model, one: torch.ones(())}, "depends on the parameters"),
    (network, {"loss_fn": lambda model, one: (loss_of(model, one) - 9).log()}, "the loss is nan at step 0"),
    (network, {"format": "fp17"}, "Did you mean 'fp16'"),
    (network, {"rank_formats": ["e4m3f"]}, "Did you mean 'e4m3fn'"),
    (lambda: network().half(), {}, "the model has fp16 parameters"),
    (nn.Identity, {}, "nothing to train"),
]


@pytest.mark.parametrize(("make", "arguments", "words"), WRONG)
def test_what_is_wrong_is_told(make: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        mezzo.calibrate(make(), **{"loss_fn": loss_of, "batches": batches(), **arguments})


def test_not_within_autocast() -> None:
    with mezzo.autocast("bf16"), pytest.raises(UsageError, match="outside of autocast"):
        mezzo.calibrate(network(), loss_of, batches())


def test_with_an_optimizer_the_weights_move_in_between() -> None:
    seen: list[float] = []

    def noting(model: nn.Module, one: tuple[Tensor, Tensor]) -> Tensor:
        loss = loss_of(model, one)
        seen.append(float(loss.detach()))
        return loss

    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    assert mezzo.calibrate(net, noting, batches(4), steps=3, optimizer=optimizer).steps == 3
    loss_of(net, batch(0)).backward()
    optimizer.step()
    assert seen[1] == float(loss_of(net, batch(1)).detach())
    assert len(seen) == 3
