"""Loss scales as frozen values: `next(observation)` gives the state for the next step. No framework, no clock.

fp16 loses gradients under 2^-24. Multiplying the loss by S multiplies every gradient by S; they are divided by S in
FP32 before the optimizer sees them (Micikevicius et al. 2017, section 3.2). The constant is found by a run's largest
gradient (`StaticLossScale.from_largest`) or by trial (`DynamicLossScale`): grow after N good steps, back off when a
gradient is not finite, and skip that step.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Union

import numpy as np

from mezzo.core.errors import LossScaleCollapseError, UsageError, unknown_name

# The inverse of a scale must be a normal FP32 number as well.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126
_FORMAT_MAX = {"fp16": 65504.0, "bf16": (2.0 - 2.0**-7) * 2.0**127}


@dataclass(frozen=True)
class Observation:
    """What one step saw: whether any gradient was NaN or infinite, and the largest finite magnitude if known."""

    found_inf: bool
    largest: float | None = None


@dataclass(frozen=True)
class NoLossScale:
    """The loss scale that isn't: S = 1, and nothing to learn from a step."""

    @property
    def scale(self) -> float:
        """Always 1."""
        return 1.0

    def next(self, observation: Observation) -> NoLossScale:
        """Itself."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {"kind": "none"}


@dataclass(frozen=True)
class StaticLossScale:
    """A constant S. A step whose gradients are not finite is skipped, and S stays."""

    scale: float = 1024.0
    patience: int = 50
    skips: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", _scale("scale", self.scale))
        _count("patience", self.patience, 1)
        _count("skips", self.skips, 0)

    @classmethod
    def from_largest(
        cls, largest_gradient: float, format: str = "fp16", headroom_bits: int = 1
    ) -> StaticLossScale:
        """The largest power of two that keeps `largest_gradient * S * 2**headroom_bits` under the format's max."""
        if format not in _FORMAT_MAX:
            raise unknown_name("format", format, _FORMAT_MAX)
        if not (math.isfinite(largest_gradient) and largest_gradient > 0):
            raise UsageError(
                f"largest_gradient is {largest_gradient!r}: give the largest finite magnitude seen, above zero"
            )
        ratio = _FORMAT_MAX[format] / largest_gradient
        exponent = math.frexp(ratio)[1] - 1 - headroom_bits if math.isfinite(ratio) else 100
        return cls(2.0 ** max(-100, min(100, exponent)))

    def next(self, observation: Observation) -> StaticLossScale:
        """The same scale, and the number of skips in a row."""
        skips = self.skips + 1 if observation.found_inf else 0
        if skips >= self.patience:
            raise LossScaleCollapseError(
                f"{skips} steps in a row had gradients that are not finite under the constant loss scale "
                f"{self.scale:g}. Use a smaller constant, or loss_scale='dynamic'."
            )
        return replace(self, skips=skips)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {"kind": "static", **asdict(self)}


@dataclass(frozen=True)
class DynamicLossScale:
    """S found by trial: times `growth_factor` after `growth_interval` good steps, times `backoff_factor` on overflow."""

    init: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    floor: float = 2.0**-14
    ceiling: float = 2.0**24
    hysteresis: int = 1
    patience: int = 50
    scale: float = 0.0
    good_steps: int = 0
    overflows: int = 0
    stuck: int = 0

    def __post_init__(self) -> None:
        for name in ("init", "floor", "ceiling"):
            object.__setattr__(self, name, _scale(name, getattr(self, name)))
        object.__setattr__(self, "scale", _scale("scale", self.scale or self.init))
        for name in ("growth_factor", "backoff_factor"):
            object.__setattr__(self, name, _f32(getattr(self, name)))
        if not (self.growth_factor > 1 and math.isfinite(self.growth_factor)):
            raise UsageError(f"growth_factor is {self.growth_factor!r}: it must be finite and above 1")
        if not 0 < self.backoff_factor < 1:
            raise UsageError(f"backoff_factor is {self.backoff_factor!r}: it must lie between 0 and 1")
        for name in ("growth_interval", "hysteresis", "patience"):
            _count(name, getattr(self, name), 1)
        for name in ("good_steps", "overflows", "stuck"):
            _count(name, getattr(self, name), 0)
        if not self.floor <= self.init <= self.ceiling or not self.floor <= self.scale <= self.ceiling:
            raise UsageError(
                f"floor {self.floor:g}, init {self.init:g}, scale {self.scale:g} and ceiling {self.ceiling:g} "
                "are not in order: init and scale must lie between floor and ceiling"
            )

    def next(self, observation: Observation) -> DynamicLossScale:
        """The state after one step."""
        if not observation.found_inf:
            good = self.good_steps + 1
            if good < self.growth_interval:
                return replace(self, good_steps=good, overflows=0, stuck=0)
            grown = min(_f32(self.scale * self.growth_factor), self.ceiling)
            return replace(self, scale=grown, good_steps=0, overflows=0, stuck=0)
        overflows = self.overflows + 1
        stuck = self.stuck + 1 if self.scale <= self.floor else 0
        if stuck >= self.patience:
            raise LossScaleCollapseError(
                f"the loss scale is at its floor {self.floor:g} and {stuck} steps in a row were skipped."
            )
        scale = self.scale
        if overflows >= self.hysteresis:
            scale = max(_f32(self.scale * self.backoff_factor), self.floor)
        return replace(self, scale=scale, good_steps=0, overflows=overflows, stuck=stuck)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {"kind": "dynamic", **asdict(self)}


LossScale = Union[NoLossScale, StaticLossScale, DynamicLossScale]
_KINDS: dict[str, type[Any]] = {"none": NoLossScale, "static": StaticLossScale, "dynamic": DynamicLossScale}


def from_state_dict(state: dict[str, Any]) -> LossScale:
    """The loss scale that `state_dict` saved."""
    kind = state.get("kind", "")
    if kind not in _KINDS:
        raise unknown_name("loss scale kind", str(kind), _KINDS)
    cls = _KINDS[kind]
    names = {field.name for field in fields(cls)}
    loaded: LossScale = cls(**{name: value for name, value in state.items() if name in names})
    return loaded


def _f32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _scale(name: str, value: float) -> float:
    if not (math.isfinite(value) and _SMALLEST <= value <= _LARGEST):
        raise UsageError(f"{name} is {value!r}: a loss scale lies between 2**-126 and 2**126")
    return _f32(value)


def _count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} is {value!r}: it must be a whole number of at least {least}")
