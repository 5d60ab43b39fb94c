"""Rounding of arrays to a format, to nearest even or stochastically, on their bit patterns: NumPy's arrays here, and
tensors in `mezzo.pytorch.rounding`, with the same code. `mezzo.formats.round` is the specification.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mezzo.core.errors import UsageError
from mezzo.core.formats import FORMATS, Format, bits

_BLOCK = 1 << 15
"""Values at a time: the dozen passes over a block stay in a core's own cache."""


# For words of so many bits: factors of pattern, place and seed; the shifts and factors of lowbias32 and splitmix64.
_MIX = {
    32: ((0x2C1B3C6D, 0x297A2D39, 0x9E3779B9), ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))),
    64: (
        (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7),
        ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)),
    ),
}


def random_integers(patterns: Any, places: Any, seed: int, bits: int) -> Any:
    """Integers from 0 to ``2 ** (bits - 2) - 1``: a hash of each pattern, its place and the seed, in signed words."""
    (of_pattern, of_place, of_seed), finalizer = _MIX[bits]

    def signed(number: int) -> int:
        return ((number + (1 << bits - 1)) & ((1 << bits) - 1)) - (1 << bits - 1)

    h = patterns * signed(of_pattern) + (places * signed(of_place) + signed(seed * of_seed))
    for shift, factor in finalizer:
        h = (h ^ (h >> shift & (1 << bits - shift) - 1)) * signed(factor)
    return h & (1 << bits - 2) - 1


class RoundingPlan:
    """The constants with which values held in one format are rounded to those of a narrower one.

    A pattern's magnitude grows with its value, so a value is rounded by adding just under half a unit of the narrower
    mantissa to the pattern, plus one if the bit that stays last is odd, and clearing the bits below. Below the narrower
    format's normal range the unit no longer shrinks: there, adding and subtracting ``anchor``, whose last place is that
    unit, makes the hardware round. It is 0 and not used if both have the same exponent range. Stochastically, a random
    part of a unit is added to the significand, an integer, from which more bits are dropped below the normal range.
    """

    def __init__(self, form: Format, storage: Format, overflow: str) -> None:
        self.word = f"int{storage.bits}"
        self.nmant = storage.nmant
        self.random_bits = storage.bits - 2
        self.shift = storage.nmant - form.nmant
        self.below_half = (1 << self.shift >> 1) - 1
        self.magnitude_mask = (1 << (storage.bits - 1)) - 1
        self.kept_mask = self.magnitude_mask >> self.shift << self.shift
        self.infinity = bits(math.inf, storage).code
        self.nan = self.infinity | 1 << (storage.nmant - 1)
        self.largest = bits(min(form.max, storage.max), storage).code
        self.smallest_normal = bits(form.smallest_normal, storage).code
        self.ties_up = not form.nmant
        self.smallest, self.up_from = (
            (0, 0) if form.signed else (bits(factor * form.min, storage).code for factor in (1, 1.5))
        )
        self.anchor = 0.0
        if form.signed and form.minexp > storage.minexp:
            self.anchor = math.ldexp(1.0, form.minexp - form.nmant + storage.nmant)
        self.anchor_pattern = bits(self.anchor, storage).code
        if overflow == "saturate":
            self.beyond = self.largest
        else:
            self.beyond = self.infinity if form.has_infinity else self.nan if form.has_nan else self.largest

    def round(self, values: Any, xp: Any, random: Any = None) -> Any:
        """The rounded values, in a new array; `xp` is ``numpy`` or ``torch``, whichever the array is from.

        Stochastically with `random`: integers from 0 to ``2 ** random_bits - 1``, one for each value.
        """
        patterns = values.view(getattr(xp, self.word))
        magnitude = patterns & self.magnitude_mask
        if random is None:
            rounded, sums, least = magnitude, magnitude.view(values.dtype) + self.anchor, self.up_from
            if self.shift:
                is_odd = 1 if self.ties_up else (magnitude >> self.shift) & 1
                rounded = (magnitude + (is_odd + self.below_half)) & self.kept_mask
        else:
            exponent = xp.clip(magnitude >> self.nmant, 1, None)
            significand = magnitude - (exponent - 1 << self.nmant)
            dropped = self.shift + xp.clip((self.smallest_normal >> self.nmant) - exponent, 0, None)
            if self.smallest:  # the smallest value of e8m0 is half of FP32's smallest normal number
                dropped = dropped - xp.clip(1 - (magnitude >> self.nmant), 0, 1)
            kept = xp.clip(dropped, None, self.random_bits)
            significand = significand >> xp.clip(dropped - kept, None, self.random_bits)
            count = (significand + (random >> self.random_bits - kept)) >> kept
            rounded, least = (exponent - 1 << self.nmant) + (count << kept), self.smallest
            sums = (self.anchor_pattern + count).view(values.dtype)
        if self.anchor:
            subnormal = sums - self.anchor
            rounded = xp.where(magnitude < self.smallest_normal, subnormal.view(patterns.dtype), rounded)
        rounded = xp.where(rounded > self.largest, self.beyond, rounded)
        rounded = xp.where(magnitude > self.infinity, self.nan, rounded)
        if self.smallest:  # a format without sign and zero
            rounded = xp.where(magnitude < least, self.smallest, rounded)
            rounded = xp.where(patterns <= 0, self.nan, rounded)
        return (rounded | (patterns & ~self.magnitude_mask)).view(values.dtype)


