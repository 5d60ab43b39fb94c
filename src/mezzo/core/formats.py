"""Number formats as data, and the door to rounding: `mezzo.formats`.

A format here is a sign bit, an exponent and a mantissa; all that is said about it (its largest value, its
machine epsilon ...) follows from those widths and from what its top exponent is used for. The names are
those of `numpy.finfo`, so that ``formats.named("bf16").eps`` reads as ``numpy.finfo(...).eps`` would, had
numpy the format.

>>> named("fp16").max, named("bf16").eps, named("e4m3fn").smallest_subnormal
(65504.0, 0.0078125, 0.001953125)
>>> round(65520, "fp16"), round(65520, "fp16", overflow="saturate")
(inf, 65504.0)
>>> print(bits(-0.1, "fp16"))
1 01011 1001100110
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import numpy as np

from mezzo.core.errors import unknown_name
from mezzo.core.format_names import format_name

if TYPE_CHECKING:
    from decimal import Decimal

    from numpy.typing import NDArray

    from mezzo.core.bits import Bits

Number = int | float | Fraction
"""A value held exactly: a float where a float can, else an int or a Fraction."""


@dataclass(frozen=True)
class Format:
    """A binary floating-point format. Its properties are those of `numpy.finfo`, and exact.

    A value is ``(-1)**sign * 2**(exponent - bias) * 1.mantissa``; with an exponent field of zero it is
    subnormal, ``(-1)**sign * 2**minexp * 0.mantissa``. Properties are floats where a float holds them, else
    an int or a Fraction (the largest binary256 is an int of 262,144 bits).

    Args:
        name: the short name by which Mezzo knows it.
        nexp: bits of the exponent.
        nmant: bits of the mantissa that are stored; the leading 1 is not.
        title: the name in full.
        source: where it is defined.
        has_infinity: IEEE 754's use of the top exponent (infinities, and NaNs with a payload). False: the
        top exponent
            holds numbers as the others do, and its last mantissa alone is NaN (the ``fn`` of e4m3fn).
        storage_bits: bits it takes in memory, where that is more than its own.
    """

    name: str
    nexp: int
    nmant: int
    title: str
    source: str
    has_infinity: bool = True
    storage_bits: int = 0

    def __post_init__(self) -> None:
        if not self.storage_bits:
            object.__setattr__(self, "storage_bits", self.bits)

    def __str__(self) -> str:
        return self.name

    @property
    def bits(self) -> int:
        """Bits of sign, exponent and mantissa together."""
        return 1 + self.nexp + self.nmant

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field."""
        return (1 << (self.nexp - 1)) - 1

    @property
    def minexp(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def maxexp(self) -> int:
        """The smallest power of two that is beyond the format: ``max < 2**maxexp``."""
        return self.bias + 1 if self.has_infinity else self.bias + 2

    @property
    def machep(self) -> int:
        """Exponent of `eps`."""
        return -self.nmant

    @property
    def negep(self) -> int:
        """Exponent of `epsneg`."""
        return -self.nmant - 1

    @functools.cached_property
    def exact_max(self) -> Fraction:
        """The largest finite value, as a Fraction."""
        below_two = Fraction(2) - Fraction(1 if self.has_infinity else 2, 1 << self.nmant)
        return below_two * power_of_two(self.maxexp - 1)

    @property
    def max(self) -> Number:
        """The largest finite value."""
        return exactly(self.exact_max)

    @property
    def min(self) -> Number:
        """The most negative finite value, ``-max``."""
        return exactly(-self.exact_max)

    @property
    def smallest_normal(self) -> Number:
        """The smallest positive number with the full mantissa, ``2**minexp``."""
        return exactly(power_of_two(self.minexp))

    @property
    def tiny(self) -> Number:
        """`smallest_normal`, by numpy's older name."""
        return self.smallest_normal

    @property
    def smallest_subnormal(self) -> Number:
        """The smallest positive number of all, ``2**(minexp - nmant)``."""
        return exactly(power_of_two(self.minexp - self.nmant))

    @property
    def eps(self) -> Number:
        """The gap between 1 and the next number above."""
        return exactly(power_of_two(self.machep))

    @property
    def epsneg(self) -> Number:
        """The gap between 1 and the next number below."""
        return exactly(power_of_two(self.negep))

    @property
    def precision(self) -> int:
        """Decimal digits that always survive, ``floor(nmant * log10(2))`` as numpy counts them (e4m3fn:
        0)."""
        return math.floor(self.nmant * math.log10(2))

    @property
    def resolution(self) -> Number:
        """``10**-precision``, the float nearest to it (torch does so; numpy rounds it to the format)."""
        return 10.0**-self.precision


def exactly(value: Fraction) -> Number:
    """The same value in the plainest type that holds it: a float, else an int, else the Fraction itself."""
    try:
        as_float = float(value)
    except OverflowError:
        return value.numerator if value.denominator == 1 else value
    return as_float if Fraction(as_float) == value else value.numerator if value.denominator == 1 else value


def power_of_two(exponent: int) -> Fraction:
    """``2**exponent``, exactly."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


_IEEE = "IEEE 754-2019, table 3.5"
_OCP = "OCP 8-bit Floating Point Specification (OFP8) 1.0, 2023"
_TABLE = (
    Format("fp64", 11, 52, "IEEE binary64, double precision", _IEEE),
    Format("fp32", 8, 23, "IEEE binary32, single precision", _IEEE),
    Format(
        "tf32", 8, 10, "TensorFloat-32", "NVIDIA A100 Tensor Core GPU Architecture, 2020", storage_bits=32
    ),
    Format("fp16", 5, 10, "IEEE binary16, half precision", _IEEE),
    Format("bf16", 8, 7, "bfloat16", "Intel, BFLOAT16 Hardware Numerics Definition, 2018"),
    Format("e4m3fn", 4, 3, "OCP FP8 E4M3: no infinities, one NaN", _OCP, has_infinity=False),
    Format("e5m2", 5, 2, "OCP FP8 E5M2", _OCP),
    Format("binary128", 15, 112, "IEEE binary128, quadruple precision", _IEEE),
    Format("binary256", 19, 236, "IEEE binary256, octuple precision", "IEEE 754-2019, table 3.5, k = 256"),
)

FORMATS: Mapping[str, Format] = MappingProxyType({form.name: form for form in _TABLE})
"""Every format Mezzo knows, by name; the order is that of `mezzo formats`."""

OVERFLOW: Mapping[str, str] = MappingProxyType(
    {
        "infinity": "beyond max: infinity, or NaN where there is none (IEEE 754, and OFP8 non-saturating)",
        "saturate": "beyond max, infinities included: max (OFP8 saturating)",
    }
)
"""What can become of a value beyond ``max``; NaN stays NaN in either."""

# A framework's arrays are rounded by that framework's own room, which is imported only for an array of its
# own: so only if the framework itself is there already. Framework -> (its array type, the module that
# rounds one).
_FRAMEWORKS = {"torch": ("Tensor", "mezzo.pytorch.rounding")}


class _TensorLike(Protocol):
    """What tells a torch tensor from all else here, where torch itself is not to be named."""

    requires_grad: bool


_Tensor = TypeVar("_Tensor", bound=_TensorLike)


def named(format: str | Format) -> Format:
    """The format of that name, of that alias or of a `torch.dtype`; a `Format` is handed back as it is.

    Raises:
        UnknownNameError: no such format; the message names the nearest.
    """
    if isinstance(format, Format):
        return format
    name = format_name(format)
    if name not in FORMATS:
        raise unknown_name("format", name, FORMATS)
    return FORMATS[name]


def overflow_named(overflow: str) -> str:
    """The same name, if it is one of `OVERFLOW`.

    Raises:
        UnknownNameError: it is not.
    """
    if overflow not in OVERFLOW:
        raise unknown_name("overflow behaviour", str(overflow), OVERFLOW)
    return overflow


@overload
def round(x: Number | Decimal, format: str | Format, *, overflow: str = ...) -> Number: ...
@overload
def round(x: NDArray[Any] | np.generic, format: str | Format, *, overflow: str = ...) -> NDArray[Any]: ...
@overload
def round(x: _Tensor, format: str | Format, *, overflow: str = ...) -> _Tensor: ...
def round(x: Any, format: str | Format, *, overflow: str = "infinity") -> Any:
    """The nearest value of a format; of two equally near, the one whose last mantissa bit is 0 (ties to
    even).

    Naive code, for fp16 and a float32 array: ``x.astype(np.float16).astype(np.float32)``. Unlike casts,
    float64 is rounded once: torch and ml_dtypes go by way of float32, and so round ``1 + 2**-11 + 2**-40``
    to 1 in fp16.

    Args:
        x: a float, int, Fraction or Decimal; a numpy array; a torch tensor.
        format: a format or its name.
        overflow: ``"infinity"`` or ``"saturate"``, for what lies beyond ``max`` (see `OVERFLOW`).

    Returns:
        For a number: a float, or where no float holds it an int or a Fraction. For an array or a tensor: a
        new one of its shape, in float64 for float64 and for integers, else in float32. -0 keeps its sign,
        subnormals are exact. NaN stays NaN: quiet, without payload, its sign kept.

    Raises:
        UnknownNameError: an unknown format or overflow behaviour.
        UsageError: a type that cannot be rounded exactly; saturating to a format wider than the array's own.
    """
    form, overflow = named(format), overflow_named(overflow)
    for framework, (array_type, module) in _FRAMEWORKS.items():
        loaded = sys.modules.get(framework)
        if loaded is not None and isinstance(x, getattr(loaded, array_type, ())):
            return importlib.import_module(module).round_tensor(x, form, overflow)
    from mezzo.core import rounding

    if isinstance(x, (np.ndarray, np.generic)):
        rounded = rounding.round_array(x, form, overflow)
        return rounded[()] if isinstance(x, np.generic) else rounded
    return rounding.round_number(x, form, overflow)


def bits(x: Number | Decimal, format: str | Format, *, overflow: str = "infinity") -> Bits:
    """A number's bit pattern in a format, after rounding: sign, exponent and mantissa. See `round` for the
    arguments.

    >>> bits(1.0, "bf16").exponent, hex(bits(1.0, "bf16").code)
    (127, '0x3f80')
    """
    from mezzo.core.bits import encode

    return encode(x, named(format), overflow_named(overflow))


def decode(code: int | Bits, format: str | Format) -> Number:
    """The value of a bit pattern: the inverse of `bits`.

    >>> decode(0x3F80, "bf16"), decode(0xFF, "e4m3fn")
    (1.0, nan)

    Raises:
        UsageError: a pattern with more bits than the format, or a negative one.
    """
    from mezzo.core.bits import Bits

    form = named(format)
    return (code if isinstance(code, Bits) else Bits.from_code(code, form)).value


def ulp(x: Number | Decimal, format: str | Format) -> Number:
    """The unit in the last place at ``x``: the gap between the format's numbers in x's binade.

    As `math.ulp`: at 0 the smallest subnormal; infinite where ``x`` is infinite or overflows; NaN at NaN.

    >>> ulp(1, "bf16"), ulp(0, "fp16") == 2**-24, ulp(70000, "fp16")
    (0.0078125, True, inf)
    """
    from mezzo.core import rounding

    return rounding.ulp(x, named(format))
