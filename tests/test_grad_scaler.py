"""GradScaler: torch.amp's numbers event by event; what each call takes and refuses; closures; states."""

from __future__ import annotations

import copy
import gc
import pickle
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mezzo
from mezzo.core.errors import CallOrderError, LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import DynamicLossScale
from mezzo.pytorch.loss_scaler import LossScaler
from scaled_steps import INF, NAN, OPTIMIZERS, flat, loss_of, parameters, same, state_after, train


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
        (("step", "step"), "being called after step"),
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


def test_several_devices_have_one_scale_and_nothing_is_read() -> None:
    """FakeTensors of two GPUs, from which reading a number raises."""
    with FakeTensorMode():
        params = [torch.ones(3, device=f"cuda:{index}") for index in range(2)]
        optimizer = torch.optim.SGD(params, lr=0.1, foreach=False)
        scaler = mezzo.GradScaler(init_scale=4.0, hysteresis=2)
        for _ in range(3):
            losses = scaler.scale([param.sum() for param in params])
            assert [str(loss.device) for loss in losses] == ["cuda:0", "cuda:1"]
            for param in params:
                param.grad = torch.ones_like(param)
            scaler.unscale_(optimizer)
            found = scaler._found_inf_per_device(optimizer)
            assert [str(flag.device) for flag in found.values()] == ["cuda:0", "cuda:1"]
            scaler.update()
        for part in (scaler._scale, scaler._growth_tracker, scaler._overflows, scaler._stuck):
            assert str(part.device) == "cuda:0"
        scaler.update(2.0)
        scaler.update(torch.ones((), device="cuda:0"))
        machine = LossScaler.of(DynamicLossScale(), torch.device("cuda:0"))
        assert machine is not None
        machine.update(torch.zeros((), device="cuda:0"))
        assert str(machine.scale.device) == "cuda:0"


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


def test_a_disabled_scaler_keeps_its_getters_and_passes_through() -> None:
    scaler = mezzo.GradScaler(enabled=False, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    loss = torch.tensor(1.0)
    assert scaler.scale(loss) is loss
    assert not scaler.is_enabled()
    assert scaler.get_scale() == 1.0
    assert scaler.get_growth_factor() == 4.0
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 7
    scaler.set_growth_factor(8.0)
    scaler.set_backoff_factor(0.5)
    scaler.set_growth_interval(9)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (
        8.0,
        0.5,
        9,
    )
    params = parameters()
    optimizer = OPTIMIZERS["sgd"](params)
    optimizer.zero_grad()
    loss_of(params, 1.0).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.was_skipped(optimizer) is False
    assert params[1].item() == pytest.approx(0.2)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("start", [True, False])
def test_state_loads_from_enabled_to_disabled_and_back(enabled: bool, start: bool) -> None:
    saved = state_after(mezzo.GradScaler(growth_interval=3), [1.0, INF, 1.0, 1.0])
    middle = mezzo.GradScaler(enabled=enabled)
    if start:
        middle.scale(torch.tensor(1.0))
    middle.load_state_dict(saved)
    assert middle.state_dict() == saved
    last = mezzo.GradScaler()
    last.load_state_dict(middle.state_dict())
    assert last.get_scale() == 2.0**15
    assert last._get_growth_tracker() == 2
    middle.load_state_dict(torch.amp.GradScaler(enabled=False).state_dict())
    assert middle.state_dict() == saved


def test_states_go_to_torch_and_come_from_it() -> None:
    events = [1.0, INF, 1.0, 1.0, NAN, 1.0]
    theirs = state_after(torch.amp.GradScaler("cpu", growth_interval=3, growth_factor=4.0), events)
    ours = mezzo.GradScaler()
    ours.load_state_dict(theirs)
    assert {key: ours.state_dict()[key] for key in theirs} == theirs
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(ours.state_dict())
    assert back.state_dict() == theirs


@pytest.mark.parametrize(
    ("scale", "used"), [(0.0, 2.0**-14), (INF, 2.0**24), (NAN, 2.0**-14), (2.0**-130, 2.0**-14)]
)
def test_a_collapsed_scale_of_torch_is_mended_aloud(scale: float, used: float) -> None:
    state = torch.amp.GradScaler("cpu").state_dict() | {"scale": scale}
    scaler = mezzo.GradScaler()
    with pytest.warns(UserWarning, match="lies outside its bounds"):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == used


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match="must have scale, growth_factor"):
        mezzo.GradScaler().load_state_dict({"scale": 1.0})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_copies_and_pickles_go_on_alike(copied: Callable[[Any], Any]) -> None:
    scaler = mezzo.GradScaler(growth_interval=2)
    state_after(scaler, [1.0, INF, 1.0])
    twin = copied(scaler)
    assert twin.state_dict() == scaler.state_dict()
    assert state_after(twin, [1.0, INF]) == state_after(scaler, [1.0, INF])


def test_a_pickle_of_version_0_1_0_goes_on() -> None:
    scaler = mezzo.GradScaler.__new__(mezzo.GradScaler)
    pure = mezzo.DynamicLossScale(
        init=8.0, growth_interval=3, hysteresis=2, scale=4.0, good_steps=2, overflows=0
    )
    scaler.__setstate__({"device": None, "enabled": True, "pure": pure})
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.get_growth_interval()) == (4.0, 2, 3)
    assert state_after(scaler, [1.0])["scale"] == 8.0
    assert state_after(scaler, [INF])["scale"] == 8.0  # forgiven, by its hysteresis


def test_a_state_of_version_0_1_0_goes_on() -> None:
    saved = {
        "scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 4, "_growth_tracker": 3,
        "floor": 256.0, "ceiling": 1024.0, "hysteresis": 1, "patience": 9, "overflows": 0, "stuck": 0,
    }  # fmt: skip
    scaler = mezzo.GradScaler()
    scaler.load_state_dict(saved)
    assert scaler.state_dict() == saved
    assert state_after(scaler, [1.0] * 9)["scale"] == 1024.0


def test_it_is_a_scaler_of_torch_with_its_private_names() -> None:
    scaler = mezzo.GradScaler(init_scale=8.0, growth_interval=2)
    assert isinstance(scaler, torch.amp.GradScaler)
    params = parameters()
    optimizer = OPTIMIZERS["sgd"](params)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    for _ in range(2):  # a library that scales by itself, as some pipelines do
        optimizer.zero_grad()
        (loss_of(params, 1.0) * scaler._scale).backward()
        scaler._check_inf_per_device(optimizer)
        assert [float(flag) for flag in scaler._found_inf_per_device(optimizer).values()] == [0.0]
        scaler.step(optimizer)
        scaler.update()
    assert params[1].item() == pytest.approx(0.5 - 2 * 0.3)
    assert scaler._get_scale_async().item() == 16.0  # type: ignore[union-attr]
    assert scaler._growth_tracker.item() == 0  # type: ignore[union-attr]
    assert scaler._init_scale == 8.0
    assert not scaler._per_optimizer_states


def test_a_subclass_may_check_gradients_its_own_way() -> None:
    """`ShardedGradScaler` of FSDP does."""

    class Agreeing(mezzo.GradScaler):
        def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
            found = super()._unscale_grads_(*args)
            return {
                device: torch.ones_like(flag) for device, flag in found.items()
            }  # another rank's overflow

    for name in ("sgd", "adamw-fused"):
        scaler, params = Agreeing(init_scale=8.0), parameters()
        optimizer = OPTIMIZERS[name](params)
        scaler.scale(loss_of(params, 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.was_skipped(optimizer)
        assert scaler.get_scale() == 4.0
        assert params[1].item() == 0.5
