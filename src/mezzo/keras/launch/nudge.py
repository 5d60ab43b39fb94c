"""Move FP32 weights by one unit in the last place: the smallest change that a run can have, for a noise floor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

_SEED = 0x6E75646765


def nudge(variables: Iterable[Any]) -> int:
    """Move each element of each FP32 variable to the next FP32 number up or down; how many variables were moved.

    Naive code, with a fair coin for each element::

        v.assign(numpy.nextafter(v, inf if coin else -inf))

    The coins come from a generator of our own with a fixed seed, so the script's random streams are untouched and two
    nudged runs are the same run. Zero goes to the smallest subnormal, which some backends flush back to zero in what
    they compute; NaN stays NaN. A variable that is given twice is moved once.
    """
    import keras

    coins = np.random.Generator(np.random.PCG64(np.random.SeedSequence(_SEED)))
    moved: dict[int, None] = {}
    for variable in variables:
        if variable.dtype != "float32" or id(variable) in moved:
            continue
        value = np.asarray(keras.ops.convert_to_numpy(variable), dtype=np.float32)
        up = coins.random(value.shape) < 0.5
        towards = np.where(up, np.float32(np.inf), np.float32(-np.inf))
        variable.assign(np.nextafter(value, towards, dtype=np.float32))
        moved[id(variable)] = None
    return len(moved)
