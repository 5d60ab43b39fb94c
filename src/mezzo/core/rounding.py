"""Exact rounding to a format, ties to even: once as the standard puts it, and once fast for numpy arrays.

The first form is the specification. It works in exact fractions, so it takes a number of any size to a
format of any width, and it is what the others are tested against. The second works on the bit patterns of
float32 or float64, and rounds once: a float64 on its way to fp16 never passes through float32.
`mezzo.pytorch.rounding` is the second form again, on tensors.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mezzo.core.errors import UsageError
from mezzo.core.formats import FORMATS, Format, Number, exactly, power_of_two


def round_number(x: Number | Decimal, form: Format, overflow: str) -> Number:
    """The nearest value of the format, ties to even (IEEE 754-2019, 4.3.1), for one number.

    See `mezzo.formats.round`, which this is for a number.
    """
    exact, sign = split(x)
    if exact is None:
        return math.copysign(math.nan, sign) if is_nan(x) else beyond(sign, form, overflow)
    quantum = power_of_two(max(exponent(exact), form.minexp) - form.nmant)
    rounded = round(exact / quantum) * quantum  # Python's round takes a Fraction's ties to even
    if rounded > form.exact_max:
        return beyond(sign, form, overflow)
    return exactly(rounded) * sign if rounded else math.copysign(0.0, sign)


def beyond(sign: int, form: Format, overflow: str) -> Number:
    """What a value beyond the format's largest becomes."""
    if overflow == "saturate":
        return exactly(sign * form.exact_max)
    return math.copysign(math.inf if form.has_infinity else math.nan, sign)


def ulp(x: Number | Decimal, form: Format) -> Number:
    """The gap between the format's numbers in the binade of ``x``. See `mezzo.formats.ulp`."""
    exact, _ = split(x)
    if exact is None:
        return math.nan if is_nan(x) else math.inf
    if round_number(exact, form, "saturate") != round_number(exact, form, "infinity"):
        return math.inf
    return exactly(power_of_two(max(exponent(exact), form.minexp) - form.nmant))


def split(x: Number | Decimal) -> tuple[Fraction | None, int]:
    """A number's magnitude, exactly (None for an infinity or a NaN), and its sign as +1 or -1.

    Raises:
        UsageError: not a number.
    """
    if isinstance(x, float):
        sign = int(math.copysign(1, x))
        return (Fraction(abs(x)) if math.isfinite(x) else None), sign
    if isinstance(x, (int, Fraction)):
        return abs(Fraction(x)), -1 if x < 0 else 1
    if isinstance(x, Decimal):
        sign = -1 if x.is_signed() else 1
        return (Fraction(x.copy_abs()) if x.is_finite() else None), sign
    raise UsageError(
        f"cannot round {type(x).__name__} {str(x)[:40]!r}: give a float, int, Fraction or Decimal, "
        "a numpy array or a torch tensor (numpy.asarray makes an array of a list)"
    )


def is_nan(x: Number | Decimal) -> bool:
    """Whether it is NaN, of any sort."""
    return x.is_nan() if isinstance(x, Decimal) else isinstance(x, float) and math.isnan(x)


def exponent(x: Fraction) -> int:
    """``floor(log2(x))`` for a positive number, exactly; far below every format's exponents for 0."""
    if not x:
        return -(1 << 62)
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if x >= power_of_two(guess) else guess - 1


# An array's values are held in one of these: dtype -> (the format it is, an unsigned integer of its width).
_HELD_IN: dict[np.dtype[Any], tuple[Format, type[np.unsignedinteger[Any]]]] = {
    np.dtype(np.float32): (FORMATS["fp32"], np.uint32),
    np.dtype(np.float64): (FORMATS["fp64"], np.uint64),
}

# Values at a time: the dozen passes over a block stay in a core's own cache.
_BLOCK = 1 << 15


