"""GradScaler with closures: LBFGS to the last bit, and steps that are undone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.core.errors import CallOrderError, LossScaleCollapseError
from scaled_steps import INF, NAN, OPTIMIZERS, flat, loss_of, parameters, same


def problem(offset: float = 0.0) -> tuple[list[nn.Parameter], Callable[[], Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(20, 3, generator=generator), torch.randn(20, generator=generator)
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(()))]
    return params, lambda: ((x @ params[0] + params[1] - y) ** 2).mean() + offset


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("init_scale", [2.0**10, 2.0**126])
@pytest.mark.parametrize("keyword", [True, False])
def test_lbfgs_equals_the_plain_one_bit_by_bit(search: str | None, init_scale: float, keyword: bool) -> None:
    outcomes = []
    for scaler in (None, mezzo.GradScaler(init_scale=init_scale)):
        params, loss_fn = problem()
        optimizer = torch.optim.LBFGS(params, lr=0.5, max_iter=5, line_search_fn=search)

        def closure() -> Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss = loss_fn()  # noqa: B023
            # With 2**126 the loss still is a number, and 8 times its gradient is not.
            (loss if scaler is None else scaler.scale(8.0 * loss)).backward()  # noqa: B023
            if scaler is None:  # noqa: B023
                for p in params:  # noqa: B023
                    assert p.grad is not None
                    p.grad.mul_(8.0)
            return loss

        losses = []
        for _ in range(3):
            if scaler is None:
                losses.append(optimizer.step(closure))
            else:
                losses.append(
                    scaler.step(optimizer, closure=closure) if keyword else scaler.step(optimizer, closure)
                )
                assert scaler.was_skipped(optimizer) is False
                scaler.update()
        outcomes.append([p.detach() for p in params] + losses)
    assert same(*outcomes)


def test_a_closure_that_overflows_runs_again_at_a_smaller_scale() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["sgd"](params)
    scaler = mezzo.GradScaler(init_scale=16.0)
    scales = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(params, 1.0)
        scales.append(scaler.get_scale())
        scaler.scale(loss).backward()
        if scales[-1] > 4.0:
            params[0].grad.fill_(INF)  # type: ignore[union-attr]
        return loss

    loss = scaler.step(optimizer, closure)
    scaler.update()
    assert loss is not None
    assert scales == [16.0, 8.0, 4.0]
    assert scaler.get_scale() == 4.0
    assert params[1].item() == pytest.approx(0.2)


def test_a_closure_that_no_scale_helps_is_skipped_at_the_floor() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["sgd"](params)
    scaler = mezzo.GradScaler(init_scale=4.0, floor=1.0, patience=2)
    scales = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(params, 1.0)
        scales.append(scaler.get_scale())
        assert len(scales) < 10
        scaler.scale(loss).backward()
        params[0].grad.fill_(INF)  # type: ignore[union-attr]
        return loss

    before = [p.detach().clone() for p in params]
    assert scaler.step(optimizer, closure) is None
    assert scales == [4.0, 2.0, 1.0]
    assert scaler.was_skipped(optimizer) is True
    assert same([p.detach() for p in params], before)
    scaler.update()
    scaler.step(optimizer, closure)
    with pytest.raises(LossScaleCollapseError):
        scaler.update()


def test_a_closure_that_fails_in_the_middle_of_a_step_leaves_no_trace() -> None:
    params, loss_fn = problem()
    optimizer = torch.optim.LBFGS(params, lr=0.5, max_iter=5)
    scaler = mezzo.GradScaler()
    calls = 0
    fails_from = 3

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = loss_fn() * (1.0 if calls < fails_from else NAN)
        scaler.scale(loss).backward()
        return loss

    fails_from = 100
    scaler.step(optimizer, closure)
    scaler.update()
    calls, fails_from = 0, 3
    before = [p.detach().clone() for p in params] + copy.deepcopy(flat(optimizer))
    assert scaler.step(optimizer, closure) is None
    scaler.update()
    assert calls == 3
    assert scaler.was_skipped(optimizer) is True
    assert scaler.get_scale() == 2.0**15
    after = [p.detach() for p in params] + flat(optimizer)
    assert len(after) == len(before)
    for a, b in zip(after, before):
        assert same(a, b) if isinstance(a, list) else same([a], [b])


@pytest.mark.parametrize("unscaled", [True, False])
def test_a_closure_used_wrongly_is_loud(unscaled: bool) -> None:
    params = parameters()
    optimizer = OPTIMIZERS["sgd"](params)
    scaler = mezzo.GradScaler()

    def closure() -> Tensor:
        loss = loss_of(params, 1.0)
        loss.backward()
        return loss

    if unscaled:
        scaler.scale(loss_of(params, 1.0)).backward()
        scaler.unscale_(optimizer)
    with pytest.raises(
        CallOrderError, match="do not call unscale_" if unscaled else "did not scale its loss"
    ):
        scaler.step(optimizer, closure)
