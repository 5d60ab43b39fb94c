"""The numbers of a GradScaler: read, set, saved and loaded, wherever they live at the time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mezzo.core.loss_scale import DynamicLossScale
from mezzo.pytorch.scaling import state as scaler_state
from mezzo.pytorch.scaling.device_scale import DeviceDynamicLossScale, on_device


class ScalerNumbers:
    """A loss scale that stays on the host until the first loss says which device it is to live on."""

    _enabled: bool
    _pure: DynamicLossScale
    # From the first loss on it is the truth, and _pure stale.
    _machine: DeviceDynamicLossScale | None

    def _started(self, device: torch.device) -> DeviceDynamicLossScale:
        if self._machine is None:
            self._machine = _on_device(self._pure, device)
        return self._machine

    def _host_state(self) -> DynamicLossScale:
        return self._pure if self._machine is None else self._machine.on_host()

    def _set_host_state(self, pure: DynamicLossScale) -> None:
        self._pure = pure
        if self._machine is not None:
            self._machine = _on_device(pure, self._machine.scale.device)

    @property
    def _fixed(self) -> DynamicLossScale:
        return self._pure if self._machine is None else self._machine.pure

    def _set_fixed(self, **changes: Any) -> None:
        self._pure = replace(self._pure, **changes)
        if self._machine is not None:
            self._machine = replace(self._machine, pure=replace(self._machine.pure, **changes))

    def get_scale(self) -> float:
        """The current scale, 1.0 if disabled. Waits for the device."""
        return self._host_state().scale if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """What the scale is multiplied by after `growth_interval` good steps."""
        return self._fixed.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by after `growth_interval` good steps; above 1."""
        self._set_fixed(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied by on overflow."""
        return self._fixed.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by on overflow; between 0 and 1."""
        self._set_fixed(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """How many good steps in a row the scale waits before it grows."""
        return self._fixed.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set how many good steps in a row the scale waits before it grows; 1 or more."""
        self._set_fixed(growth_interval=new_interval)

    def is_enabled(self) -> bool:
        """Whether this scaler scales."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers; waits for the device. Save it after `update`.

        It has the five keys of torch's state with torch's meaning, and six of Mezzo's own, which torch's
        scaler passes
        over: the state loads there too. A disabled scaler saves what it holds all the same.
        """
        return scaler_state.to_state(self._host_state())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved by this class or by `torch.amp.GradScaler`, into an enabled scaler or a disabled
        one.

        An empty state is what a disabled torch scaler saves: there is nothing in it, and nothing changes. A
        scale outside the bounds (torch's can be 0 or infinite) is brought within them, with a warning.

        Raises:
            UsageError: a state that lacks one of torch's five keys.
        """
        if state_dict:
            self._set_host_state(scaler_state.from_state(state_dict, self._fixed))


def _on_device(pure: DynamicLossScale, device: torch.device) -> DeviceDynamicLossScale:
    machine = on_device(pure, device)
    assert isinstance(machine, DeviceDynamicLossScale)
    return machine
