"""Lost state: moving statistics and other variables without gradients that are NaN or infinite, and stay so.

A step that a loss scale leaves out has run forward all the same, and what the layers assigned there is assigned: the
moving mean of a `BatchNormalization` takes the batch's own, and one that is infinite or NaN is in every later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from mezzo.keras.monitor import during_fit, exponents

_LOST = (
    "{path}{more} is NaN or infinite at the end of epoch {epoch}, and stays so; inference and validation read it. "
    "A step that the loss scale leaves out keeps the weights, and not what layers assign on the way forward. Train "
    "again, or from a checkpoint before it, without the batches that do this, or in formats that hold their numbers: "
    "`bf16`, or FP32 for {layer} and for the layer before it that overflows "
    "(`fp16,module.{layer}=fp32,module.LAYER=fp32` in `mezzo.keras.set_policy`; {layer} alone reads the infinities of "
    "the other)"
)


def not_finite(model: Any) -> list[tuple[Any, bool]]:
    """Floating variables of a model that are not trained, and are not finite now; waits for the device.

    Args:
        model: possibly in the middle of its `fit`.

    Returns:
        Each with whether it holds NaN; else it holds infinities alone, as a mask may.
    """
    looked_at = [one for one in model.non_trainable_variables if exponents.is_floating(one)]
    if not looked_at:
        return []
    values = zip(looked_at, during_fit.values(model, looked_at), strict=True)
    parts = [(one, part) for one, value in values for part in _replicas(value)]
    kinds = exponents.at_once(_kinds)([part for _, part in parts])
    told = np.asarray(keras.ops.convert_to_numpy(kinds)).tolist()
    found: dict[int, tuple[Any, bool]] = {}
    for (one, _), (is_nan, is_infinite) in zip(parts, told, strict=True):
        if is_nan or is_infinite:
            _, before = found.get(id(one), (one, False))
            found[id(one)] = (one, before or is_nan)
    return list(found.values())


def _replicas(value: Any) -> tuple[Any, ...]:
    """What each replica of a TensorFlow strategy holds: read as one, a variable is the first one's."""
    held = getattr(value, "values", None)
    return held if isinstance(held, tuple) else (value,)


def note_of(found: Sequence[Any], epoch: int) -> str:
    """What to say of them.

    Args:
        found: one or more.
        epoch: at whose end they were found, the first being 1.
    """
    first, others = found[0].path, len(found) - 1
    more = f" (as {others} more variable{'s' if others > 1 else ''})" if others else ""
    return _LOST.format(path=first, layer=first.rpartition("/")[0] or "LAYER", epoch=epoch, more=more)


def _kinds(tensors: Sequence[Any]) -> Any:
    """Whether each tensor holds a NaN, and whether an infinity: booleans of shape ``(tensors, 2)``."""
    ops = keras.ops
    return ops.stack([ops.stack([ops.any(ops.isnan(one)), ops.any(ops.isinf(one))]) for one in tensors])
