"""The statistical loss scale: by table, on log-normal gradients, within bounds for any history, and on a device."""

from __future__ import annotations

import doctest
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.core import statistical_scale
from mezzo.core.errors import LossScaleCollapseError, UnknownNameError, UsageError
from mezzo.core.loss_scale import Observation, from_state_dict
from mezzo.core.policy import policy
from mezzo.core.statistical_scale import StatisticalLossScale, log2
from mezzo.pytorch.scaling import device_statistical
from mezzo.pytorch.scaling.device_scale import on_device

CPU = torch.device("cpu")
BAD = Observation(found_inf=True)


def seen(largest: float | None) -> Observation:
    return Observation(found_inf=False, largest=largest)


def after(state: StatisticalLossScale, history: list[Any]) -> StatisticalLossScale:
    """The state after a history: a number or None is the largest gradient of a good step, "x" an overflow."""
    for event in history:
        state = state.next(BAD if event == "x" else seen(event))
    return state


QUICK: dict[str, Any] = {"warm_up": 2, "window": 4, "recovery": 3}

TABLE: list[tuple[dict[str, Any], list[Any], float]] = [
    # settings, history, scale
    ({}, [], 2.0**16),
    ({"init": 8.0}, [None] * 3, 8.0),
    (QUICK, [1.0], 2.0**16),  # still warming up
    (QUICK, [1.0, 1.0], 2.0**15),  # 2^16 would overflow
    (QUICK, [0.99, 0.99], 2.0**16),
    (QUICK, [2.0**-3] * 2, 2.0**18),
    (QUICK, [2.0**3] * 2, 2.0**12),
    (QUICK, [2.0**-3, 2.0**-5], 2.0**16),  # mean -4, deviation 1: 16 + 4 - 3.09 = 16.91
    ({**QUICK, "sigmas": 0.0}, [2.0**-3, 2.0**-5], 2.0**19),
    (QUICK, [2.0**-60] * 2, 2.0**24),
    (QUICK, [2.0**60] * 2, 2.0**-14),
    (QUICK, [1e-44] * 2, 2.0**24),  # subnormal in FP32
    ({**QUICK, "floor": 2.0**-126, "ceiling": 2.0**126}, [2.0**-126, 3e38], 2.0**-126),
    (QUICK, [0.0, math.nan, math.inf, None, -1.0, 1e300, 1e-60], 2.0**16),  # nothing to learn from
    (QUICK, [2.0**-3] * 2 + [2.0**-5] * 4, 2.0**17),  # an exponential average: mean -4.44, deviation 0.90
    (QUICK, [2.0**-3] * 50 + [2.0**-5] * 50, 2.0**20),  # which forgets: mean -5 + 1e-6, deviation 1e-3
    (QUICK, ["x"], 2.0**15),
    (QUICK, ["x", "x", "x"], 2.0**13),
    (QUICK, ["x", None, None], 2.0**15),
    (QUICK, ["x", None, None, None], 2.0**16),  # the limit is doubled after `recovery` good steps
    (QUICK, ["x", "x"] + [None] * 6, 2.0**16),
    (QUICK, ["x", None, None, "x", None, None], 2.0**14),  # good steps in a row
    (QUICK, [2.0**-3, 2.0**-3, "x"], 2.0**17),
    (QUICK, [2.0**-3, 2.0**-3, "x", 2.0**-9, 2.0**-9, None], 2.0**12),  # mean -6, deviation 3: 12.73
    (QUICK, ["x"] * 6 + [1.0] * 2, 2.0**10),  # a limit that an overflow set, in the warm-up too
    ({**QUICK, "init": 2.0, "floor": 1.0}, ["x"] * 3, 1.0),
]


@pytest.mark.parametrize(("given_settings", "history", "scale"), TABLE)
def test_event_by_event(given_settings: dict[str, Any], history: list[Any], scale: float) -> None:
    assert after(StatisticalLossScale(**given_settings), history).scale == scale


def test_mean_and_variance_are_those_of_all_until_the_window_is_full() -> None:
    rng = np.random.default_rng(0)
    largest = np.exp2(rng.normal(-5.0, 2.0, 60)).astype(np.float32)
    state = after(StatisticalLossScale(window=60), largest.tolist())
    assert state.mean == pytest.approx(np.log2(largest).mean(), abs=3e-4)
    assert state.variance == pytest.approx(np.log2(largest).var(), rel=1e-3)


