"""The loss scale that the arguments of a Keras optimizer ask for, and the same written down for its configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import DynamicLossScale, LossScale, from_state_dict
from mezzo.core.policy_text import as_loss_scale

_WHERE = "LossScaleOptimizer"

# Keras's name of a setting of the dynamic loss scale -> ours.
_KERASS = {"initial_scale": "init", "dynamic_growth_steps": "growth_interval"}


def machine_of(
    loss_scale: LossScale | float | str | dict[str, Any] | None,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
) -> LossScale:
    """The loss scale, with Keras's two names for settings of the dynamic one.

    Args:
        loss_scale: as `LossScaleOptimizer` takes it; a dict is what `state_dict()` of a loss scale returned.
        initial_scale: `init` of the dynamic machine.
        dynamic_growth_steps: its `growth_interval`.

    Raises:
        UsageError: it is no loss scale, out of range, or both ways of setting it are used.
    """
    if loss_scale is None:
        raise UsageError(f"{_WHERE}: loss_scale is None. For a scale of 1 write loss_scale='none'.")
    given = {"initial_scale": initial_scale, "dynamic_growth_steps": dynamic_growth_steps}
    given = {name: value for name, value in given.items() if value is not None}
    if given and loss_scale != "dynamic":
        raise UsageError(
            f"{_WHERE}: {' and '.join(given)} set the dynamic loss scale, and loss_scale is {loss_scale!r}. "
            "Give one or the other: loss_scale='dynamic(init=1024,growth_interval=100)' says both."
        )
    if isinstance(loss_scale, dict):
        return from_state_dict(loss_scale)
    machine: Any = as_loss_scale(loss_scale, _WHERE)
    settings = {_KERASS[name]: value for name, value in given.items()}
    try:
        machine = replace(machine, **settings, scale=0.0) if settings else machine
    except UsageError as error:
        told = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise type(error)(f"{_WHERE}({told}): {error}") from None
    return machine


def setting_of(machine: LossScale) -> dict[str, Any]:
    """The arguments that `machine_of` makes this loss scale from: Keras's two where they say it all."""
    if isinstance(machine, DynamicLossScale):
        kerass: dict[str, Any] = {name: getattr(machine, ours) for name, ours in _KERASS.items()}
        if machine_of("dynamic", **kerass) == machine:
            return kerass
    return {"loss_scale": machine.state_dict()}
