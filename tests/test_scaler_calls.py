"""GradScaler: what each call takes and refuses, and in which order."""

from __future__ import annotations

import gc
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo.core.errors import CallOrderError, UsageError
from scaled_steps import INF, NAN, OPTIMIZERS, flat, loss_of, parameters, same, train


def test_scale_keeps_the_shape_of_what_it_is_given() -> None:
    scaler = mezzo.GradScaler(init_scale=4.0)
    one, pair = torch.tensor(1.0), namedtuple("pair", "a b")
    assert scaler.scale(one).item() == 4.0
    nested = scaler.scale([one, (one, [one])])  # type: ignore[list-item]
    assert isinstance(nested, list)
    assert isinstance(nested[1], tuple)
    assert nested[1][1][0].item() == 4.0
    assert scaler.scale(pair(one, one)) == pair(torch.tensor(4.0), torch.tensor(4.0))
    assert [t.item() for t in scaler.scale(t for t in (one, one))] == [4.0, 4.0]
    with pytest.raises(UsageError, match="not float"):
        scaler.scale(1.0)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="not dict"):
        scaler.scale({"loss": one})


def call(*names: str) -> Callable[[Any, torch.optim.Optimizer], None]:
    def run(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        for name in names:
            method = getattr(scaler, name)
            method() if name == "update" else method(optimizer)

    return run


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (("unscale_", "unscale_"), "already been called"),
        (("step", "unscale_"), "being called after step"),
        (("step", "step"), "already been called since the last update"),
        (("update",), "no gradients were checked"),
        (("step", "update", "update"), "no gradients were checked"),
    ],
)
def test_wrong_orders_are_errors_as_they_are_in_torch(calls: tuple[str, ...], message: str) -> None:
    for make in (torch.amp.GradScaler, mezzo.GradScaler):
        params = parameters()
        optimizer = OPTIMIZERS["sgd"](params)
        scaler = make("cpu")
        scaler.scale(loss_of(params, 1.0)).backward()
        error: Any = (RuntimeError, AssertionError) if make is torch.amp.GradScaler else CallOrderError
        with pytest.raises(error, match="called|recorded" if make is torch.amp.GradScaler else message):
            call(*calls)(scaler, optimizer)


def test_no_gradient_at_all_is_an_error() -> None:
    params = parameters()
    scaler = mezzo.GradScaler()
    scaler.scale(torch.ones(()))
    with pytest.raises(UsageError, match="has a gradient"):
        scaler.step(OPTIMIZERS["sgd"](params))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": 1024.0}, "init_scale=1024.0"),
        ({"growth_factor": 1.0}, "growth_factor"),
        ({"backoff_factor": 1.0}, "backoff_factor"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"init_scale": INF}, "init"),
        ({"init_scale": 1.0, "floor": 2.0}, "between the floor"),
    ],
)
def test_constructor_refuses_what_makes_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        mezzo.GradScaler(**arguments)


@pytest.mark.parametrize("given", [0.0, INF, NAN, 2.0**30, torch.ones(2), torch.ones((), requires_grad=True)])
def test_update_refuses_a_scale_that_is_none(given: Any) -> None:
    scaler = mezzo.GradScaler()
    with pytest.raises(UsageError):
        scaler.update(given)
    assert scaler.get_scale() == 2.0**16


@pytest.mark.parametrize(("given", "used"), [(3.0, 3.0), (INF, 2.0**24), (NAN, 2.0**-14), (0.0, 2.0**-14)])
def test_update_brings_a_tensor_within_the_bounds(given: float, used: float) -> None:
    scaler = mezzo.GradScaler()
    scaler.update(torch.tensor([given]))
    assert scaler.get_scale() == used


def test_a_first_scale_beyond_the_default_bounds_moves_them() -> None:
    assert mezzo.GradScaler(init_scale=2.0**30).get_scale() == 2.0**30
    assert mezzo.GradScaler(init_scale=2.0**-30).get_scale() == 2.0**-30


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_cuda_is_disabled_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="disabling it"):
        assert not mezzo.GradScaler("cuda").is_enabled()