def test_what_overflowed_is_not_observed() -> None:
    state = StatisticalLossScale(**QUICK)
    told = state.next(Observation(found_inf=True, largest=4.0))
    assert (told.seen, told.mean) == (0, 0.0)
    assert told == state.next(BAD)


@pytest.mark.parametrize("deviation", [1.0, 4.0])
def test_one_step_in_a_thousand_overflows(deviation: float) -> None:
    """Log-normal gradients that shrink slowly: at each step, the probability that S times the next L is 65520 or more.

    It is 0.1 % where S is no power of two and mean and deviation are known. Rounding S down makes it less (the
    smaller the deviation, the more), the error of a window's estimates makes it more.
    """
    rng = np.random.default_rng(3)
    means = -10.0 * np.linspace(0.0, 1.0, 6000)
    state = StatisticalLossScale(init=2.0**-14, recovery=1, ceiling=2.0**60)
    chances = []
    for mean, exponent in zip(means, rng.normal(means, deviation)):
        room = math.log2(65520.0 / state.scale) - mean
        if state.seen == state.window:
            chances.append(0.5 * math.erfc(room / deviation / math.sqrt(2.0)))
        bad = exponent >= math.log2(65520.0 / state.scale)
        state = state.next(BAD if bad else seen(float(np.exp2(exponent))))
    assert 1e-4 < np.mean(chances) < 1.5e-3


def test_it_follows_gradients_that_jump() -> None:
    """A jump widens the deviation first, so that S waits for a few windows, and then is where it should be."""
    rng = np.random.default_rng(5)
    state = StatisticalLossScale()
    scales = []
    for exponent in np.concatenate([np.zeros(200), np.full(800, -8.0)]) + rng.normal(0.0, 0.5, 1000):
        state = state.next(seen(float(np.exp2(exponent))))
        scales.append(state.scale)
    assert set(scales[150:200]) == {2.0**14}  # 16 - 3.09 * 0.5 = 14.5
    assert max(scales[200:400]) <= 2.0**14
    assert scales[-1] == 2.0**22


def test_patience_runs_out_at_the_floor_only() -> None:
    state = StatisticalLossScale(init=4.0, floor=1.0, patience=3)
    assert after(state, ["x"] * 4).stuck == 2
    with pytest.raises(LossScaleCollapseError, match=r"floor 2\^0 and the last 3 steps .* bf16"):
        after(state, ["x"] * 5)
    assert after(state, [*"xxxx", None, *"xx", None, *"xx"]).stuck == 2
    default = after(StatisticalLossScale(), ["x"] * (30 + 49))
    assert (default.scale, default.stuck) == (2.0**-14, 49)


# log2 that every device repeats.


def test_log2_is_near_the_real_one_and_exact_for_powers_of_two() -> None:
    rng = np.random.default_rng(1)
    values = np.exp2(rng.uniform(-126.0, 127.9, 4000)).astype(np.float32)
    real = np.log2(values.astype(np.float64))
    errors = np.abs(np.array([log2(float(v)) for v in values]) - real)
    assert (errors <= 1.25e-4 + np.abs(real) * 2.0**-24).all()
    assert [log2(2.0**k) for k in range(-126, 128)] == list(range(-126, 128))


@given(st.floats(2.0**-149, 2.0**127, width=32))
def test_log2_has_the_same_bits_on_tensors(value: float) -> None:
    assert device_statistical.log2(torch.tensor(value)).item() == log2(value)


# Bounds, identity, and the device, for any history.

histories = st.lists(
    st.one_of(
        st.just("x"),
        st.none(),
        st.floats(2.0**-149, 2.0**127, width=32),
        st.floats(2.0**-20, 2.0**4, width=32),
        st.sampled_from([0.0, math.inf, math.nan, 1e-45]),
    ),
    max_size=40,
)


@st.composite
def machines(draw: st.DrawFn) -> StatisticalLossScale:
    low, init, high = sorted(draw(st.tuples(*[st.integers(-126, 126)] * 3)))
    warm_up = draw(st.integers(2, 4))
    return StatisticalLossScale(
        init=2.0**init,
        floor=2.0**low,
        ceiling=2.0**high,
        sigmas=draw(st.sampled_from([0.0, 1.0, 3.09])),
        window=draw(st.integers(warm_up, 6)),
        warm_up=warm_up,
        recovery=draw(st.integers(1, 4)),
        patience=draw(st.integers(1, 5)),
    )


