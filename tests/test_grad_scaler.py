"""GradScaler: torch.amp's numbers event by event; what each call takes and refuses; closures; states."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mezzo
from bad_steps import same
from mezzo.core.errors import CallOrderError, LossScaleCollapseError, UsageError

INF, NAN = float("inf"), float("nan")

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([1.0, -2.0, 3.0])), nn.Parameter(torch.tensor([[0.5]]))]


def loss_of(params: list[nn.Parameter], event: float) -> Tensor:
    """A loss whose gradient is 3 everywhere, but for one element: 3 * event."""
    weights = torch.tensor([event, 1.0, 1.0])
    return 3.0 * ((params[0] * weights).sum() + params[1].sum())


def train(scaler: Any, optimizer: torch.optim.Optimizer, params: list[nn.Parameter], event: float) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(params, event)).backward()
    scaler.step(optimizer)
    scaler.update()


def started(**arguments: Any) -> tuple[Any, torch.optim.Optimizer, list[nn.Parameter]]:
    params, scaler = parameters(), mezzo.GradScaler(**arguments)
    scaler.scale(loss_of(params, 1.0)).backward()
    return scaler, OPTIMIZERS["sgd"](params), params


def state_after(scaler: Any, events: list[float]) -> dict[str, Any]:
    params = parameters()
    optimizer = OPTIMIZERS["sgd"](params)
    for event in events:
        train(scaler, optimizer, params, event)
    return scaler.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=15, deadline=None)
@given(
    events=st.lists(st.sampled_from([1.0, 1.0, -2.0, INF, NAN, 0.0]), min_size=1, max_size=20),
    growth=st.sampled_from([2.0, 4.0]),
    interval=st.integers(1, 3),
    unscales=st.booleans(),
)
def test_equals_torch(name: str, events: list[float], growth: float, interval: int, unscales: bool) -> None:
    sides = []
    for of, how in ((torch.amp.GradScaler, {}), (mezzo.GradScaler, {"ceiling": 2.0**99, "floor": 2.0**-99})):
        params = parameters()
        scaler = of("cpu", init_scale=2.0**10, growth_factor=growth, growth_interval=interval, **how)
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
        sides.append([*trace, optimizer.state_dict()["state"]])
    assert same(*sides)


def test_unscales_with_the_scale_that_the_loss_was_multiplied_with() -> None:
    scaler, optimizer, params = started(init_scale=4.0)
    scaler.update(1024.0)
    scaler.unscale_(optimizer)
    assert params[0].grad.tolist() == [3.0, 3.0, 3.0]
    assert scaler.get_scale() == 1024.0


def test_the_larger_of_two_found_infs_counts_for_one_scale() -> None:
    first, second = parameters(), parameters()
    one, two = OPTIMIZERS["sgd"](first), OPTIMIZERS["adamw-fused"](second)
    scaler = mezzo.GradScaler(init_scale=8.0)
    for loss in scaler.scale([loss_of(first, 1.0), loss_of(second, INF)]):
        loss.backward()
    scaler.step(one)
    scaler.step(two)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert (scaler.was_skipped(one), scaler.was_skipped(two)) == (False, True)


@pytest.mark.parametrize(("dtype", "match"), [(torch.float16, "Keep them in FP32"), (None, "has a gradient")])
def test_fp16_gradients_and_none_at_all_are_refused(dtype: torch.dtype | None, match: str) -> None:
    param = nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = mezzo.GradScaler(init_scale=2.0)
    scaler.scale(param.float().sum()).backward()
    if dtype is None:
        optimizer.zero_grad()
    with pytest.raises(UsageError, match=match):
        scaler.step(optimizer)


def test_sparse_gradients_are_unscaled_by_their_values() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    before = embedding.weight.detach().clone()
    scaler = mezzo.GradScaler()
    scaler.scale(embedding(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.step(optimizer)
    moved = (before - embedding.weight.detach())[:, 0]
    assert moved.tolist() == pytest.approx([0.0, 2.0, 0.0, 1.0, 0.0], abs=1e-6)


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
    for event, skipped in ((1.0, False), (INF, True)):
        with pytest.warns(FutureWarning, match="stop passing itself"):  # torch's own
            train(scaler, optimizer, params, event)
        assert scaler.was_skipped(optimizer) is skipped
    assert params[1].item() == pytest.approx(0.2)
    assert scaler.get_scale() == 2.0**15


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


@pytest.mark.parametrize("unscaled", [True, False])
def test_a_closure_used_wrongly_is_loud(unscaled: bool) -> None:
    scaler, optimizer, params = started()
    if unscaled:
        scaler.unscale_(optimizer)
    match = "call of unscale_" if unscaled else r"did not call scale\(\)"
    with pytest.raises(CallOrderError, match=match):
        scaler.step(optimizer, lambda: loss_of(params, 1.0))


@pytest.mark.parametrize("enabled", [True, False])
def test_state_loads_from_enabled_to_disabled_and_back(enabled: bool) -> None:
    saved = state_after(mezzo.GradScaler(growth_interval=3), [1.0, INF, 1.0, 1.0])
    middle = mezzo.GradScaler(enabled=enabled)
    middle.scale(torch.tensor(1.0))
    middle.load_state_dict(saved)
    assert middle.state_dict() == saved
    last = mezzo.GradScaler()
    last.load_state_dict(middle.state_dict())
    assert (last.get_scale(), last._get_growth_tracker()) == (2.0**15, 2)
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
    with pytest.raises(UsageError, match="must have scale, growth_factor"):
        mezzo.GradScaler().load_state_dict({"scale": 1.0})


@pytest.mark.parametrize(("scale", "used"), [(0.0, 2.0**-14), (INF, 2.0**24), (NAN, 2.0**-14)])
def test_a_collapsed_scale_of_torch_is_clamped_with_a_warning(scale: float, used: float) -> None:
    state = torch.amp.GradScaler("cpu").state_dict() | {"scale": scale}
    scaler = mezzo.GradScaler()
    with pytest.warns(UserWarning, match="lies outside its bounds"):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == used


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_copies_and_pickles_go_on_alike(copied: Callable[[Any], Any]) -> None:
    scaler = mezzo.GradScaler(growth_interval=2)
    state_after(scaler, [1.0, INF, 1.0])
    twin = copied(scaler)
    assert twin.state_dict() == scaler.state_dict()
    assert state_after(twin, [1.0, INF]) == state_after(scaler, [1.0, INF])


def test_it_is_a_scaler_of_torch_with_its_private_names() -> None:
    scaler = mezzo.GradScaler(torch.device("cpu"), init_scale=8.0, growth_interval=2)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert (scaler._device, scaler.is_enabled()) == ("cpu", True)
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
    """As `ShardedGradScaler` of FSDP does, for another rank's overflow."""

    class Agreeing(mezzo.GradScaler):
        def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
            found = super()._unscale_grads_(*args)
            return {device: torch.ones_like(flag) for device, flag in found.items()}

    for name in ("sgd", "adamw-fused"):
        scaler, params = Agreeing(init_scale=8.0), parameters()
        optimizer = OPTIMIZERS[name](params)
        scaler.scale(loss_of(params, 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.was_skipped(optimizer)
        assert scaler.get_scale() == 4.0
        assert params[1].item() == 0.5


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (("unscale_", "unscale_"), "already been called"),
        (("step", "unscale_"), r"was called after step\(\)"),
        (("step", "step"), r"was called after step\(\)"),
        (("update",), "no gradients were checked"),
        (("was_skipped",), "has not stepped yet"),
        (("step", "update", "step"), "was not called since"),
    ],
)
def test_wrong_orders_are_errors(calls: tuple[str, ...], message: str) -> None:
    scaler, optimizer, _ = started()
    *before, last = calls
    for name in before:
        getattr(scaler, name)(*([] if name == "update" else [optimizer]))
    with pytest.raises(CallOrderError, match=message):
        getattr(scaler, last)(*([] if last == "update" else [optimizer]))


