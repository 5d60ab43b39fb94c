"""GradScaler: disabled, saved, loaded and copied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mezzo
from mezzo.core.errors import UsageError
from scaled_steps import INF, NAN, OPTIMIZERS, loss_of, parameters, state_after


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
