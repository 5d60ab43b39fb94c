"""The machine on arrays is the pure machine, event by event, in numpy and torch.

Keras's backends and TensorFlow are held to the same rows in `on_keras/` and `on_tensorflow/`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from mezzo.core.errors import LossScaleCollapseError
from mezzo.core.loss_scale import (
    DynamicLossScale,
    NoLossScale,
    Observation,
    ScaleArrays,
    StaticLossScale,
    advance,
    check,
    on_host,
    start,
)
from scale_cases import TABLE
from test_loss_scale import events, machines

KINDS = {
    "numpy": (np, np.asarray, np.float32, np.int32),
    "torch": (torch, torch.tensor, torch.float32, torch.int32),
}


def arrays(pure: Any, kind: str) -> ScaleArrays:
    _, make, fp32, int32 = KINDS[kind]
    state = start(pure)
    counts = {n: make(getattr(state, n), dtype=int32) for n in ("good_steps", "overflows", "stuck")}
    return ScaleArrays(make(state.scale, dtype=fp32), **counts)


def follows(pure: Any, history: str, kind: str) -> None:
    xp, make = KINDS[kind][:2]
    state = arrays(pure, kind)
    for event in history:
        pure = pure.next(Observation(event == "x"))
        state = advance(pure, state, make(event == "x"), xp)
        assert on_host(pure, state) == pure
        assert state.scale.dtype == KINDS[kind][2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", TABLE, ids=str)
def test_the_table(row: Any, kind: str) -> None:
    settings, history = row[:2]
    follows(DynamicLossScale(**settings), history, kind)


@pytest.mark.parametrize("kind", KINDS)
@given(machines(), events)
def test_any_history(kind: str, machine: DynamicLossScale, history: str) -> None:
    follows(machine, history[:60], kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pure", [StaticLossScale(3.5), NoLossScale()])
def test_constants(pure: Any, kind: str) -> None:
    follows(pure, "..xx.x", kind)


@pytest.mark.parametrize(
    "pure", [DynamicLossScale(init=4.0, floor=1.0, patience=3), StaticLossScale(8.0, patience=3)]
)
def test_patience_is_the_pure_machines_and_words_too(pure: Any) -> None:
    state, last, bad = arrays(pure, "numpy"), pure, Observation(found_inf=True)
    for _ in range(4 if isinstance(pure, DynamicLossScale) else 2):  # 4 -> 2 -> 1, the floor, and two there
        state, last = advance(pure, state, np.asarray(True), np), last.next(bad)
        check(pure, state)
    with pytest.raises(LossScaleCollapseError) as expected:
        last.next(bad)
    state = advance(pure, state, np.asarray(True), np)
    with pytest.raises(LossScaleCollapseError) as raised:
        check(pure, state)
    assert str(raised.value) == str(expected.value)
    check(NoLossScale(), replace(state, stuck=np.asarray(10**6)))