def test_an_fp16_gradient_is_refused_with_its_mend() -> None:
    param = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = mezzo.GradScaler(init_scale=2.0)
    scaler.scale(param.float().sum()).backward()
    with pytest.raises(UsageError, match="Keep them FP32"):
        scaler.step(optimizer)


@pytest.mark.parametrize("event", [1.0, INF])
def test_sparse_gradients_are_checked_and_unscaled_by_their_values(event: float) -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    before = embedding.weight.detach().clone()
    scaler = mezzo.GradScaler()
    scaler.scale((embedding(torch.tensor([1, 1, 3])) * event).sum()).backward()
    scaler.step(optimizer)
    moved = (before - embedding.weight.detach())[:, 0]
    expected = [0.0, 2.0, 0.0, 1.0, 0.0] if event == 1.0 else [0.0] * 5
    assert moved.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("started", [True, False])
def test_setters_take_effect_as_in_torch(started: bool) -> None:
    traces = []
    for make in (torch.amp.GradScaler, mezzo.GradScaler):
        params = parameters()
        optimizer = OPTIMIZERS["sgd"](params)
        scaler = make("cpu", init_scale=64.0)
        if started:
            train(scaler, optimizer, params, 1.0)
        scaler.set_growth_factor(4.0)
        scaler.set_backoff_factor(0.125)
        scaler.set_growth_interval(2)
        trace = [scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()]
        for event in (1.0, 1.0, 1.0, INF):
            train(scaler, optimizer, params, event)
            trace.append(scaler.get_scale())
        traces.append(trace)
    assert traces[0] == traces[1]


def test_nothing_is_kept_of_an_optimizer_that_is_gone() -> None:
    scaler = mezzo.GradScaler()
    params = parameters()
    optimizer = OPTIMIZERS["sgd"](params)
    train(scaler, optimizer, params, 1.0)
    assert len(scaler._last) == 1
    del optimizer
    gc.collect()
    assert len(scaler._last) == 0


def test_the_older_contract_hands_the_scaler_to_the_optimizer() -> None:
    class Own(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:
            found = grad_scaler._check_inf_per_device(self)
            if not sum(float(flag) for flag in found.values()):
                for p in self.param_groups[0]["params"]:
                    p.grad.div_(grad_scaler._get_scale_async())
                super().step(closure)

    params = parameters()
    optimizer = Own(params, lr=0.1)
    scaler = mezzo.GradScaler()
    with pytest.warns(FutureWarning, match="stop passing itself"):  # torch's own
        train(scaler, optimizer, params, 1.0)
    assert params[1].item() == pytest.approx(0.2)
    with pytest.warns(FutureWarning, match="stop passing itself"):
        train(scaler, optimizer, params, INF)
    assert scaler.was_skipped(optimizer) is True
    assert scaler.get_scale() == 2.0**15


def test_scale_of_the_optimizer_s_own_is_multiplied_in() -> None:
    weights = []
    for make in (torch.amp.GradScaler, mezzo.GradScaler):
        params = parameters()
        optimizer = OPTIMIZERS["adamw-fused"](params)
        scaler = make("cpu")
        optimizer.grad_scale = torch.tensor(4.0)
        scaler.scale(loss_of(params, 1.0)).backward()
        scaler.step(optimizer)
        weights.append([p.detach() for p in params] + flat(optimizer))
        assert not hasattr(optimizer, "grad_scale")
    assert same(*weights)


def test_a_fused_step_that_raises_can_be_taken_again() -> None:
    """torch's own leaves `grad_scale` on the optimizer then, and divides by it twice the next time."""
    params = parameters()
    optimizer = OPTIMIZERS["adamw-fused"](params)
    scaler = mezzo.GradScaler(init_scale=4.0)
    scaler.scale(loss_of(params, 1.0)).backward()
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    handle.remove()
    assert not hasattr(optimizer, "grad_scale")
    scaler.step(optimizer)
    assert optimizer.state[params[1]]["exp_avg"].item() == pytest.approx(0.3)