def test_invalid_arguments_are_refused_and_a_first_scale_moves_the_default_bounds() -> None:
    wrong = ({"device": 1024.0}, {"backoff_factor": 1.0}, {"init_scale": 1.0, "floor": 2.0})
    for arguments, message in zip(wrong, ("init_scale=1024.0", "backoff_factor", "between floor=")):
        with pytest.raises(UsageError, match=message):
            mezzo.GradScaler(**arguments)  # type: ignore[arg-type]
    for scale in (2.0**30, 2.0**-30):
        assert mezzo.GradScaler(init_scale=scale).get_scale() == scale


NO_SCALES = [0.0, NAN, 2.0**30, torch.ones(2), torch.ones((), requires_grad=True)]
TENSORS = {3.0: 3.0, INF: 2.0**24, NAN: 2.0**-14}


@pytest.mark.parametrize(
    ("given", "used"),
    [*((wrong, None) for wrong in NO_SCALES), *((torch.tensor([x]), used) for x, used in TENSORS.items())],
)
def test_update_refuses_what_is_no_scale_and_clamps_a_tensor(given: Any, used: float | None) -> None:
    scaler = mezzo.GradScaler()
    with nullcontext() if used else pytest.raises(UsageError):
        scaler.update(given)
    assert scaler.get_scale() == (used or 2.0**16)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("init_scale", [2.0**10, 2.0**126])
