"""What the statistical loss scale is fed with: the largest gradient, seen where it is, and at no other time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
from launching import launcher
from mezzo.core.loss_scale import DynamicLossScale
from mezzo.core.statistical_scale import StatisticalLossScale
from mezzo.pytorch.monitor.largest_gradient import LargestGradient
from ranks import two_ranks
from training_steps import Waits, batch, everything, network, nobody_owns_anything, run, same  # noqa: F401


class Told:
    """In place of the loss-scale machine's `next`: what it was told."""

    def __init__(self, mp: Any) -> None:
        self.largest: list[float | None] = []
        original = type(mp._in_force.machine).next

        def following(machine: Any, found: Tensor, largest: Tensor | None = None) -> Any:
            self.largest.append(None if largest is None else float(largest))
            return original(machine, found, largest)

        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(type(mp._in_force.machine), "next", following)

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.patch.undo()


def trained(scale: Any, **arguments: Any) -> Any:
    net = network()
    return mezzo.MixedPrecision(
        net, torch.optim.SGD(net.parameters(), lr=0.1), "fp16", loss_scale=scale, trace=False, **arguments
    )


def by_hand(net: nn.Sequential, seed: int) -> tuple[float, float]:
    """The largest gradient of any output of the network's modules, and of any parameter, in FP32."""
    x, y = batch(seed)
    outputs = []
    for module in net:
        x = module(x)
        x.retain_grad()
        outputs.append(x)
    nn.functional.cross_entropy(x, y).backward()
    of_outputs = max(float(out.grad.abs().max()) for out in outputs)
    return of_outputs, max(float(param.grad.abs().max()) for param in net.parameters())


class Alone(nn.Module):
    """A parameter whose gradient is `factor` times that of the output."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * self.factor


@pytest.mark.parametrize(("factor", "largest"), [(8.0, 24.0), (-8.0, 24.0), (0.125, 3.0)])
def test_outputs_and_parameters_count(factor: float, largest: float) -> None:
    net = Alone(factor)
    mp = mezzo.MixedPrecision(
        net, torch.optim.SGD(net.parameters(), lr=0.1), "fp16", loss_scale=StatisticalLossScale(init=2.0**5)
    )
    with Told(mp) as told:
        with mp.autocast():
            loss = 3.0 * net(torch.ones(1)).sum()
        mp.step(loss)
    assert told.largest == [largest]


def test_it_is_the_largest_gradient_of_all() -> None:
    truth = by_hand(network(), 0)
    mp = trained(StatisticalLossScale(init=2.0**10))
    with Told(mp) as told:
        run(mp, 0)
    assert told.largest == pytest.approx([max(truth)], rel=2e-2)
    assert truth[1] > 1.5 * truth[0]  # the loss is a mean over 16 samples


def test_accumulated_losses_count_as_they_are_in_the_graph() -> None:
    net = Alone(0.125)
    mp = mezzo.MixedPrecision(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        "fp16",
        loss_scale=StatisticalLossScale(init=2.0**5),
        accumulate=2,
    )
    with Told(mp) as told:
        for factor in (3.0, 5.0):
            with mp.autocast():
                loss = factor * net(torch.ones(1)).sum()
            mp.step(loss)
    assert told.largest == [2.5]  # S / 2 times 5 is what fp16 held


def test_what_is_clipped_or_released_counts_as_it_came() -> None:
    net = Alone(8.0)
    looks = LargestGradient()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.register_forward_pre_hook(lambda model, args: looks.call_begins(model, args, {}))
    loss = 3.0 * net(torch.ones(1)).sum()
    looks.backward_begins(loss, 16.0)
    handle = net.weight.register_hook(
        lambda grad: grad / 16.0
    )  # what unscales in a launched script, after ours here
    (loss * 16.0).backward()
    handle.remove()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    looks.update_begins(optimizer, 16.0 * torch.ones(()))
    looks.update_ended(optimizer, index=0, number=0, skipped=False, loss_scale=16.0)
    assert float(looks.largest) == 24.0
    assert net.weight._backward_hooks == {}
    net = network()
    mp = mezzo.MixedPrecision(
        net,
        torch.optim.AdamW(net.parameters(), lr=0.1),
        "fp16",
        weights="masters",
        release_gradients=True,
        loss_scale=StatisticalLossScale(init=2.0**10),
    )
    truth = by_hand(network(), 0)
    with Told(mp) as told:
        run(mp)
    assert told.largest == pytest.approx([max(truth)], rel=2e-2)


LAUNCHED = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    net = nn.Linear(4, 1, bias=False)
    nn.init.ones_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for _ in range(12):
        optimizer.zero_grad()
        loss = net(torch.full((2, 4), 16.0)).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        optimizer.step()
"""


def test_in_a_launched_script_that_clips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = launcher(tmp_path, capsys)(LAUNCHED, policy="fp16,loss_scale=statistical(init=8,warm_up=2)")
    scales = [update.loss_scale for update in ran.of("update")]
    assert scales[:2] == [8.0, 8.0]
    assert set(scales[2:]) == {2.0**10}  # 65504 over the weight's 32, which clipping hides from the optimizer


def test_it_is_told_at_an_interval_after_a_dense_start() -> None:
    mp = trained(StatisticalLossScale())
    with Told(mp) as told:
        for seed in range(40):
            run(mp, seed)
    assert [index for index, one in enumerate(told.largest) if one is not None] == [*range(20), 32]


