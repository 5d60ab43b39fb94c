"""Loss scales as frozen values: `next(observation)` is the state for the next step.

fp16 rounds gradients under 2^-25 to zero. Multiplying the loss by S multiplies every gradient by S; they are multiplied
by 1/S in FP32 before use (Micikevicius et al. 2017, arXiv 1710.03740, section 3.2). `advance` is the only transition:
PyTorch, Keras and TensorFlow call it too, on arrays. It has no branches and never raises, since inside a compiled step
the host cannot read whether a gradient overflowed; the code that holds the arrays reads them now and then for `check`.

Every number is an FP32 number and every product is rounded to FP32 (ties to even), so that a device that keeps S in an
FP32 tensor gets the same values.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from numbers import Real
from types import SimpleNamespace
from typing import Any, ClassVar, TypeGuard, TypeVar

import numpy as np

from mezzo.core.errors import LossScaleCollapseError, UsageError, checks_fields, unknown_name
from mezzo.core.formats import floor_log2, named

# The inverse of a scale must be a normal FP32 number, too.
SMALLEST, LARGEST = 2.0**-126, 2.0**126

_LARGEST_CONSTANT = 100  # a loss up to 2^27 times 2^100 stays finite in FP32

NOT_THE_SCALE = (
    "If the loss itself is NaN or infinite, no loss scale helps: run the step in FP32, and check the data, the "
    "learning rate and the initialization."
)

_Kind = TypeVar("_Kind", bound="_Scale")


@dataclass(frozen=True)
class Observation:
    """What one step saw: whether any gradient was NaN or infinite, after unscaling."""

    found_inf: bool


class _Scale:
    """What all kinds have in common; its state is constant.

    A new kind is a subclass in `KINDS` whose fields are settings and state. What PyTorch, Keras and TensorFlow hold and
    save follows from `arrays`, and the text `kind(setting=value)` in a policy from the other fields.
    """

    kind: ClassVar[str]

    def arrays(self) -> ScaleArrays:
        """The state as plain numbers: FP32 numbers are floats, counters are integers."""
        return ScaleArrays(*(getattr(self, name, 0) for name in _STATE))

    def advance(self, state: ScaleArrays, found_inf: Any, xp: Any) -> ScaleArrays:
        """The state after one step with these settings; the state in `self` is not read.

        `found_inf` is boolean, of shape (). `xp` is the framework's namespace, of which only `where` is used, or
        `Numbers`. In each `where` the array comes first, because TensorFlow takes the dtype from it.
        """
        overflows = xp.where(found_inf, state.overflows + 1, 0)
        good_steps = xp.where(overflows < 1, state.good_steps + 1, 0)
        return ScaleArrays(state.scale, good_steps, overflows, overflows)

    def allowed(self, scale: float) -> float:
        """The scale to use after loading this one, which another program may have saved as 0, infinite or NaN."""
        return self.arrays().scale  # type: ignore[no-any-return]

    def next(self: _Kind, observation: Observation) -> _Kind:
        """The state after one step; LossScaleCollapseError at the `patience`-th skip in a row where it can't fall."""
        pure: Any = self
        before = self.arrays()
        after = self.advance(before, observation.found_inf, Numbers)
        check(pure, after)
        # `replace` would repeat the checks, which cost a small model more than its optimizer's arithmetic.
        moved = object.__new__(type(self))
        moved.__dict__.update(self.__dict__)
        is_rounded = after.scale == before.scale and type(after) is ScaleArrays
        moved.__dict__.update(self._fields(after if is_rounded else rounded(after)))
        return moved

    def _fields(self, state: ScaleArrays) -> dict[str, Any]:
        """The fields of this kind that a state determines."""
        return {name: value for name, value in vars(state).items() if name in self.__dict__}

    @property
    def has_collapsed(self) -> bool:
        """Whether the patience ran out."""
        pure: Any = self
        return not isinstance(pure, NoLossScale) and bool(pure.arrays().stuck >= pure.patience)

    def begun_anew(self: _Kind) -> _Kind:
        """The first state, as if no step had been taken."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """Settings and state as plain values, for `from_state_dict`."""
        pure: Any = self
        return {"kind": self.kind, **asdict(pure)}


@dataclass(frozen=True)
class NoLossScale(_Scale):
    """A loss scale of 1, for bf16 and FP32, whose range is wide enough. No step is skipped."""

    kind: ClassVar[str] = "none"
    scale: ClassVar[float] = 1.0


@checks_fields
@dataclass(frozen=True)
class StaticLossScale(_Scale):
    """A constant loss scale S. A step whose gradients are not finite is skipped.

    Args:
        scale: S, between 2^-126 and 2^126; rounded to FP32. Use a power of two: others round every gradient once more.
        patience: skips in a row after which `LossScaleCollapseError` is raised.
        skips: state: the skips in a row so far.

    Raises:
        UsageError: an argument out of range.
    """

    kind: ClassVar[str] = "static"
    scale: float = 1024.0
    patience: int = 50
    skips: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", checked_scale("scale", self.scale))
        check_whole("patience", self.patience, 1)
        check_whole("skips", self.skips, 0)

    @classmethod
    def from_largest(
        cls, largest_gradient: float, format: str = "fp16", headroom_bits: int = 1
    ) -> StaticLossScale:
        """The largest power of two at which the largest gradient does not overflow (Micikevicius et al. 2017).

        Naive code, except that the result is at most 2^100, so that an ordinary loss times S is finite in FP32::

            scale = 2 ** floor(log2(finfo(format).max / largest_gradient) - headroom_bits)

        Args:
            largest_gradient: largest magnitude among the unscaled gradients of activations and weights.
            format: the format of the backward pass.
            headroom_bits: how many times the largest gradient may double in the rest of the run.

        Raises:
            UsageError: a largest gradient that is zero, negative, NaN or infinite; a negative headroom.
            UnknownNameError: no such format.
        """
        if not (math.isfinite(largest_gradient) and largest_gradient > 0):
            raise UsageError(
                f"largest_gradient is {largest_gradient!r}. It must be a finite number above 0: the largest magnitude "
                "of a gradient."
            )
        check_whole("headroom_bits", headroom_bits, 0)
        exponent = floor_log2(Fraction(named(format).max) / Fraction(largest_gradient))
        return cls(2.0 ** max(-_LARGEST_CONSTANT, min(exponent - headroom_bits, _LARGEST_CONSTANT)))

    def arrays(self) -> ScaleArrays:
        """The state as plain numbers."""
        return ScaleArrays(self.scale, 0, self.skips, self.skips)

    def _fields(self, state: ScaleArrays) -> dict[str, Any]:
        return {"scale": state.scale, "skips": state.overflows}

    def collapsed(self, stuck: int) -> LossScaleCollapseError:
        """The error after this many skipped steps in a row."""
        return LossScaleCollapseError(
            f"{stuck} steps in a row were skipped: their gradients are not finite under the constant "
            f"loss scale {power_text(self.scale)}.",
            NOT_THE_SCALE,
            "Otherwise use loss_scale='dynamic', or a smaller constant: StaticLossScale.from_largest(...).",
        )

    def begun_anew(self) -> StaticLossScale:
        """The same scale, as if no step had been skipped."""
        return replace(self, skips=0)


@checks_fields
@dataclass(frozen=True)
class DynamicLossScale(_Scale):
    """A loss scale S that grows after a number of good steps, falls on overflow, and stays within bounds.

    One step, with `bad` = found_inf as 0 or 1 and `fl32` = rounding to FP32, ties to even::

        overflows  = (overflows + 1) * bad
        stuck      = (stuck + 1) * bad * (scale <= floor)      # the scale that this step had
        good       = (good_steps + 1) * (1 - bad)
        grows      = good >= growth_interval
        backs_off  = overflows >= hysteresis
        good_steps = where(grows, 0, good)
        scale      = where(backs_off, max(fl32(scale * backoff_factor), floor),
                     where(grows,     min(fl32(scale * growth_factor), ceiling), scale))
        collapsed  = stuck >= patience                         # LossScaleCollapseError

    Args:
        init: the first S. With 2^16 most models overflow once or twice, and then use as much of the range as possible.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: good steps in a row after which S grows.
        floor: the smallest S. 2^-14 is fp16's smallest normal number. Below 1, because the unscaled fp16 gradients of
            some models overflow.
        ceiling: the largest S. With 2^24, gradients down to 2^-48 are kept, and a loss up to 2^103 stays finite.
        hysteresis: overflows in a row from which S backs off. 2 ignores a single bad batch (its step is skipped).
        patience: skips in a row at the floor after which `LossScaleCollapseError` is raised.
        scale: state: S for the next step; 0 stands for `init`.
        good_steps: state: good steps since the last growth or overflow.
        overflows: state: overflows in a row.
        stuck: state: overflows in a row at the floor.

    Raises:
        UsageError: an argument out of range, or bounds that are not in order.
    """

    kind: ClassVar[str] = "dynamic"
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
        object.__setattr__(self, "scale", self.init if self.scale == 0 else self.scale)
        for name in ("init", "floor", "ceiling", "scale"):
            object.__setattr__(self, name, checked_scale(name, getattr(self, name)))
        for name, low, high in (("growth_factor", 1.0, math.inf), ("backoff_factor", 0.0, 1.0)):
            value = fl32(getattr(self, name))
            object.__setattr__(self, name, value)
            if not low < value < high:
                bounds = f"above {low:g}" + (f" and below {high:g}" if high < math.inf else "")
                raise UsageError(f"{name} is {value!r}. It must be {bounds}, after rounding to FP32.")
        for name in ("growth_interval", "hysteresis", "patience"):
            check_whole(name, getattr(self, name), 1)
        for name in ("good_steps", "overflows", "stuck"):
            check_whole(name, getattr(self, name), 0)
        for name in ("init", "scale"):
            value = getattr(self, name)
            if not self.floor <= value <= self.ceiling:
                raise UsageError(
                    f"{name} is {power_text(value)}. It must lie between floor={power_text(self.floor)} and "
                    f"ceiling={power_text(self.ceiling)}."
                )

    def advance(self, state: ScaleArrays, found_inf: Any, xp: Any) -> ScaleArrays:
        """The state after one step, as in the class's docstring."""
        overflows = xp.where(found_inf, state.overflows + 1, 0)
        good_steps = xp.where(overflows < 1, state.good_steps + 1, 0)
        stuck = xp.where(found_inf & (state.scale <= self.floor), state.stuck + 1, 0)
        waits = good_steps < self.growth_interval
        grown = state.scale * self.growth_factor
        grown = xp.where(grown < self.ceiling, grown, self.ceiling)
        backed_off = state.scale * self.backoff_factor
        backed_off = xp.where(backed_off > self.floor, backed_off, self.floor)
        scale = xp.where(waits, state.scale, grown)
        scale = xp.where(overflows >= self.hysteresis, backed_off, scale)
        return ScaleArrays(scale, xp.where(waits, good_steps, 0), overflows, stuck)

    def allowed(self, scale: float) -> float:
        """The scale within the bounds; `init` for NaN."""
        return self.init if math.isnan(scale) else min(max(scale, self.floor), self.ceiling)

    def collapsed(self, stuck: int) -> LossScaleCollapseError:
        """The error after this many skipped steps in a row."""
        return LossScaleCollapseError(
            f"the loss scale is at its floor {power_text(self.floor)} and the last {stuck} steps were skipped.",
            NOT_THE_SCALE,
            "Otherwise train in bf16, or keep the module that overflows in FP32: 'fp16,module.PATTERN=fp32'.",
        )

    def begun_anew(self) -> DynamicLossScale:
        """The first state."""
        return replace(self, scale=self.init, good_steps=0, overflows=0, stuck=0)