_PLANS: dict[tuple[Format, Format, str], RoundingPlan | None] = {}


def plan_of(form: Format, storage: Format, overflow: str) -> RoundingPlan | None:
    """The plan for these formats, made once; None if the format holds every value that the storage can."""
    key = (form, storage, overflow)
    if key not in _PLANS:
        if form.nmant < storage.nmant or form.maxexp < storage.maxexp or form.bits == storage.bits:
            _PLANS[key] = RoundingPlan(form, storage, overflow)
        elif overflow == "saturate" and form.maxexp > storage.maxexp:
            raise UsageError(
                f"overflow='saturate': the array is {storage}, which cannot hold the largest value of {form}. "
                "Convert it first: x.astype(numpy.float64), or x.double() for a tensor."
            )
        else:
            _PLANS[key] = None
    return _PLANS[key]


_HELD_IN = {np.dtype(np.float32): FORMATS["fp32"], np.dtype(np.float64): FORMATS["fp64"]}


def round_array(x: NDArray[Any] | np.generic, form: Format, overflow: str, seed: int | None = None) -> Any:
    """`mezzo.formats.round` for a numpy array of any shape, or for one of numpy's numbers; seed None: the nearest."""
    values = held(x)
    plan = plan_of(form, _HELD_IN[values.dtype], overflow)
    if plan is None:
        return values.copy()[()] if isinstance(x, np.generic) else values.copy()
    flat = values.reshape(-1)
    rounded = np.empty_like(flat)
    with np.errstate(invalid="ignore"):  # a signalling NaN in the sum with the anchor
        for start in range(0, flat.size, _BLOCK):
            part, random = flat[start : start + _BLOCK], None
            if seed is not None:
                patterns = part.view(plan.word)
                places = np.arange(start, start + part.size).astype(plan.word)
                random = random_integers(patterns, places, seed, 8 * part.itemsize)
            rounded[start : start + _BLOCK] = plan.round(part, np, random)
    shaped = rounded.reshape(values.shape)
    return shaped[()] if isinstance(x, np.generic) else shaped


def held(x: NDArray[Any] | np.generic) -> NDArray[Any]:
    """The array in float64 for float64 and integers, else in float32, in the machine's byte order; always exactly."""
    array = np.asarray(x)
    native = array.dtype.newbyteorder("=")
    if native in _HELD_IN:
        return array.astype(native, copy=False)
    if native.kind in "iub":
        wide: NDArray[Any] = array.astype(np.float64)
        # Below 2**53 float64 has every integer; 2**53 + 1 already looks like 2**53 here.
        if native.itemsize == 8 and np.any(np.abs(wide) >= 2.0**53):
            raise UsageError(
                f"{native} values of 2**53 or more do not fit float64 exactly. Round them one by one as Python ints, "
                "or convert them first and accept that rounding: x.astype(numpy.float64)."
            )
        return wide
    # float16 and the dtypes of ml_dtypes (kind "V", or "f" in some releases) all fit into float32.
    if native.itemsize <= 2 and native.kind in "fV" and np.can_cast(native, np.float32, "safe"):
        return array.astype(np.float32)
    raise UsageError(
        f"cannot round a {native} array exactly. Convert it first: x.astype(numpy.float64), or numpy.float32."
    )


def random_integer(x: float, seed: int) -> int:
    """The random integer of an array with this one float64 value."""
    pattern = np.array([x], np.float64).view(np.int64)
    return int(random_integers(pattern, np.zeros(1, np.int64), seed, 64)[0])
