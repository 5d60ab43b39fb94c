"""MixedPrecision: accumulation, several optimizers, module overrides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.core.errors import (
    UnknownNameError,
)
from training_steps import (  # noqa: F401
    INF,
    NAN,
    OPTIMIZERS,
    Waits,
    batch,
    everything,
    network,
    nobody_owns_anything,
    run,
    same,
    who_decides,
)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_four_quarters_move_as_their_batch_does(precision: str) -> None:
    def plain() -> nn.Module:
        torch.manual_seed(1)
        return nn.Linear(4, 2)

    x, y = batch(0, 32)
    large, small = plain(), plain()
    one = mezzo.MixedPrecision(large, torch.optim.SGD(large.parameters(), lr=1.0), "fp32")
    four = mezzo.MixedPrecision(small, torch.optim.SGD(small.parameters(), lr=1.0), precision, accumulate=4)
    with one.autocast():
        loss = nn.functional.cross_entropy(large(x), y)
    one.step(loss)
    results = []
    for quarter, target in zip(x.split(8), y.split(8)):
        with four.autocast():
            loss = nn.functional.cross_entropy(small(quarter), target)
        results.append(four.step(loss))
        assert all(p.grad is None or p.grad.dtype is torch.float32 for p in small.parameters())
    assert [r.moved for r in results] == [False, False, False, True]
    assert [r.reason for r in results] == [f"{i} of 4 losses accumulated" for i in (1, 2, 3)] + [""]
    tolerance = 1e-6 if precision == "fp32" else 2e-3
    for a, b in zip(large.parameters(), small.parameters()):
        assert torch.allclose(a, b, atol=tolerance, rtol=0)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("seen", [1, 2, 3])
def test_flush_moves_by_the_mean_of_the_losses_that_were_seen(precision: str, seen: int) -> None:
    weights = []
    for accumulate in (4, seen):
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        mp = mezzo.MixedPrecision(
            model, torch.optim.SGD(model.parameters(), lr=1.0), precision, accumulate=accumulate
        )
        for index in range(seen):
            mp.step((model.weight * float(2 * index)).sum())
        if accumulate == 4:
            result = mp.flush()
            assert result.moved
            nothing = mp.flush()
            assert nothing.reason == "nothing accumulated since the last step"
            assert (nothing.updated, nothing.loss) == (False, None)
            assert "loss=None" in repr(nothing)
        weights.append(model.weight.detach())
    assert torch.allclose(*weights, rtol=1e-6)
    assert torch.allclose(weights[0], torch.full((1, 2), -float(seen - 1)), rtol=1e-6)


@pytest.mark.parametrize("bad", [None, 0, -1], ids=["finite", "the first is bad", "the last is bad"])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(("accumulate", "seen"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)])
def test_every_result_has_the_last_loss_of_its_window(
    accumulate: int, seen: int, resumed: bool, bad: int | None
) -> None:
    def made() -> mezzo.MixedPrecision:
        model = nn.Linear(2, 1, bias=False)
        return mezzo.MixedPrecision(
            model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16", accumulate=accumulate
        )

    mp = made()
    weight = next(mp.model.parameters())
    losses = [weight.float().sum() * 0.0 + 1.5 * (index + 1) for index in range(seen)]
    if bad is not None:
        losses[bad] = losses[bad] * INF
    told = [float(loss.detach()) for loss in losses]
    results = [mp.step(loss) for loss in losses]
    assert [r.loss for r in results] == told
    if seen < accumulate:
        if resumed:
            state = mp.state_dict()
            mp.close()
            mp = made()
            mp.load_state_dict(state)
        results.append(mp.flush())
    assert results[-1].loss == told[-1]
    assert (results[-1].moved, results[-1].skipped) == (bad is None, bad is not None)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_gan_each_side_has_its_own_gradients_and_scale(reentrant: bool) -> None:
    generator, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    mp_g = mezzo.MixedPrecision(generator, OPTIMIZERS["adamw-fused"](generator.parameters()), "fp16")
    mp_d = mezzo.MixedPrecision(judge, OPTIMIZERS["adamw-fused"](judge.parameters()), "fp16")
    noise = torch.randn(5, 3)

    def judged(fake: Tensor) -> Tensor:
        out = checkpoint(judge, fake, use_reentrant=True) if reentrant else judge(fake)
        assert isinstance(out, Tensor)
        return out

    kept = torch.randn(4, 3)
    generator.weight.grad = kept.clone()
    for _ in range(2):
        with mp_d.autocast():
            loss_d = judged(generator(noise)).float().mean() / 4
        assert mp_d.step(loss_d).moved
        assert torch.equal(generator.weight.grad, kept)
        assert generator.bias.grad is None
    generator.weight.grad = None
    before = [p.detach().clone() for p in judge.parameters()]
    with mp_g.autocast():
        loss_g = -judged(generator(noise)).float().mean()
    assert mp_g.step(loss_g * INF).skipped
    assert (mp_g.loss_scale, mp_d.loss_scale) == (2.0**15, 2.0**16)
    assert same([p.detach() for p in judge.parameters()], before)
    assert all(p.grad is None for p in judge.parameters())


def test_two_optimizers_on_one_loss_with_a_retained_graph() -> None:
    body, head = nn.Linear(2, 2), nn.Linear(2, 1)
    model = nn.Sequential(body, head)
    one = mezzo.MixedPrecision(model, torch.optim.SGD(body.parameters(), lr=0.1), "bf16")
    # The head's weights must not move before the body's gradients have been computed.
    two = mezzo.MixedPrecision(model, torch.optim.SGD(head.parameters(), lr=0.1), "bf16", accumulate=2)
    with one.autocast():
        loss = model(torch.ones(1, 2)).float().sum()
    assert not two.step(loss, retain_graph=True).moved
    assert one.step(loss).moved
    assert two.flush().moved


def test_module_overrides_of_the_policy_hold_while_it_is_open() -> None:
    model = network()
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), precision="bf16,module.0=fp32")
    seen: list[torch.dtype] = []
    for index in (0, 3):
        model[index].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    run(mp)
    assert seen == [torch.float32, torch.bfloat16]
    mp.close()
    with mezzo.autocast("bf16", "cpu"):
        model(batch()[0])
    assert seen[2:] == [torch.bfloat16, torch.bfloat16]


def test_a_pattern_that_matches_no_module_is_refused_and_owns_nothing() -> None:
    model = network()
    with pytest.raises(UnknownNameError, match="matches no module"):
        mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), precision="bf16,module.head=fp32")
    mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()))
