"""What a GradScaler saves: torch's five numbers under torch's names, and Mezzo's own beside them."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import DynamicLossScale, LossScale

# torch's name -> the pure machine's field.
SHARED = {
    "scale": "scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "_growth_tracker": "good_steps",
}
OWN = ("floor", "ceiling", "hysteresis", "patience", "overflows", "stuck")


def to_state(pure: LossScale) -> dict[str, Any]:
    """The state as plain numbers. torch's GradScaler loads it too: it passes over the names that it doesn't
    know.
    """
    return {name: getattr(pure, attr) for name, attr in SHARED.items()} | {
        key: getattr(pure, key) for key in OWN
    }


def looks_like(state: dict[str, Any]) -> bool:
    """Whether a state is one of torch's GradScaler or of ours: it has torch's five names."""
    return SHARED.keys() <= state.keys()


def from_state(state: dict[str, Any], current: DynamicLossScale) -> DynamicLossScale:
    """The loss scale in a state of ours or of torch's; what the state does not say stays as in `current`.

    A scale outside the bounds (torch's own can be 0 or infinite) is brought within them, with a warning; NaN
    becomes the floor. A scale that had collapsed (its patience ran out) says nothing of the gradients to come, and
    begins anew as `current` did.

    Raises:
        UsageError: one of torch's five names is missing, or a number makes no sense.
    """
    if not looks_like(state):
        raise UsageError(
            f"this is no GradScaler state: it has {', '.join(map(str, state)) or 'nothing'}, "
            f"and must have {', '.join(SHARED)}."
        )
    fixed = {key: state[key] for key in OWN if key in state}
    floor, ceiling = float(fixed.get("floor", current.floor)), float(fixed.get("ceiling", current.ceiling))
    saved = float(state["scale"])
    scale = floor if math.isnan(saved) else min(max(saved, floor), ceiling)
    if scale != saved:
        warnings.warn(
            f"the saved loss scale {saved:g} lies outside its bounds {floor:g} and {ceiling:g}: {scale:g} is "
            "used. A scale of 0 or infinity means that the run which saved it had stopped learning.",
            stacklevel=3,
        )
    if int(fixed.get("stuck", 0)) >= int(fixed.get("patience", current.patience)):
        fixed.update(overflows=0, stuck=0)
        scale = min(max(current.init, floor), ceiling)
        state = {**state, "_growth_tracker": 0}
    return replace(
        current,
        init=scale,
        scale=scale,
        growth_factor=float(state["growth_factor"]),
        backoff_factor=float(state["backoff_factor"]),
        growth_interval=int(state["growth_interval"]),
        good_steps=int(state["_growth_tracker"]),
        **{"overflows": 0, "stuck": 0, **fixed},
    )
