"""The loss-scale machine on a device, held to the pure one event by event, and to never waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.core.errors import LossScaleCollapseError
from mezzo.core.loss_scale import DynamicLossScale, LossScale, NoLossScale, Observation, StaticLossScale
from mezzo.pytorch.scaling.device_scale import inverse, on_device

CPU = torch.device("cpu")
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


@settings(max_examples=300, deadline=None)
@given(st.one_of(machines, statics), st.lists(st.sampled_from([0, 0, 0, 1, 1, 2]), max_size=40))
def test_device_form_equals_pure_form(pure: LossScale, events: list[int]) -> None:
    device = on_device(pure, CPU)
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


@pytest.mark.parametrize("hysteresis", [1, 2])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_next_does_not_wait(hysteresis: int, found: float) -> None:
    machine = on_device(DynamicLossScale(hysteresis=hysteresis), CPU)
    assert machine is not None
    flag = torch.tensor(found)
    with Waits() as waits:
        machine.next(flag)
    assert waits.seen == []
    with Waits() as waits:
        machine.check()
    assert waits.seen == ["_local_scalar_dense"]


def test_next_leaves_the_state_it_came_from() -> None:
    machine = on_device(DynamicLossScale(growth_interval=1), CPU)
    assert machine is not None
    machine.next(torch.tensor(1.0))
    machine.next(torch.tensor(0.0))
    assert machine.on_host() == DynamicLossScale(growth_interval=1)


def test_no_loss_scale_has_nothing_on_the_device() -> None:
    assert on_device(NoLossScale(), CPU) is None


@pytest.mark.parametrize("exponent", [-126, -14, 0, 16, 24, 126])
def test_inverse_is_exact_and_finite_over_the_whole_range(exponent: int) -> None:
    assert float(inverse(torch.tensor(2.0**exponent))) == 2.0**-exponent