def round_array(x: NDArray[Any] | np.generic, form: Format, overflow: str) -> NDArray[Any]:
    """The nearest values of the format, ties to even, for a numpy array of any shape; the input is left as
    it was.

    See `mezzo.formats.round`, which this is for an array: float64 and integers come back in float64, others
    in float32.
    """
    values = held(x)
    storage, word = _HELD_IN[values.dtype]
    if is_wider(form, storage, overflow):
        return values.copy()
    plan = BitPlan.of(form, storage, overflow)
    flat = values.reshape(-1)
    rounded = np.empty_like(flat)
    for start in range(0, flat.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        rounded[block] = _round_block(flat[block], plan, word)
    return rounded.reshape(values.shape)


def _round_block(values: NDArray[Any], plan: BitPlan, word: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    bits = values.view(word)
    magnitude = bits & word(plan.magnitude_mask)
    sign = bits ^ magnitude
    rounded = magnitude
    if plan.shift:
        is_odd = (magnitude >> word(plan.shift)) & word(1)
        rounded = (magnitude + (is_odd + word(plan.below_half))) & word(plan.kept_mask)
    if plan.anchor:
        with np.errstate(invalid="ignore"):  # a signalling NaN may pass through; it is replaced below
            subnormal = (magnitude.view(values.dtype) + values.dtype.type(plan.anchor)) - plan.anchor
        rounded = np.where(magnitude < word(plan.smallest_normal), subnormal.view(word), rounded)
    rounded = np.where(rounded > word(plan.largest), word(plan.beyond), rounded)
    rounded = np.where(magnitude > word(plan.infinity), word(plan.nan), rounded)
    result: NDArray[Any] = (rounded | sign).view(values.dtype)
    return result


class BitPlan:
    """The constants with which an array form rounds values held in one format to the values of a narrower
    one.

    A pattern's magnitude (all but its sign) grows with its value, so a value is rounded by adding just
    under half a unit of the narrower mantissa to the pattern, plus one if the bit that stays last is odd,
    and clearing what is below: a carry runs into the exponent by itself. Below the narrower format's normal
    range the unit no longer shrinks with the value; there, adding and subtracting ``anchor``, whose own
    last place is that unit, makes the hardware round ties to even. Where both formats have one exponent
    range, no such place exists and ``anchor`` is 0.
    """

    def __init__(self, form: Format, storage: Format, overflow: str) -> None:
        self.shift = storage.nmant - form.nmant
        self.below_half = (1 << self.shift >> 1) - 1
        self.magnitude_mask = (1 << (storage.bits - 1)) - 1
        self.kept_mask = self.magnitude_mask >> self.shift << self.shift
        self.infinity = pattern(math.inf, storage)
        self.nan = self.infinity | 1 << (storage.nmant - 1)
        self.largest = pattern(form.exact_max, storage)
        self.smallest_normal = pattern(power_of_two(form.minexp), storage)
        self.anchor = 0.0
        if form.minexp > storage.minexp:
            self.anchor = float(power_of_two(form.minexp - form.nmant + storage.nmant))
        if overflow == "saturate":
            self.beyond = self.largest
        else:
            self.beyond = self.infinity if form.has_infinity else self.nan

    @staticmethod
    def of(form: Format, storage: Format, overflow: str) -> BitPlan:
        """The plan for these formats, made once."""
        key = (form, storage, overflow)
        if key not in _PLANS:
            _PLANS[key] = BitPlan(form, storage, overflow)
        return _PLANS[key]


_PLANS: dict[tuple[Format, Format, str], BitPlan] = {}


def pattern(value: float | Fraction, storage: Format) -> int:
    """The bit pattern of a positive value that the format holds exactly (an infinity included)."""
    if value == math.inf:
        return ((1 << storage.nexp) - 1) << storage.nmant
    exact = Fraction(value)
    top = max(exponent(exact), storage.minexp)
    units = exact / power_of_two(top - storage.nmant)
    assert units.denominator == 1
    field = top + storage.bias - 1  # the leading 1 of `units` adds the one that is missing
    return (field << storage.nmant) + units.numerator


def is_wider(form: Format, storage: Format, overflow: str) -> bool:
    """Whether the format holds every value that the storage can, so that rounding changes nothing.

    Raises:
        UsageError: saturating to it is asked for, and its largest value does not fit into the storage.
    """
    if form.nmant < storage.nmant or form.maxexp < storage.maxexp:
        return False
    if overflow == "saturate" and form.maxexp > storage.maxexp:
        raise UsageError(
            f"overflow='saturate' to {form} needs storage that can hold its largest value, and {storage} "
            "cannot: convert the array first, or round its numbers one by one"
        )
    return form.nmant > storage.nmant or form.maxexp > storage.maxexp


def held(x: NDArray[Any] | np.generic) -> NDArray[Any]:
    """The array in float64 for float64 and integers, else in float32, in the machine's byte order; always
    exactly.

    Raises:
        UsageError: a dtype or an integer that neither holds exactly.
    """
    array = np.asarray(x)
    native = array.dtype.newbyteorder("=")
    if native in _HELD_IN:
        return array.astype(native, copy=False)
    if native.kind in "iub":
        wide: NDArray[Any] = array.astype(np.float64)
        # Below 2**53 float64 has every integer; 2**53 + 1 already looks like 2**53 here.
        if native.itemsize == 8 and np.any(np.abs(wide) >= 2.0**53):
            raise UsageError(
                f"{native} values from 2**53 up would be rounded on their way to float64: round them "
                "one by one as Python ints, or convert with .astype(numpy.float64) to accept that"
            )
        return wide
    # float16 and the dtypes of ml_dtypes (kind "V", or "f" in some releases) all fit into float32.
    if native.itemsize <= 2 and native.kind in "fV" and np.can_cast(native, np.float32, "safe"):
        return array.astype(np.float32)
    raise UsageError(f"cannot round a {native} array exactly: convert it to float64 or float32 first")
