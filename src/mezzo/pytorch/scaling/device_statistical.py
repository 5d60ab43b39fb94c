"""`StatisticalLossScale` as tensors: `next(found_inf, largest)` asks the device nothing.

`core.statistical_scale` is the specification; operation by operation it is the same here, in the same order, so that
both go through the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mezzo.core.loss_scale import Observation
from mezzo.core.statistical_scale import LOG2, ROOM, SMALLEST_SEEN, StatisticalLossScale


@dataclass(frozen=True)
class DeviceStatisticalLossScale:
    """`StatisticalLossScale` with its moving parts on a device.

    Args:
        pure: the fixed numbers; its moving parts are stale.
        scale: 0-dim FP32, a power of two between `pure.floor` and `pure.ceiling`.
        mean, variance: 0-dim FP32, of log2 of the largest gradients.
        seen: 0-dim FP32 whole number, observations.
        fitted: 0-dim FP32, S by the observations.
        limit: 0-dim FP32, what S is at most.
        good_steps: 0-dim FP32 whole number.
        stuck: 0-dim FP32 whole number, overflows in a row at the floor.
    """

    pure: StatisticalLossScale
    scale: Tensor
    mean: Tensor
    variance: Tensor
    seen: Tensor
    fitted: Tensor
    limit: Tensor
    good_steps: Tensor
    stuck: Tensor

    @classmethod
    def of(cls, pure: StatisticalLossScale, device: torch.device) -> DeviceStatisticalLossScale:
        """The same state on a device."""
        names = ("scale", "mean", "variance", "seen", "fitted", "limit", "good_steps", "stuck")
        return cls(
            pure,
            *(torch.full((), float(getattr(pure, n)), dtype=torch.float32, device=device) for n in names),
        )

    def next(self, found_inf: Tensor, largest: Tensor | None = None) -> DeviceStatisticalLossScale:
        """The state after one step, equal to `pure.next(Observation(found_inf != 0, largest))` event by event.

        Args:
            found_inf: 0-dim FP32 on the same device; 0 where every gradient was finite, above 0 otherwise.
            largest: 0-dim FP32 there, the largest gradient, unscaled; None where nobody looked.
        """
        pure = self.pure
        bad = found_inf != 0
        stuck = torch.where(bad & (self.scale <= pure.floor), self.stuck + 1.0, 0.0)
        good_steps = torch.where(bad, 0.0, self.good_steps + 1.0)
        recovers = good_steps >= pure.recovery
        raised = torch.where(recovers, (self.limit * 2.0).clamp(max=pure.ceiling), self.limit)
        limit = torch.where(bad, (self.scale * 0.5).clamp(min=pure.floor), raised)
        good_steps = torch.where(recovers, 0.0, good_steps)
        state = replace(self, limit=limit, good_steps=good_steps, stuck=stuck)
        if largest is not None:
            state = state._learnt(largest.to(torch.float32), bad)
        return replace(state, scale=torch.minimum(state.fitted, state.limit))

    def _learnt(self, largest: Tensor, bad: Tensor) -> DeviceStatisticalLossScale:
        pure = self.pure
        told = (largest > 0) & largest.isfinite() & ~bad
        seen = (self.seen + 1.0).clamp(max=float(pure.window))
        weight = torch.ones_like(seen) / seen
        delta = log2(largest) - self.mean
        mean = self.mean + weight * delta
        variance = (1.0 - weight) * (self.variance + weight * (delta * delta))
        top = mean + variance.sqrt() * pure.sigmas
        exponent = (ROOM - top).floor().clamp(-126.0, 126.0).nan_to_num()  # NaN where nothing was told
        fitted = ((exponent.to(torch.int32) + 127) << 23).view(torch.float32).clamp(pure.floor, pure.ceiling)
        return replace(
            self,
            mean=torch.where(told, mean, self.mean),
            variance=torch.where(told, variance, self.variance),
            seen=torch.where(told, seen, self.seen),
            fitted=torch.where(told & (seen >= pure.warm_up), fitted, self.fitted),
        )

    def on_host(self) -> StatisticalLossScale:
        """The pure state; waits for the device."""
        return replace(
            self.pure,
            mean=float(self.mean),
            variance=float(self.variance),
            seen=int(self.seen),
            fitted=float(self.fitted),
            limit=float(self.limit),
            good_steps=int(self.good_steps),
            stuck=int(self.stuck),
        )

    def check(self) -> None:
        """Raise what the pure machine raised if the patience ran out; waits for the device.

        Raises:
            LossScaleCollapseError: `patience` steps in a row were skipped at the floor.
        """
        stuck = int(self.stuck)
        if stuck >= self.pure.patience:
            last = replace(self.pure, limit=self.pure.floor, stuck=stuck - 1)
            last.next(Observation(found_inf=True))


def log2(value: Tensor) -> Tensor:
    """`core.statistical_scale.log2` of a 0-dim FP32 tensor; nothing sensible for NaN and infinity."""
    bits = value.clamp(min=SMALLEST_SEEN).view(torch.int32)
    t = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32) - 1.0
    fraction = t + (t * (1.0 - t)) * (LOG2[0] + t * (LOG2[1] + t * LOG2[2]))
    return ((bits >> 23) - 127).to(torch.float32) + fraction
