"""Numbers of a loss scale: FP32 on the host as a device has it, what may be one, and how one is written."""

from __future__ import annotations

import math
from numbers import Real
from typing import TypeGuard

import numpy as np

from mezzo.core.errors import LossScaleCollapseError, UsageError

# The inverse of a scale must be a normal FP32 number as well.
SMALLEST, LARGEST = 2.0**-126, 2.0**126

NOT_THE_SCALE = (
    "If the loss itself is NaN or infinite no scale can help: run the step in FP32 and look at the data, the "
    "learning rate and the initialisation."
)

STATISTICAL_REMOVED = (
    "the statistical loss scale was removed in version 0.2: it showed no clear gain over a dynamic one. Use 'dynamic' "
    "(DynamicLossScale); dynamic(init=...) takes the first scale that `mezzo calibrate` recommends."
)


def fl32(value: float) -> float:
    """The nearest FP32 number, ties to even; beyond FP32's range an infinity, NaN stays NaN."""
    if SMALLEST <= value <= LARGEST:  # no warning to silence: a run asks several times at each step
        return float(np.float32(value))
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


def checked_scale(name: str, value: object) -> float:
    """A loss scale in FP32.

    Raises:
        UsageError: no number between 2^-126 and 2^126.
    """
    try:
        given = float(value) if is_real(value) else math.nan  # before it is compared: fp16 has no 2^126
    except OverflowError:
        given = math.inf
    if not SMALLEST <= given <= LARGEST:
        raise UsageError(f"{name} is {value!r}: a loss scale is a number between 2**-126 and 2**126")
    return fl32(given)


def is_real(value: object) -> TypeGuard[float]:
    """Whether this is a number, Python's or NumPy's; True and False are none here."""
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))


def check_whole(name: str, value: object, least: int) -> None:
    """Nothing, for a whole number of at least `least`.

    Raises:
        UsageError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise UsageError(f"{name} is {value!r}: it must be a whole number of at least {least}")


def power_text(value: float) -> str:
    """A scale as a person would write it: ``2^10``, or its digits where it is no power of two."""
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:g}"


def collapsed(floor: float, stuck: int) -> LossScaleCollapseError:
    """What is raised when a scale that backs off can back off no more."""
    return LossScaleCollapseError(
        f"the loss scale is at its floor {power_text(floor)} and the last {stuck} steps were skipped.",
        NOT_THE_SCALE,
        "Else train in bf16, or keep the module that overflows in FP32: fp16,module.PATTERN=fp32.",
    )
