"""The loss-scale machine on a device, held to the pure one event by event, and to never waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo.core.errors import LossScaleCollapseError
from mezzo.core.loss_scale import DynamicLossScale, LossScale, NoLossScale, Observation, StaticLossScale
from mezzo.pytorch.scaling import device_scale
from mezzo.pytorch.scaling.device_scale import DeviceLossScale, inverse

FORMS = ("host", "device")
WAITS = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal")


class Waits(TorchDispatchMode):
    """Counts the ops that read a tensor's value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in WAITS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def on_device(pure: LossScale, form: str) -> DeviceLossScale | None:
    """The form of a CPU, or that of an accelerator, with its tensors on the CPU."""
    with pytest.MonkeyPatch.context() as patches:
        if form == "device":
            patches.setattr(device_scale, "reading_is_free", lambda tensor: False)
        return device_scale.on_device(pure, torch.device("cpu"))


factors = st.sampled_from([1.5, 2.0, 3.0, 2.0**100])
machines = st.builds(
    lambda growth, backoff, interval, hysteresis, patience, low, high, start: DynamicLossScale(
        init=2.0 ** max(low, min(high, start)),
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        hysteresis=hysteresis,
        patience=patience,
        floor=2.0**low,
        ceiling=2.0**high,
    ),
    factors,
    st.sampled_from([0.5, 0.3, 0.9]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(-126, 10),
    st.integers(11, 126),
    st.integers(-126, 126),
)
statics = st.builds(StaticLossScale, st.sampled_from([1.0, 3.0, 1024.0]), st.integers(1, 5))


def after(pure: LossScale, event: int) -> tuple[LossScale, str]:
    """The next state, or what was raised in its place."""
    try:
        return pure.next(Observation(found_inf=event != 0)), ""
    except LossScaleCollapseError as error:
        return pure, str(error)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=300, deadline=None)
@given(pure=st.one_of(machines, statics), events=st.lists(st.sampled_from([0, 0, 0, 1, 1, 2]), max_size=40))
def test_device_form_equals_pure_form(form: str, pure: LossScale, events: list[int]) -> None:
    device = on_device(pure, form)
    assert device is not None
    for event in events:
        device = device.next(torch.tensor(float(event)))
        pure, expected = after(pure, event)
        if expected:
            with pytest.raises(LossScaleCollapseError) as raised:
                device.check()
            assert str(raised.value) == expected
            return
        device.check()
        assert device.on_host() == pure
        assert device.scale.item() == pure.scale


@pytest.mark.parametrize("hysteresis", [1, 2])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_next_does_not_wait(hysteresis: int, found: float) -> None:
    machine = on_device(DynamicLossScale(hysteresis=hysteresis), "device")
    assert machine is not None
    flag = torch.tensor(found)
    with Waits() as waits:
        machine.next(flag)
    assert waits.seen == []
    with Waits() as waits:
        machine.check()
    assert waits.seen == ["_local_scalar_dense"]


@pytest.mark.parametrize("form", FORMS)
def test_next_leaves_the_state_it_came_from(form: str) -> None:
    machine = on_device(DynamicLossScale(growth_interval=1), form)
    assert machine is not None
    machine.next(torch.tensor(1.0))
    machine.next(torch.tensor(0.0))
    assert machine.on_host() == DynamicLossScale(growth_interval=1)


def test_no_loss_scale_has_nothing_on_the_device() -> None:
    assert on_device(NoLossScale(), "host") is None


@pytest.mark.parametrize("exponent", [-126, -14, 0, 16, 24, 126])
def test_inverse_is_exact_and_finite_over_the_whole_range(exponent: int) -> None:
    assert float(inverse(torch.tensor(2.0**exponent))) == 2.0**-exponent


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
        machine = device_scale.on_device(DynamicLossScale(), torch.device("cuda:0"))
        assert machine is not None
        assert str(machine.next(torch.zeros((), device="cuda:0")).scale.device) == "cuda:0"