def test_the_scale_follows_it_in_training() -> None:
    mp = trained(StatisticalLossScale(), clip_norm=1.0)
    for seed in range(12):
        assert run(mp, seed).moved
    pure = mp._in_force.machine.on_host()
    assert pure.seen == 12
    largest = max(by_hand(network(), 0))
    assert abs(pure.mean - math.log2(largest)) < 3
    assert mp.loss_scale == pure.fitted
    assert 2.0**15 < mp.loss_scale * 2.0 ** (pure.mean + 3.09 * pure.deviation) <= 2.0**16


def test_a_step_that_overflows_backs_off_and_tells_nothing() -> None:
    mp = trained(StatisticalLossScale(init=2.0**12))
    assert run(mp).moved
    before = mp._in_force.machine.on_host()
    assert not run(mp, factor=math.inf).moved
    after = mp._in_force.machine.on_host()
    assert (after.seen, after.mean, after.scale) == (1, before.mean, 2.0**11)


def test_nothing_else_changes() -> None:
    """Bit for bit what a dynamic scale of the same size does, whose steps nobody looks at."""
    watched, plain = (
        trained(StatisticalLossScale(init=2.0**10, warm_up=100)),
        trained(DynamicLossScale(init=2.0**10)),
    )
    torch.manual_seed(11)
    for seed in range(5):
        run(watched, seed)
    state = torch.get_rng_state()
    torch.manual_seed(11)
    for seed in range(5):
        run(plain, seed)
    assert torch.equal(state, torch.get_rng_state())
    assert same(everything(watched), everything(plain))


def test_no_hook_is_left_and_none_is_there_where_nobody_looks() -> None:
    mp = trained(StatisticalLossScale())
    mp._observing._observers[0]._dense = 1
    inner = list(mp.model)
    run(mp)
    assert not any(module._forward_hooks for module in inner)
    with mp.autocast():
        loss = mp.model(batch()[0]).sum()
    assert not any(module._forward_hooks for module in inner)
    mp.step(loss)
    assert not trained(DynamicLossScale())._observing


@pytest.mark.parametrize("method", [False, True])
def test_a_compiled_model_is_seen_from_outside_and_not_compiled_again(method: bool) -> None:
    torch._dynamo.reset()  # of what other tests compiled
    truth = by_hand(network(), 0)
    net = network()
    model: Any = net
    if method:
        net.compile(backend="eager")
    else:
        model = torch.compile(net, backend="eager")
    mp = mezzo.MixedPrecision(
        model,
        torch.optim.SGD(net.parameters(), lr=0.0),
        "fp16",
        loss_scale=StatisticalLossScale(),
        trace=False,
    )
    with torch._dynamo.config.patch(error_on_recompile=True), Told(mp) as told:
        for _ in range(22):
            run(mp, 0)
    assert told.largest[:20] == pytest.approx([truth[1]] * 20, rel=2e-2)
    assert told.largest[20:] == [None, None]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_seen(reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=reentrant)
            return out

    truth = max(by_hand(network(), 0))
    net = Net()
    mp = mezzo.MixedPrecision(
        net, torch.optim.SGD(net.parameters(), lr=0.1), "fp16", loss_scale=StatisticalLossScale()
    )
    x, y = batch(0)
    with Told(mp) as told:
        with mp.autocast():
            loss = nn.functional.cross_entropy(net(x.requires_grad_()), y)
        mp.step(loss)
    assert told.largest == pytest.approx([truth], rel=2e-2)


def test_the_host_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from mezzo.pytorch.training import turns

    monkeypatch.setattr(turns, "reading_is_free", lambda tensor: False)
    net = network()
    mp = mezzo.MixedPrecision(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1, fused=True),
        "fp16",
        loss_scale=StatisticalLossScale(),
        trace=False,
    )
    run(mp)
    with Waits() as waits:
        run(mp)
    assert waits.seen == []


def test_saved_and_loaded() -> None:
    mp = trained(StatisticalLossScale(init=2.0**12))
    for seed in range(3):
        run(mp, seed)
    state = mp.state_dict()
    other = trained(StatisticalLossScale())
    other.load_state_dict(state)
    assert other._in_force.machine.on_host() == mp._in_force.machine.on_host()


def planted(grad: Tensor) -> Tensor:
    raise RuntimeError("planted")


def test_a_dropped_step_leaves_nothing() -> None:
    mp = trained(StatisticalLossScale())
    x, y = batch(0)
    with mp.autocast():
        loss = nn.functional.cross_entropy(mp.model(x), y)
    loss.register_hook(planted)
    with pytest.raises(RuntimeError, match="planted"):
        mp.step(loss)
    assert not any(module._forward_hooks for module in mp.model)
    with Told(mp) as told:
        run(mp)
    assert told.largest == pytest.approx([max(by_hand(network(), 0))], rel=2e-2)


def test_numbers_that_can_not_be_looked_at_are_passed_over() -> None:
    looks = LargestGradient()
    looks.update_ended(
        torch.optim.SGD([nn.Parameter(torch.ones(1))]), index=0, number=0, skipped=False, loss_scale=4.0
    )
    assert looks.largest is not None
    assert float(looks.largest) == 0.0


@pytest.mark.heavy
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
def test_ranks_agree_on_the_largest_and_so_on_the_scale(tmp_path: Path) -> None:
    ranks = two_ranks("largest_ranks.py", tmp_path / "store", seconds=200)
    assert ranks[0]["DDP"]["told"] == ranks[1]["DDP"]["told"]
    assert ranks[0]["DDP"]["own"] != ranks[1]["DDP"]["own"]
    assert ranks[0]["DDP"]["told"][-1][1] != 256.0
    assert [rank["number"] for rank in ranks] == ["1.0", "1.0"]
    assert [rank["NaN"] for rank in ranks] == ["nan", "nan"]
