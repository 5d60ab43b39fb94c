"""The machine on arrays of this backend is the pure machine, event by event; inside a compiled function too."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from conftest import BACKEND
from mezzo.core.loss_scale import (
    DynamicLossScale,
    NoLossScale,
    Observation,
    ScaleArrays,
    StaticLossScale,
    advance,
    on_host,
    start,
)
from scale_cases import TABLE

CASES = [(DynamicLossScale(**settings), history) for settings, history, *_ in TABLE]
CASES += [(StaticLossScale(3.5), "..xx.x"), (NoLossScale(), ".x.")]


def compiled(function: Any) -> Any:
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=True)
    return function


@pytest.mark.parametrize(("pure", "history"), CASES, ids=str)
def test_the_table(pure: Any, history: str) -> None:
    state = start(pure)
    make = keras.ops.convert_to_tensor
    held = [
        make(state.scale, "float32"),
        *(make(n, "int32") for n in (state.good_steps, state.overflows, state.stuck)),
    ]
    first = pure

    @compiled
    def step(scale: Any, good: Any, overflows: Any, stuck: Any, bad: Any) -> Any:
        after = advance(first, ScaleArrays(scale, good, overflows, stuck), bad, keras.ops)
        return after.scale, after.good_steps, after.overflows, after.stuck

    for event in history:
        pure = pure.next(Observation(event == "x"))
        held = list(step(*held, make(event == "x", "bool")))
        assert on_host(pure, ScaleArrays(*(keras.ops.convert_to_numpy(part) for part in held))) == pure
