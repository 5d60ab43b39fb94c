"""The loss-scale machine as tensors: `next(found_inf)` gives the next state without asking the device
anything.

`core.loss_scale` is the specification. The same machine is written again here for one reason: on an
accelerator, reading one number makes the host wait until everything queued has run. So the state stays in
0-dim tensors and every branch is arithmetic. Nothing here raises of itself; `check` looks (one wait) and
raises what the pure machine raises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mezzo.core.loss_scale import DynamicLossScale, LossScale, NoLossScale, Observation, StaticLossScale
from mezzo.core.statistical_scale import StatisticalLossScale
from mezzo.pytorch.scaling.device_statistical import DeviceStatisticalLossScale

_FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class DeviceDynamicLossScale:
    """`DynamicLossScale` with its four moving parts on a device.

    Args:
        pure: the fixed numbers (factors, interval, floor, ceiling, hysteresis, patience); its moving parts
            are stale.
        scale: 0-dim FP32; finite, between `pure.floor` and `pure.ceiling`.
        good_steps: 0-dim int32, steps since the last overflow or growth.
        overflows: 0-dim FP32 whole number, overflows in a row.
        stuck: 0-dim FP32 whole number, overflows in a row at the floor.
    """

    pure: DynamicLossScale
    scale: Tensor
    good_steps: Tensor
    overflows: Tensor
    stuck: Tensor

    def next(self, found_inf: Tensor, largest: Tensor | None = None) -> DeviceDynamicLossScale:
        """The state after one step, equal to `pure.next(Observation(found_inf != 0))` event by event.

        Args:
            found_inf: 0-dim FP32 on the same device; 0 where every gradient was finite, above 0 otherwise.
            largest: passed over.
        """
        pure = self.pure
        found = found_inf.clamp(max=1.0)
        stays = found * (self.scale <= pure.floor)
        overflows = torch.addcmul(found, self.overflows, found)  # (overflows + 1) * found
        stuck = torch.addcmul(stays, self.stuck, stays)
        scale, good_steps = self.scale.clone(), self.good_steps.clone()
        if pure.hysteresis == 1 and pure.ceiling * pure.growth_factor <= _FP32_MAX:
            # PyTorch's own kernel is the unbounded machine in one launch: bounding its result gives ours.
            torch._amp_update_scale_(
                scale, good_steps, found, pure.growth_factor, pure.backoff_factor, pure.growth_interval
            )
            scale.clamp_(pure.floor, pure.ceiling)
        else:
            good_steps = ((good_steps + 1) * (1.0 - found)).to(torch.int32)
            grows = good_steps >= pure.growth_interval
            good_steps = torch.where(grows, 0, good_steps)
            grown = (scale * pure.growth_factor).clamp(max=pure.ceiling)
            backed_off = (scale * pure.backoff_factor).clamp(min=pure.floor)
            scale = torch.where(overflows >= pure.hysteresis, backed_off, torch.where(grows, grown, scale))
        return DeviceDynamicLossScale(pure, scale, good_steps, overflows, stuck)

    def on_host(self) -> DynamicLossScale:
        """The pure state; waits for the device."""
        return replace(
            self.pure,
            scale=float(self.scale),
            good_steps=int(self.good_steps),
            overflows=int(self.overflows),
            stuck=int(self.stuck),
        )

    def check(self) -> None:
        """Raise what the pure machine raised if the patience ran out; waits for the device.

        Raises:
            LossScaleCollapseError: `patience` steps in a row were skipped at the floor.
        """
        stuck = int(self.stuck)
        if stuck >= self.pure.patience:
            last = replace(self.pure, scale=self.pure.floor, stuck=stuck - 1, overflows=stuck - 1)
            last.next(Observation(found_inf=True))


@dataclass(frozen=True)
class DeviceStaticLossScale:
    """`StaticLossScale` with its count of skips on a device."""

    pure: StaticLossScale
    scale: Tensor
    skips: Tensor

    def next(self, found_inf: Tensor, largest: Tensor | None = None) -> DeviceStaticLossScale:
        """The same scale, and the skips in a row counted; `largest` is passed over."""
        return replace(self, skips=(self.skips + 1.0) * found_inf.clamp(max=1.0))

    def on_host(self) -> StaticLossScale:
        """The pure state; waits for the device."""
        return replace(self.pure, skips=int(self.skips))

    def check(self) -> None:
        """Raise what the pure machine raised if the patience ran out; waits for the device.

        Raises:
            LossScaleCollapseError: `patience` steps in a row were skipped.
        """
        skips = int(self.skips)
        if skips >= self.pure.patience:
            replace(self.pure, skips=skips - 1).next(Observation(found_inf=True))


DeviceLossScale = DeviceDynamicLossScale | DeviceStaticLossScale | DeviceStatisticalLossScale


def on_device(pure: LossScale, device: torch.device) -> DeviceLossScale | None:
    """The device form of a loss scale; None for `NoLossScale`, which has nothing to multiply or look at."""
    if isinstance(pure, NoLossScale):
        return None
    if isinstance(pure, StatisticalLossScale):
        return DeviceStatisticalLossScale.of(pure, device)

    def number(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((), value, dtype=dtype, device=device)

    if isinstance(pure, StaticLossScale):
        return DeviceStaticLossScale(pure, number(pure.scale), number(pure.skips))
    return DeviceDynamicLossScale(
        pure,
        number(pure.scale),
        number(pure.good_steps, torch.int32),
        number(pure.overflows),
        number(pure.stuck),
    )


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