LossScale = NoLossScale | StaticLossScale | DynamicLossScale


@dataclass(frozen=True)
class ScaleArrays:
    """The state of a loss scale, as FP32 and int32 arrays of shape (), or Python's numbers.

    For a constant scale `stuck` is `overflows`. A kind that needs more adds fields in a subclass.
    """

    scale: Any
    good_steps: Any
    overflows: Any
    stuck: Any


_STATE = tuple(field.name for field in fields(ScaleArrays))

Numbers = SimpleNamespace(where=lambda condition, yes, no: yes if condition else no)
"""The namespace of Python's numbers for `advance`; the caller rounds the scale to FP32."""


def rounded(state: ScaleArrays) -> ScaleArrays:
    """A state of plain numbers, with its floats rounded to FP32."""
    floats = {name: fl32(value) for name, value in vars(state).items() if isinstance(value, float)}
    return replace(state, **floats)


def on_host(pure: LossScale, state: ScaleArrays) -> LossScale:
    """The pure state that the arrays hold; UsageError if no loss scale can have it. Synchronizes with the device."""
    first = pure.arrays()
    read = {name: type(number)(float(getattr(state, name))) for name, number in vars(first).items()}
    return replace(pure, **pure._fields(replace(first, **read)))


def check(pure: LossScale, state: ScaleArrays) -> None:
    """Raise LossScaleCollapseError if the patience ran out. Synchronizes with the device."""
    if not isinstance(pure, NoLossScale) and (stuck := int(state.stuck)) >= pure.patience:
        raise pure.collapsed(stuck)


