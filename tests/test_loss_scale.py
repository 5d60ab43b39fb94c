"""The loss scale: event tables, bounds for any history, on arrays, and on a device; and the cases of every framework.

Those on Keras and TensorFlow: `on_keras/test_keras_fit.py`, `on_tensorflow/test_tf_rewrite.py`.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mezzo
import one_task
from mezzo.core.errors import LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import (
    KINDS,
    DynamicLossScale,
    LossScale,
    NoLossScale,
    Observation,
    StaticLossScale,
    check,
    from_state_dict,
)
from mezzo.core.policy_text import as_loss_scale
from mezzo.pytorch import loss_scaler
from mezzo.pytorch.loss_scaler import LossScaler, inverse
from scale_cases import TABLE, Remembering

GOOD, BAD = Observation(found_inf=False), Observation(found_inf=True)


def after(state: LossScale, events: str) -> Any:
    """The state after a string of events: `.` a good step, `x` an overflow."""
    for event in events:
        state = state.next(GOOD if event == "." else BAD)
    return state


@pytest.mark.parametrize(("settings", "events", "scale", "good", "overflows", "stuck"), TABLE)
def test_events(settings: Any, events: str, scale: float, good: int, overflows: int, stuck: int) -> None:
    state = after(DynamicLossScale(**settings), events)
    assert (state.scale, state.good_steps, state.overflows, state.stuck) == (scale, good, overflows, stuck)


def test_patience_runs_out_at_the_floor_only() -> None:
    state = DynamicLossScale(init=4.0, floor=1.0, patience=3)
    assert after(state, "xxxx").stuck == 2
    with pytest.raises(LossScaleCollapseError, match=r"floor 2\^0 and the last 3 steps .* bf16") as caught:
        after(state, "xxxxx")
    assert "NaN" in str(caught.value)
    assert after(state, "xxxx.xx.xx").stuck == 2  # a good step forgives


def test_a_static_scale_stays_and_loses_patience() -> None:
    state = after(StaticLossScale(8.0, patience=3), "xx.xx")
    assert (state.scale, state.skips) == (8.0, 2)
    with pytest.raises(LossScaleCollapseError, match=r"constant loss scale 2\^3.*from_largest"):
        state.next(BAD)
    check(NoLossScale(), replace(state.arrays(), stuck=np.asarray(10**6)))  # which has no patience


FROM_LARGEST = [
    # largest, format, headroom, scale
    (1.0, "fp16", 1, 2.0**14),
    (65504.0 / 8, "fp16", 0, 8.0),
    (math.nextafter(65504.0 / 8, math.inf), "fp16", 0, 4.0),
    (1e-300, "fp16", 1, 2.0**100),
    (448.0, "e4m3fn", 0, 1.0),
    (2.0**127, "bf16", 2, 0.25),
]


@pytest.mark.parametrize(("largest", "form", "headroom", "scale"), FROM_LARGEST)
def test_from_largest(largest: float, form: str, headroom: int, scale: float) -> None:
    assert StaticLossScale.from_largest(largest, form, headroom).scale == scale


events = st.text(alphabet=".x", max_size=300)


powers = st.integers(-20, 30)


@st.composite
def machines(draw: st.DrawFn, impatient: bool = False) -> DynamicLossScale:
    low, init, high = sorted(draw(st.tuples(powers, powers, powers)))
    return DynamicLossScale(
        init=2.0**init,
        floor=2.0**low,
        ceiling=2.0**high,
        growth_factor=draw(st.floats(1.0625, 64.0, width=32)),
        backoff_factor=draw(st.floats(0.0625, 0.9375, width=32)),
        growth_interval=draw(st.integers(1, 5)),
        hysteresis=draw(st.integers(1, 4)),
        patience=draw(st.integers(1, 5)) if impatient else 10**6,
    )


statics = st.builds(StaticLossScale, st.sampled_from([1.0, 3.0, 1024.0]), st.integers(1, 5))
remembering = machines(impatient=True).map(lambda machine: Remembering(**vars(machine)))


@given(machines(), events)
def test_bounds_hold_for_any_history(machine: DynamicLossScale, history: str) -> None:
    for event in history:
        before, machine = machine, after(machine, event)
        assert machine.floor <= machine.scale <= machine.ceiling
        assert float(np.float32(machine.scale)) == machine.scale
        assert np.isfinite(np.float32(1) / np.float32(machine.scale))
        assert machine.scale <= before.scale if event == "x" else machine.scale >= before.scale
        assert 0 <= machine.good_steps < machine.growth_interval
        assert (machine.overflows > 0) == (event == "x")
        assert machine.stuck <= machine.overflows


@given(machines(), events, events, st.booleans())
def test_save_and_load_is_identity(machine: DynamicLossScale, before: str, later: str, is_toy: bool) -> None:
    saved = after(Remembering(**vars(machine)) if is_toy else machine, before)
    with pytest.MonkeyPatch.context() as patches:
        patches.setitem(KINDS, Remembering.kind, Remembering)
        loaded = from_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert loaded == saved
    assert after(loaded, later) == after(saved, later)


def test_the_statistical_one_is_gone_and_the_error_says_what_to_use() -> None:
    with pytest.raises(UsageError, match=r"here: loss_scale: .*removed.*'dynamic'"):
        as_loss_scale("statistical(window=50)", "here")
    with pytest.raises(UsageError, match=r"removed.*'dynamic'"):
        from_state_dict({"kind": "statistical", "init": 8.0})


@pytest.mark.parametrize("value", [0, math.nan, math.inf, 10**400, np.int64(-1)])
def test_a_constant_may_be_any_number_in_range(value: Any) -> None:
    assert as_loss_scale(np.float16(8), "here") == as_loss_scale(8, "here") == StaticLossScale(8.0)
    with pytest.raises(UsageError, match=r"here: loss_scale: scale is .*between 2\*\*-126 and 2\*\*126"):
        as_loss_scale(value, "here")


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (DynamicLossScale, {"init": 0.5, "floor": 1.0}, r"init is 2\^-1.*between floor=2\^0"),
    (DynamicLossScale, {"floor": 0.0}, "floor is 0.0"),
    (DynamicLossScale, {"init": math.nan}, "init is nan"),
    (DynamicLossScale, {"growth_factor": 1.0 + 2.0**-30}, "above 1"),
    (DynamicLossScale, {"backoff_factor": 0.0}, "backoff_factor is 0.0"),
    (DynamicLossScale, {"good_steps": -1}, "good_steps is -1"),
    (StaticLossScale, {"scale": "1024"}, "scale is '1024'"),
    (StaticLossScale.from_largest, {"largest_gradient": 0.0}, "above 0"),
    (StaticLossScale.from_largest, {"largest_gradient": 1.0, "headroom_bits": -1}, "headroom_bits is -1"),
]


@pytest.mark.parametrize(("make", "arguments", "words"), WRONG)
def test_wrong_arguments_say_what_is_allowed(make: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(**arguments)


FORMS = ("host", "device")


def on_device(pure: LossScale, form: str) -> LossScaler | None:
    """The form of a CPU, or that of an accelerator, with its tensors on the CPU."""
    with pytest.MonkeyPatch.context() as patches:
        if form == "device":
            patches.setattr(loss_scaler, "reading_is_free", lambda tensor: False)
        return LossScaler.of(pure, torch.device("cpu"))


def stepped_or_raised(pure: LossScale, event: int) -> tuple[LossScale, str]:
    try:
        return pure.next(Observation(found_inf=event != 0)), ""
    except LossScaleCollapseError as error:
        return pure, str(error)


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None)
@given(
    pure=st.one_of(machines(impatient=True), statics, remembering),
    events=st.lists(st.sampled_from([0, 0, 0, 1, 1, 2]), max_size=40),
)
def test_device_form_equals_pure_form(form: str, pure: LossScale, events: list[int]) -> None:
    device = on_device(pure, form)
    for event in events:
        device.update(torch.tensor(float(event)))
        pure, expected = stepped_or_raised(pure, event)
        if expected:
            with pytest.raises(LossScaleCollapseError) as raised:
                device.check()
            assert str(raised.value) == expected
            return
        device.check()
        assert device.on_host() == pure
        assert device.scale.item() == pure.scale


@pytest.mark.parametrize("form", FORMS)
def test_a_step_keeps_the_scale_that_it_was_scaled_with(form: str) -> None:
    machine = on_device(DynamicLossScale(growth_interval=1), form)
    before, value = machine.scale, float(machine.scale)
    machine.update(torch.tensor(1.0))
    assert float(machine.scale) == value / 2
    assert float(before) == value


@pytest.mark.parametrize("exponent", [-126, -14, 0, 16, 24, 126])
def test_inverse_is_exact_and_finite_over_the_whole_range(exponent: int) -> None:
    assert float(inverse(torch.tensor(2.0**exponent))) == 2.0**-exponent


# The cases that every framework is tested with, on PyTorch: the table of events, and the one training task.


pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows


class Stepper:
    """One step after another with a `GradScaler` or a `MixedPrecision`."""

    def __init__(self, make: str, model: nn.Module, precision: str, pure: Any, momentum: float = 0.0) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=one_task.LEARNING_RATE, momentum=momentum)
        names = ("growth_factor", "backoff_factor", "growth_interval", "floor", "ceiling", "hysteresis")
        self.optimizer, self.precision, self.mp = optimizer, precision, None
        if make == "MixedPrecision":
            self.mp = mezzo.MixedPrecision(model, optimizer, precision, loss_scale=pure)
        elif precision == "fp16":
            settings = {name: getattr(pure, name) for name in names}
            self.scaler = mezzo.GradScaler(init_scale=pure.init, **settings)
        else:
            self.scaler = mezzo.GradScaler(enabled=False)

    def autocast(self) -> Any:
        return self.mp.autocast() if self.mp else mezzo.autocast(self.precision)

    def step(self, loss: Tensor) -> float:
        """The scale that follows."""
        if self.mp:
            self.mp.step(loss)
            return self.mp.loss_scale
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


@pytest.mark.parametrize(("settings", "events"), [row[:2] for row in TABLE if row[1]], ids=str)
@pytest.mark.parametrize("make", ["GradScaler", "MixedPrecision"])
def test_the_table(make: str, settings: dict[str, Any], events: str, decides: str) -> None:
    model = nn.Linear(2, 1, bias=False)
    pure: Any = DynamicLossScale(**settings)
    stepper = Stepper(make, model, "fp16", pure)
    for event in events:
        pure = pure.next(Observation(event == "x"))
        loss = (model.weight * torch.tensor([[1.0, float("inf") if event == "x" else -3.0]])).sum()
        assert stepper.step(loss) == pure.scale


class Task(nn.Module):
    """The task's perceptron and its fuse, with the task's first weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(one_task.FEATURES, one_task.HIDDEN)
        self.second = nn.Linear(one_task.HIDDEN, one_task.OUT)
        self.fuse = nn.Linear(1, 1, bias=False)
        w = {name: torch.from_numpy(value.T.copy()) for name, value in one_task.task().weights.items()}
        self.first.load_state_dict({"weight": w["w1"], "bias": w["b1"]})
        self.second.load_state_dict({"weight": w["w2"], "bias": w["b2"]})
        self.fuse.load_state_dict({"weight": w["v"]})

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.second(torch.tanh(self.first(x))), self.fuse(z)


@pytest.mark.parametrize("precision", one_task.FORMATS)
@pytest.mark.parametrize("make", ["GradScaler", "MixedPrecision"])
def test_the_task(make: str, precision: str, decides: str) -> None:
    model, given = Task(), one_task.task()
    stepper = Stepper(make, model, precision, one_task.loss_scale(precision), one_task.MOMENTUM)
    losses, scales = [], []
    for x, target, z in zip(*map(torch.from_numpy, (given.x, given.target, given.z.copy()))):
        with stepper.autocast():
            out, fuse = model(x, z)
            loss = one_task.PART_OF_ERROR * (out.float() - target).square().mean() + fuse.float().mean()
        scales.append(stepper.step(loss))
        losses.append(float(loss.detach()))
    one_task.check(precision, losses, scales)
