"""GradScaler beside torch.amp's: the same numbers event by event, and none of the faults seen there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mezzo
from mezzo.core.errors import CallOrderError, LossScaleCollapseError
from scaled_steps import INF, NAN, OPTIMIZERS, flat, loss_of, parameters, same, train


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=15, deadline=None)
@given(
    events=st.lists(st.sampled_from([1.0, 1.0, -2.0, INF, NAN, 0.0]), min_size=1, max_size=20),
    growth=st.sampled_from([2.0, 4.0]),
    interval=st.integers(1, 3),
    unscales=st.booleans(),
)
def test_equals_torch_event_by_event(
    name: str, events: list[float], growth: float, interval: int, unscales: bool
) -> None:
    sides = []
    for make, extra in (
        (torch.amp.GradScaler, {}),
        (mezzo.GradScaler, {"ceiling": 2.0**100, "floor": 2.0**-100}),
    ):
        params = parameters()
        scaler = make("cpu", init_scale=2.0**10, growth_factor=growth, growth_interval=interval, **extra)
        optimizer = OPTIMIZERS[name](params)
        trace: list[Any] = []
        for event in events:
            optimizer.zero_grad()
            scaler.scale(loss_of(params, event)).backward()
            if unscales:
                scaler.unscale_(optimizer)
                trace += [p.grad.nan_to_num(nan=7.0).clone() for p in params if p.grad is not None]
            trace.append(scaler.step(optimizer))
            scaler.update()
            trace += [scaler.get_scale(), scaler._get_growth_tracker()]
            trace += [p.detach().clone() for p in params]
        sides.append(trace + flat(optimizer))
    assert same(*sides)


def test_fused_sgd_with_momentum_starts_from_nothing_after_a_first_step_that_was_skipped() -> None:
    results = []
    for fused in (False, True):
        params = parameters()
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5, fused=fused)
        scaler = mezzo.GradScaler(init_scale=2.0)
        litter = [torch.full((3,), 1e30) for _ in range(200)]
        del litter
        for event in (INF, 1.0, INF, 1.0):
            train(scaler, optimizer, params, event)
            if event == INF and fused and not results:
                assert not any("momentum_buffer" in entry for entry in optimizer.state.values())
        results.append([p.detach().clone() for p in params] + flat(optimizer))
    assert same(*results)


@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_a_good_step_after_200_overflows_writes_finite_weights(name: str) -> None:
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    scaler = mezzo.GradScaler(init_scale=2.0**16, patience=1000)
    before = [p.detach().clone() for p in params]
    for _ in range(200):
        train(scaler, optimizer, params, INF)
    assert scaler.get_scale() == 2.0**-14
    assert same([p.detach() for p in params], before)
    train(scaler, optimizer, params, 1.0)
    assert all(p.isfinite().all() and not torch.equal(p, b) for p, b in zip(params, before))


def test_growth_every_step_stops_at_a_finite_ceiling() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["sgd"](params)
    scaler = mezzo.GradScaler(growth_interval=1)
    for _ in range(300):
        train(scaler, optimizer, params, 1.0)
    assert scaler.get_scale() == 2.0**24
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_patience_runs_out_aloud_at_the_floor(name: str) -> None:
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    scaler = mezzo.GradScaler(init_scale=4.0, floor=1.0, patience=3)
    for _ in range(4):
        train(scaler, optimizer, params, NAN)
    with pytest.raises(LossScaleCollapseError, match="loss scale is at its floor"):
        train(scaler, optimizer, params, NAN)


def test_a_step_whose_loss_was_never_scaled_is_loud() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["sgd"](params)
    scaler = mezzo.GradScaler()
    train(scaler, optimizer, params, 1.0)
    before = [p.detach().clone() for p in params]
    for call in (scaler.step, scaler.unscale_):
        optimizer.zero_grad()
        loss_of(params, 1.0).backward()
        with pytest.raises(CallOrderError, match="scale\\(\\) has not been called"):
            call(optimizer)
    assert same([p.detach() for p in params], before)


def test_unscales_with_the_scale_that_the_loss_was_multiplied_with() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["sgd"](params)
    scaler = mezzo.GradScaler(init_scale=4.0)
    scaler.scale(loss_of(params, 1.0)).backward()
    scaler.update(1024.0)
    scaler.unscale_(optimizer)
    assert params[0].grad is not None
    assert params[0].grad.tolist() == [3.0, 3.0, 3.0]
    assert scaler.get_scale() == 1024.0


def test_two_optimizers_one_of_them_stepped_after_an_update() -> None:
    first, second = parameters(), parameters()
    one, two = OPTIMIZERS["sgd"](first), OPTIMIZERS["sgd"](second)
    scaler = mezzo.GradScaler(init_scale=4.0, growth_interval=1)
    scaler.scale(loss_of(first, 1.0) + loss_of(second, 1.0)).backward()
    scaler.step(one)
    scaler.update()
    scaler.step(two)
    assert same([p.detach() for p in first], [p.detach() for p in second])


def test_clipping_comes_after_unscaling() -> None:
    norms, weights = [], []
    for name in ("plain", "scaler"):
        params = parameters()
        optimizer = OPTIMIZERS["sgd"](params)
        scaler = mezzo.GradScaler(enabled=name == "scaler")
        scaler.scale(loss_of(params, 1.0)).backward()
        norms.append(float(scaler.clip_grad_norm_(optimizer, 1.0)))
        scaler.step(optimizer)
        weights.append([p.detach() for p in params])
    assert norms == [6.0, 6.0]  # four gradients of 3, and not 6 * 65536
    assert same(*weights)


def test_the_larger_of_two_found_infs_counts_for_one_scale() -> None:
    first, second = parameters(), parameters()
    one, two = OPTIMIZERS["sgd"](first), OPTIMIZERS["adamw-fused"](second)
    scaler = mezzo.GradScaler(init_scale=8.0)
    scaler.scale([loss_of(first, 1.0), loss_of(second, INF)])
    for loss in scaler.scale([loss_of(first, 1.0), loss_of(second, INF)]):
        loss.backward()
    scaler.step(one)
    scaler.step(two)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert (scaler.was_skipped(one), scaler.was_skipped(two)) == (False, True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_was_skipped_says_so_and_a_skip_leaves_no_trace(name: str) -> None:
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    scaler = mezzo.GradScaler()
    with pytest.raises(CallOrderError, match="has not stepped yet"):
        scaler.was_skipped(optimizer)
    train(scaler, optimizer, params, 1.0)
    assert scaler.was_skipped(optimizer) is False
    before = [p.detach().clone() for p in params] + copy.deepcopy(flat(optimizer))
    train(scaler, optimizer, params, NAN)
    assert scaler.was_skipped(optimizer) is True
    assert same([p.detach() for p in params] + flat(optimizer), before)
