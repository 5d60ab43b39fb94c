"""A loss scale whose S is a tensor: `next(found_inf)` gives the next state and asks an accelerator nothing.

On an accelerator, reading one number makes the host wait until everything queued has run. There the state stays in
0-dim tensors and moves by `core.loss_scale.advance` over `torch`. On a CPU reading is free: the state is Python's
numbers, which the same function moves in a tenth of the time, and only S is a tensor. Nothing here raises of itself;
`check` looks (one wait on an accelerator) and raises what the pure machine raises.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo.core.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoLossScale,
    Numbers,
    ScaleArrays,
    StaticLossScale,
    advance,
    check,
    on_host,
    start,
)
from mezzo.core.scale_numbers import fl32


@dataclass(frozen=True)
class DeviceLossScale:
    """A loss scale on a device.

    Args:
        pure: the fixed numbers (factors, interval, floor, ceiling, hysteresis, patience); its moving parts are stale.
        scale: 0-dim FP32; finite.
        state: the moving parts: 0-dim tensors on the scale's device, Python's numbers where that is a CPU.
    """

    pure: DynamicLossScale | StaticLossScale
    scale: Tensor
    state: ScaleArrays

    def next(self, found_inf: Tensor) -> DeviceLossScale:
        """The state after one step.

        Args:
            found_inf: 0-dim FP32 on the same device; 0 where every gradient was finite, above 0 otherwise.
        """
        return DeviceLossScale(self.pure, *moved(self.pure, self.scale, self.state, found_inf))

    def on_host(self) -> LossScale:
        """The pure state; waits for the device."""
        return on_host(self.pure, self.state)

    def check(self) -> None:
        """Raise what the pure machine raised if the patience ran out; waits for the device.

        Raises:
            LossScaleCollapseError: `patience` steps in a row were skipped at the floor, or under a constant scale.
        """
        check(self.pure, self.state)


def moved(
    pure: LossScale, scale: Tensor, state: ScaleArrays, found_inf: Tensor
) -> tuple[Tensor, ScaleArrays]:
    """S and the state after one step; the tensors given stay as they are."""
    if isinstance(state.scale, Tensor):
        state = advance(pure, state, found_inf != 0, torch)
        return state.scale, state
    after = advance(pure, state, bool(found_inf), Numbers)
    if after.scale == state.scale:
        return scale, after
    after = ScaleArrays(fl32(after.scale), after.good_steps, after.overflows, after.stuck)
    return torch.full((), after.scale, dtype=torch.float32), after


def begun(pure: LossScale, device: torch.device) -> tuple[Tensor, ScaleArrays]:
    """S as a tensor, and the moving parts in the form that they have on this device."""
    state = start(pure)
    scale = torch.full((), state.scale, dtype=torch.float32, device=device)
    if reading_is_free(scale):
        return scale, state
    counts = (state.good_steps, state.overflows, state.stuck)
    return scale, ScaleArrays(scale, *(torch.full((), n, dtype=torch.int32, device=device) for n in counts))


def on_device(pure: LossScale, device: torch.device) -> DeviceLossScale | None:
    """The device form of a loss scale; None for `NoLossScale`, which has nothing to multiply or look at."""
    return None if isinstance(pure, NoLossScale) else DeviceLossScale(pure, *begun(pure, device))


def inverse(scale: Tensor) -> Tensor:
    """1 / scale in FP32, exact for powers of two and never infinite for a scale within `core.loss_scale`'s
    bounds.

    Equals `(1.0 / scale.double()).float()`: an FP32 division may be approximate under some compile options
    (the reason `torch.amp` gives for the same detour). MPS has no FP64, and its division is taken as it is.
    """
    if scale.device.type == "mps":
        return scale.reciprocal()
    return scale.double().reciprocal().float()


def reading_is_free(tensor: Tensor) -> bool:
    """Whether the host reads a number without waiting for a queue; then it decides, and a skip touches
    nothing.
    """
    return tensor.device.type == "cpu"