@given(machines(), histories)
def test_bounds_hold_for_any_history(machine: StatisticalLossScale, history: list[Any]) -> None:
    machine = replace(machine, patience=10**6)
    for event in history:
        before, machine = machine, after(machine, [event])
        assert machine.floor <= machine.scale <= machine.ceiling
        assert math.frexp(machine.scale)[0] == 0.5
        assert np.isfinite(np.float32(1) / np.float32(machine.scale))
        assert machine.variance >= 0
        assert machine.seen <= machine.window
        if event == "x":
            assert machine.scale <= before.scale
            assert machine.scale < before.scale or before.scale == before.floor
        saved = from_state_dict(json.loads(json.dumps(machine.state_dict())))
        assert saved == machine


@settings(deadline=None)
@given(machines(), histories)
def test_device_form_equals_pure_form(pure: StatisticalLossScale, history: list[Any]) -> None:
    device = on_device(pure, CPU)
    assert device is not None
    for event in history:
        found = torch.tensor(float(event == "x"))
        largest = None if event in ("x", None) else torch.tensor(event)
        device = device.next(found, largest)
        pure, expected = next_of(pure, event)
        if expected:
            with pytest.raises(LossScaleCollapseError) as raised:
                device.check()
            assert str(raised.value) == expected
            return
        device.check()
        assert device.on_host() == pure
        assert float(device.scale) == pure.scale


def next_of(pure: StatisticalLossScale, event: Any) -> tuple[StatisticalLossScale, str]:
    """The next state, or what was raised in its place."""
    try:
        return after(pure, [event]), ""
    except LossScaleCollapseError as error:
        return pure, str(error)


def test_an_overflow_with_a_largest_gradient_is_one_on_the_device_too() -> None:
    pure = after(StatisticalLossScale(**QUICK), [1.0, 2.0])
    device = on_device(pure, CPU)
    assert device is not None
    for found in (1.0, 2.0, math.nan):
        told = device.next(torch.tensor(found), torch.tensor(math.inf))
        assert told.on_host() == pure.next(BAD)


# As text, and wrong.


def test_as_text_in_a_policy() -> None:
    assert policy("fp16,loss_scale=statistical").make_loss_scale() == StatisticalLossScale()
    text = "fp16,loss_scale=statistical(init=1024,window=50)"
    assert str(policy(text)) == text
    assert policy(text).make_loss_scale() == StatisticalLossScale(init=1024.0, window=50)
    assert str(policy("fp16,loss_scale=statistical(sigmas=3.09)")) == "fp16,loss_scale=statistical"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"init": 3.0}, "init is 3: a statistical loss scale is a power of two"),
    ({"init": 2.0**25}, r"init is 2\^25.*ceiling 2\^24"),
    ({"limit": 2.0**25}, r"limit is 2\^25"),
    ({"fitted": 2.0**-20}, r"fitted is 2\^-20"),
    ({"floor": 0.0}, "floor is 0.0: a loss scale is a number between"),
    ({"window": 1}, "window is 1: it must be a whole number of at least 2"),
    ({"warm_up": 200}, "warm_up is 200: it must be at most the window, 100"),
    ({"recovery": 0}, "recovery is 0"),
    ({"patience": 2.5}, "patience is 2.5"),
    ({"seen": -1}, "seen is -1"),
    ({"sigmas": -1.0}, "sigmas is -1.0"),
    ({"sigmas": math.nan}, "sigmas is nan"),
    ({"mean": math.inf}, "must be finite"),
    ({"variance": -1.0}, "must be finite"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_wrong_arguments_say_what_is_allowed(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        StatisticalLossScale(**arguments)


def test_wrong_settings_of_a_policy() -> None:
    with pytest.raises(UnknownNameError, match=r"setting of statistical\(...\).*Did you mean 'window'"):
        policy("fp16,loss_scale=statistical(windw=3)")
    with pytest.raises(UsageError, match=r"statistical\(...\) has window twice"):
        policy("fp16,loss_scale=statistical(window=3,window=4)")


def test_the_examples() -> None:
    assert doctest.testmod(statistical_scale).failed == 0
