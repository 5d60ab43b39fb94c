"""The optimizer's saved state, ours and that of Keras's own LossScaleOptimizer, taken over into ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras

from mezzo.core.loss_scale import DynamicLossScale, LossScale

_KERAS_OWN = 4
"""Variables of Keras's wrapper, and the first of ours: iteration, learning_rate, step_counter, dynamic_scale."""


def is_keras_state(store: Mapping[str, Any], own: int, inner: int) -> bool:
    """Whether Keras's own LossScaleOptimizer around the same inner optimizer saved this.

    Args:
        store: what was saved, by number.
        own: how many variables ours has.
        inner: how many the inner optimizer has.
    """
    return own != _KERAS_OWN and len(store.keys()) == _KERAS_OWN + inner


def load_keras_state(own: list[Any], inner: list[Any], store: Mapping[str, Any]) -> None:
    """Write the state of Keras's into ours: scale, counter, the inner optimizer's; what is ours alone begins at 0."""
    for at, variable in enumerate(own):
        variable.assign(
            store[str(at)] if at < _KERAS_OWN else keras.ops.zeros(variable.shape, variable.dtype)
        )
    for at, variable in enumerate(inner):
        variable.assign(store[str(_KERAS_OWN + at)])


def allowed(machine: LossScale, scale: float) -> float:
    """The scale that a loaded one becomes: within the machine's bounds; the one value of a constant.

    Keras's own can have saved 0 or infinity, from which no step leads back.
    """
    if not isinstance(machine, DynamicLossScale):
        return machine.scale
    if math.isnan(scale):
        return machine.init
    return min(max(scale, machine.floor), machine.ceiling)