KINDS: dict[str, type[LossScale]] = {
    cls.kind: cls for cls in (NoLossScale, StaticLossScale, DynamicLossScale)
}


def from_state_dict(state: dict[str, Any]) -> LossScale:
    """The loss scale that `state_dict` saved, without unknown keys."""
    kind = str(state.get("kind", ""))
    if kind not in KINDS:
        raise unknown_name("loss scale kind", kind, KINDS)
    cls = KINDS[kind]
    names = {field.name for field in fields(cls)}
    return cls(**{name: value for name, value in state.items() if name in names})


def fl32(value: float) -> float:
    """The nearest FP32 number, ties to even; beyond FP32's range an infinity, NaN stays NaN."""
    if SMALLEST <= value <= LARGEST:  # fast path: called several times per step
        return float(np.float32(value))
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


def checked_scale(name: str, value: object) -> float:
    """A loss scale in FP32; UsageError outside of 2^-126 to 2^126."""
    try:
        given = float(value) if is_real(value) else math.nan  # before it is compared: fp16 has no 2^126
    except OverflowError:
        given = math.inf
    if not SMALLEST <= given <= LARGEST:
        raise UsageError(
            f"{name} is {value!r}. A loss scale is a number between 2**-126 and 2**126, such as 1024."
        )
    return fl32(given)


def is_real(value: object) -> TypeGuard[float]:
    """Whether this is a real number of Python or NumPy, and not a bool."""
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))


def check_whole(name: str, value: object, least: int) -> None:
    """Raise UsageError unless it is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise UsageError(f"{name} is {value!r}. It must be an integer of at least {least}.")


def power_text(value: float) -> str:
    """``2^10`` for a power of two, else the digits."""
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:g}"
