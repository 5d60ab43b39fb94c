"""MixedPrecision: a step beside torch.amp's, and what a skipped one leaves."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import mezzo
from mezzo.core.errors import (
    LossScaleCollapseError,
)
from training_steps import (  # noqa: F401
    INF,
    NAN,
    OPTIMIZERS,
    Waits,
    as_on_an_accelerator,
    batch,
    everything,
    network,
    nobody_owns_anything,
    run,
    same,
    who_decides,
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_loop_written_by_hand_with_torch_amp(name: str, decides: str) -> None:
    """fp16 with accumulation, clipping and overflows: same weights to the last bit, same scales."""
    factors = [1.0, 1.0, INF, 1.0, 1.0, 1.0, 1.0, NAN, 1.0, 1.0, 1.0, 1.0]
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales, norms = [], []
    for index, factor in enumerate(factors):
        x, y = batch(index)
        with mezzo.autocast("fp16", "cpu"):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * factor / 2).backward()
        if index % 2:
            scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())

    twin = network()
    mp = mezzo.MixedPrecision(
        twin,
        OPTIMIZERS[name](twin.parameters()),
        "fp16",
        clip_norm=0.1,
        accumulate=2,
        loss_scale=mezzo.DynamicLossScale(init=2.0**10, growth_interval=2),
    )
    results = [run(mp, index, factor) for index, factor in enumerate(factors)]
    assert [r.moved for r in results] == [False, True, False, False, False, True] + [False, False] + [
        False,
        True,
    ] * 2
    assert [r.skipped for r in results] == [i in (3, 7) for i in range(12)]
    assert same([p.detach() for p in twin.parameters()], [p.detach() for p in model.parameters()])
    assert mp.loss_scale == scales[-1]
    assert torch.equal(
        torch.tensor([r.grad_norm for r in results[1::2]]).nan_to_num(7.0),
        torch.tensor(norms).nan_to_num(7.0),
    )


def test_fp32_is_the_plain_loop_to_the_last_bit() -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    for index in range(3):
        x, y = batch(index)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    twin = network()
    mp = mezzo.MixedPrecision(twin, OPTIMIZERS["adamw-fused"](twin.parameters()), "fp32")
    for index in range(3):
        assert run(mp, index).moved
    assert same(list(twin.parameters()), list(model.parameters()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_a_loss_scale_nothing_is_looked_at(precision: str) -> None:
    model = network()
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), precision)
    result = run(mp, factor=NAN)
    assert (result.moved, result.skipped, result.reason) == (True, False, "")
    assert result.loss_scale == 1.0
    assert result.grad_norm is None  # measuring would read every gradient once more
    mp.close()
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), precision, clip_norm=math.inf)
    result = run(mp, factor=NAN)
    assert result.grad_norm is not None
    assert math.isnan(result.grad_norm)


def test_clipping_comes_after_unscaling(decides: str) -> None:
    """True norm 2: a clip of scaled gradients would read 131072, and shrink the update by the scale."""
    for precision in ("fp32", "fp16"):
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        mp = mezzo.MixedPrecision(
            model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), precision, clip_norm=1.0
        )
        result = mp.step(model(torch.ones(1, 4)).sum())
        assert result.grad_norm == 2.0
        assert model.weight.detach().flatten().tolist() == pytest.approx([-0.05] * 4, rel=1e-5)


@pytest.mark.parametrize(
    ("clip_value", "clip_norm", "expected"),
    [
        (None, None, [3.0, -4.0]),
        (3.5, None, [3.0, -3.5]),
        (None, 1.0, [0.6, -0.8]),
        (None, 10.0, [3.0, -4.0]),
        (None, math.inf, [3.0, -4.0]),
        (3.5, math.inf, [3.0, -3.5]),
        (1.0, 1.0, [0.5**0.5, -(0.5**0.5)]),
    ],
)
def test_value_is_clipped_before_norm_and_the_norm_told_is_the_gradients_own(
    clip_value: float | None, clip_norm: float | None, expected: list[float]
) -> None:
    weight = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(weight.weight)
    mp = mezzo.MixedPrecision(
        weight,
        torch.optim.SGD(weight.parameters(), lr=1.0),
        "fp16",
        clip_value=clip_value,
        clip_norm=clip_norm,
    )
    result = mp.step((weight.weight * torch.tensor([[3.0, -4.0]])).sum())
    assert result.grad_norm == (None if clip_norm is None else 5.0)
    assert (-weight.weight.detach()).flatten().tolist() == pytest.approx(expected, rel=1e-5)


def test_a_sparse_gradient_s_norm_is_of_the_sums_by_index() -> None:
    model = nn.Embedding(5, 1, sparse=True)
    nn.init.zeros_(model.weight)
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp16", clip_norm=1.0)
    result = mp.step(model(torch.tensor([1, 1, 1, 3, 3, 3, 3])).sum())
    assert result.grad_norm == 5.0
    assert model.weight.detach().flatten().tolist() == pytest.approx([0, -0.6, 0, -0.8, 0], rel=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_skip_leaves_no_trace_in_parameters_optimizer_statistics_scheduler_or_average(
    name: str, accumulate: int, decides: str
) -> None:
    model = network()
    mp = mezzo.MixedPrecision(model, OPTIMIZERS[name](model.parameters()), "fp16", accumulate=accumulate)
    for index in range(2 * accumulate):
        run(mp, index)
    before = everything(mp)
    for index in range(accumulate):
        x, y = batch(index)
        with mp.autocast():
            loss = nn.functional.cross_entropy(model(x * (INF if index == 0 else 1.0)), y)
        result = mp.step(loss)
    assert (result.moved, result.skipped) == (False, True)
    assert "NaN or infinite at loss scale 65536" in result.reason
    assert same(everything(mp), before)
    assert all(p.grad is None for p in model.parameters())
    assert mp.loss_scale == 2.0**15
    for index in range(accumulate):
        result = run(mp, index)
    assert result.moved
    assert not same(everything(mp), before)
    assert all(t.isfinite().all() for t in everything(mp))
    assert int(model[1].num_batches_tracked) == 3 * accumulate


def test_statistics_go_back_to_before_the_first_of_several_regions(decides: str) -> None:
    model = network()
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["adamw-fused"](model.parameters()), "fp16")
    run(mp)
    before = everything(mp)
    with mp.autocast():
        loss = model(batch()[0] * INF).sum()
    with mp.autocast():
        loss = loss + model(batch()[0]).sum()
    assert mp.step(loss).skipped
    assert same(everything(mp), before)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_scheduler_and_average_follow_only_moves(accumulate: int, decides: str) -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    ema = AveragedModel(model, use_buffers=True)
    mp = mezzo.MixedPrecision(model, optimizer, "fp16", scheduler=scheduler, ema=ema, accumulate=accumulate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        for factor in (INF, 1.0, INF, 1.0, 1.0):
            for _ in range(accumulate):
                run(mp, factor=factor)
    assert scheduler.last_epoch == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    assert int(ema.n_averaged) == 3
    assert all(t.isfinite().all() for t in ema.buffers())


def test_an_average_may_be_a_function() -> None:
    model, seen = network(), []
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), "fp16", ema=seen.append)
    run(mp, factor=INF)
    run(mp)
    assert seen == [model]


def test_collapse_is_raised_and_leaves_the_model_as_it_was(decides: str) -> None:
    model = network()
    mp = mezzo.MixedPrecision(
        model,
        OPTIMIZERS["adamw-fused"](model.parameters()),
        "fp16",
        loss_scale=mezzo.DynamicLossScale(init=2.0, floor=1.0, patience=4),
    )
    run(mp)
    before = everything(mp)

    def until_it_raises() -> int:
        for index in range(12):
            try:
                run(mp, factor=NAN)
            except LossScaleCollapseError:
                return index + 1
        return 0

    raised_at = until_it_raises()
    # The first skip leads to the floor; there, 4 are borne. The device is asked every 4 updates.
    assert raised_at == (5 if decides == "host" else 7)
    assert same(everything(mp), before)


def test_a_static_scale_skips_and_stays(decides: str) -> None:
    model = network()
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["adamw-fused"](model.parameters()), "fp16", loss_scale=128)
    assert run(mp, factor=INF).skipped
    result = run(mp)
    assert result.moved
    assert (result.loss_scale, mp.loss_scale) == (128.0, 128.0)


def test_an_fp16_loss_does_not_overflow_by_its_seed() -> None:
    model = nn.Linear(2, 1)
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), "fp16", clip_norm=math.inf)
    result = mp.step(model(torch.ones(1, 2)).half().mean())
    assert result.moved
    assert result.loss_scale == 2.0**15
    assert result.grad_norm == pytest.approx(3**0.5)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name.endswith("fused")])
@pytest.mark.parametrize("factor", [1.0, INF])
def test_a_fused_step_in_fp16_waits_for_nothing_until_its_result_is_read(
    name: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_an_accelerator(monkeypatch)
    model = network()
    mp = mezzo.MixedPrecision(
        model, OPTIMIZERS[name](model.parameters()), "fp16", clip_norm=1.0, accumulate=2
    )
    for index in range(4):
        run(mp, index)
    with Waits() as waits:
        run(mp, 4, factor)
        result = run(mp, 5, factor)
    assert waits.seen == []
    with Waits() as waits:
        assert result.skipped == (factor == INF)
    assert waits.seen == ["_local_scalar_dense"]


def test_a_skipped_step_spoils_no_statistics_of_another_network():
    """A generator's loss comes through the discriminator, whose BatchNorm sees the overflow too."""
    torch.manual_seed(0)
    made, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    making = mezzo.MixedPrecision(made, torch.optim.SGD(made.parameters(), lr=0.1), "fp16")
    judging = mezzo.MixedPrecision(judge, torch.optim.SGD(judge.parameters(), lr=0.1), "fp16")

    def step(size):
        with making.autocast():
            sample = made(size * torch.randn(16, 4))
        with judging.autocast():
            loss = judge(sample).float().square().mean()
        return making.step(loss)

    assert step(1.0).moved
    before = judge[1].running_mean.clone()
    assert not before.eq(0).all()
    assert step(1e6).skipped
    assert torch.equal(judge[1].running_mean, before)
    with judging.autocast():
        loss = judge(torch.randn(16, 8)).float().square().mean()
    assert judging.step(loss).moved
    assert judge[1].running_mean.isfinite().all()
    making.close()
    judging.close()