def test_lbfgs_equals_the_plain_one_bit_by_bit(search: str | None, init_scale: float) -> None:
    """With 2**126 the loss still is a number, and 8 times its gradient is not."""
    outcomes = []
    for scaler in (mezzo.GradScaler(enabled=False), mezzo.GradScaler(init_scale=init_scale)):
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(20, 3, generator=generator), torch.randn(20, generator=generator)
        params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(()))]
        optimizer = torch.optim.LBFGS(params, lr=0.5, max_iter=5, line_search_fn=search)

        def closure() -> Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss = ((x @ params[0] + params[1] - y) ** 2).mean()  # noqa: B023
            scaler.scale(8.0 * loss).backward()  # noqa: B023
            return loss

        losses = []
        for _ in range(3):
            losses.append(scaler.step(optimizer, closure=closure))
            assert scaler.was_skipped(optimizer) is False
            scaler.update()
        outcomes.append([p.detach() for p in params] + losses)
    assert same(*outcomes)


@pytest.mark.parametrize(("finite_up_to", "scales"), [(4.0, [16.0, 8.0, 4.0]), (0.0, [16.0, 8.0, 4.0, 2.0])])
def test_a_closure_that_overflows_runs_again_at_a_smaller_scale(finite_up_to: float, scales: Any) -> None:
    """Down to the floor of 2, where the step is skipped and undone."""
    params = parameters()
    optimizer = OPTIMIZERS["sgd-momentum"](params)
    scaler = mezzo.GradScaler(init_scale=16.0, floor=2.0, patience=2)
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
        loss = loss_of(params, 1.0)
        scaler.scale(loss).backward()
        if seen[-1] > finite_up_to:
            params[0].grad.fill_(INF)  # type: ignore[union-attr]
        return loss

    loss = scaler.step(optimizer, closure)
    scaler.update()
    assert seen == scales
    assert scaler.get_scale() == scales[-1]
    assert scaler.was_skipped(optimizer) is (loss is None) is (finite_up_to == 0.0)
    assert params[1].item() == pytest.approx(0.5 if loss is None else 0.2)
    if loss is None:
        scaler.step(optimizer, closure)
        with pytest.raises(LossScaleCollapseError):
            scaler.update()


def test_a_disabled_scaler_passes_through_and_keeps_its_numbers() -> None:
    numbers = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7}
    scaler, optimizer, params = started(enabled=False, **numbers)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.is_enabled(), scaler.was_skipped(optimizer), scaler.get_scale()) == (False, False, 1.0)
    assert params[1].item() == pytest.approx(0.2)
    assert {key: getattr(scaler, f"get_{key}")() for key in numbers} == numbers
    scaler.set_growth_factor(8.0)
    assert scaler.state_dict()["growth_factor"] == 8.0


FROM_0_1_0 = {
    "scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 2,
    "floor": 2.0, "ceiling": 8.0, "hysteresis": 2, "patience": 9, "overflows": 0, "stuck": 0,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["state", "pickle"])
def test_states_and_pickles_of_version_0_1_0_go_on(kind: str) -> None:
    from mezzo.pytorch.scaling.scaler import GradScaler  # where a pickle looks for it

    scaler = GradScaler.__new__(GradScaler)
    if kind == "state":
        scaler = GradScaler()
        scaler.load_state_dict(FROM_0_1_0)
    else:
        names = ("growth_interval", "hysteresis", "scale", "patience", "floor", "ceiling")
        pure = mezzo.DynamicLossScale(init=8.0, good_steps=2, **{name: FROM_0_1_0[name] for name in names})
        scaler.__setstate__({"device": None, "enabled": True, "pure": pure})
    assert scaler.state_dict() == FROM_0_1_0
    assert state_after(scaler, [1.0])["scale"] == 8.0
    assert state_after(scaler, [INF])["scale"] == 8.0  # the first overflow is forgiven, by its hysteresis
