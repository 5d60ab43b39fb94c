"""Number formats as data, exact rounding to them, and bit patterns: the module `mezzo.formats`.

Python's numbers are rounded here in exact fractions, as the standard defines it; arrays and tensors by
`mezzo.core.rounding` and `mezzo.pytorch.rounding`, which are tested against this.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    *("ALIASES", "FORMATS", "OVERFLOW", "Bits", "Format"),
    *("bits", "decode", "dtype_name", "format_name", "named", "quantize", "round", "ulp"),
]
__getattr__, __dir__ = lazy(__name__, dict.fromkeys(__all__, ""))  # for errors, with the name meant

Number = int | float | Fraction


@dataclass(frozen=True)
class Format:
    """A binary floating-point format of at most float64's range and precision. Its properties are `numpy.finfo`'s.

    A value is ``(-1)**sign * 2**(exponent - bias) * 1.mantissa``; with an exponent field of zero it is
    subnormal, ``(-1)**sign * 2**minexp * 0.mantissa``.

    Args:
        name: the short name by which Mezzo knows it.
        nexp: bits of the exponent, at most 11.
        nmant: bits of the mantissa that are stored (the leading 1 is not), at most 52.
        title: the name in full.
        source: where it is defined.
        has_infinity: IEEE 754's use of the top exponent (infinities, and NaNs with a payload). False: the top
            exponent holds numbers as the others do, and only its last mantissa is NaN (the ``fn`` of e4m3fn).
        storage_bits: bits it takes in memory, if that is more than its own.
        has_nan: False: every code is a number. What is beyond ``max`` becomes ``max``.
        signed: False for e8m0, the format of scales: ``2**(exponent - bias)``, without sign, zero or subnormals.

    Raises:
        UsageError: a format that is wider than float64.
    """

    name: str
    nexp: int
    nmant: int
    title: str
    source: str
    has_infinity: bool = True
    storage_bits: int = 0
    has_nan: bool = True
    signed: bool = True

    def __post_init__(self) -> None:
        if self.nexp > 11 or self.nmant > 52:
            raise UsageError(
                f"format {self.name!r} with nexp={self.nexp}, nmant={self.nmant} is wider than float64. Use at most "
                "nexp=11 and nmant=52."
            )
        if not self.storage_bits:
            object.__setattr__(self, "storage_bits", self.bits)

    def __str__(self) -> str:
        return self.name

    @property
    def bits(self) -> int:
        """Bits of sign, exponent and mantissa together."""
        return self.signed + self.nexp + self.nmant

    @property
    def bias(self) -> int:
        """Subtracted from the exponent field."""
        return (1 << (self.nexp - 1)) - 1

    @property
    def minexp(self) -> int:
        """Exponent of the smallest normal number."""
        return self.signed - self.bias

    @property
    def maxexp(self) -> int:
        """The smallest power of two that is beyond the format: ``max < 2**maxexp``."""
        return self.bias + 1 if self._loses_top else self.bias + 2

    @property
    def _loses_top(self) -> bool:
        """Whether no number has the top exponent."""
        return self.has_infinity or (self.has_nan and not self.nmant)

    @property
    def max(self) -> float:
        """The largest finite value."""
        below_two = 2.0 - (1 if self._loses_top or not self.has_nan else 2) * self.eps
        return math.ldexp(below_two, self.maxexp - 1)

    @property
    def min(self) -> float:
        """The most negative finite value, ``-max``; without a sign the smallest value."""
        return -self.max if self.signed else self.smallest_normal

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with the full mantissa, ``2**minexp``."""
        return math.ldexp(1.0, self.minexp)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number of all, ``2**(minexp - nmant)``."""
        return math.ldexp(1.0, self.minexp - self.nmant)

    @property
    def eps(self) -> float:
        """The gap between 1 and the next number above."""
        return math.ldexp(1.0, -self.nmant)

    @property
    def epsneg(self) -> float:
        """The gap between 1 and the next number below."""
        return max(math.ldexp(1.0, -self.nmant - 1), self.smallest_subnormal)

    @property
    def precision(self) -> int:
        """Decimal digits that always survive, ``floor(nmant * log10(2))`` as numpy counts them (e4m3fn: 0)."""
        return math.floor(self.nmant * math.log10(2))

    @property
    def resolution(self) -> float:
        """``10**-precision``, the float nearest to it (torch does so; numpy rounds it to the format)."""
        return 10.0**-self.precision


_IEEE = "IEEE 754-2019, table 3.5"
_OCP = "OCP 8-bit Floating Point Specification (OFP8) 1.0, 2023"
_TF32 = "NVIDIA A100 Tensor Core GPU Architecture, 2020"
_MX = "OCP Microscaling Formats (MX) 1.0, 2023"
_TABLE = (
    Format("fp64", 11, 52, "IEEE binary64, double precision", _IEEE),
    Format("fp32", 8, 23, "IEEE binary32, single precision", _IEEE),
    Format("tf32", 8, 10, "TensorFloat-32", _TF32, storage_bits=32),
    Format("fp16", 5, 10, "IEEE binary16, half precision", _IEEE),
    Format("bf16", 8, 7, "bfloat16", "Intel, BFLOAT16 Hardware Numerics Definition, 2018"),
    Format("e4m3fn", 4, 3, "OCP FP8 E4M3: no infinities, one NaN", _OCP, has_infinity=False),
    Format("e5m2", 5, 2, "OCP FP8 E5M2", _OCP),
    Format("e3m2", 3, 2, "OCP FP6 E3M2: no infinities, no NaN", _MX, has_infinity=False, has_nan=False),
    Format("e2m3", 2, 3, "OCP FP6 E2M3: no infinities, no NaN", _MX, has_infinity=False, has_nan=False),
    Format("e2m1", 2, 1, "OCP FP4 E2M1: no infinities, no NaN", _MX, has_infinity=False, has_nan=False),
    Format("e8m0", 8, 0, "OCP E8M0, for scales: powers of two, no 0", _MX, has_infinity=False, signed=False),
)

FORMATS: Mapping[str, Format] = MappingProxyType({form.name: form for form in _TABLE})
"""Every format Mezzo knows, by name; the order is that of `mezzo formats`."""

ALIASES: Mapping[str, str] = MappingProxyType(
    dict(float64="fp64", float32="fp32", float16="fp16", half="fp16", bfloat16="bf16")
    | dict(float8_e4m3fn="e4m3fn", e4m3="e4m3fn", float8_e5m2="e5m2")
    | dict(fp4="e2m1", float4_e2m1fn_x2="e2m1", float8_e8m0fnu="e8m0")
)
"""Other names of the formats, those of torch's dtypes among them."""

OVERFLOW: Mapping[str, str] = MappingProxyType(
    {
        "infinity": "beyond max: infinity, or NaN where there is none (IEEE 754, and OFP8 non-saturating); without "
        "either, max",
        "saturate": "beyond max, infinities included: max (OFP8 saturating)",
    }
)
"""The two results of a value beyond ``max``; NaN stays NaN under both."""

# Framework -> (its array types, the module that rounds one). The module is imported only for such an array.
_FRAMEWORKS = {
    "numpy": (("ndarray", "generic"), "mezzo.core.rounding"),
    "torch": (("Tensor",), "mezzo.pytorch.rounding"),
}


class _TensorLike(Protocol):
    """A torch tensor, in a module that does not import torch."""

    requires_grad: bool


_Tensor = TypeVar("_Tensor", bound=_TensorLike)


def format_name(value: object) -> str:
    """The format's own name for an alias or a `torch.dtype`; any other value as text.

    >>> format_name("bfloat16"), format_name("fp8")
    ('bf16', 'fp8')
    """
    return ALIASES.get(str(value).removeprefix("torch."), str(value))


def dtype_name(value: object) -> str:
    """The format's name for a `torch.dtype`, and not for an alias; any other value as text."""
    return format_name(value) if str(value).startswith("torch.") else str(value)


def named(format: str | Format) -> Format:
    """The format with a name, an alias or a `torch.dtype`; a `Format` is returned as it is.

    Raises:
        UnknownNameError: no such format; the message names the nearest.
    """
    if isinstance(format, Format):
        return format
    name = format_name(format)
    if name not in FORMATS:
        raise unknown_name("format", name, FORMATS)
    return FORMATS[name]


@overload
def round(x: Number, format: str | Format, *, overflow: str = ..., seed: int | None = ...) -> float: ...
@overload
def round(
    x: NDArray[Any] | np.generic, format: str | Format, *, overflow: str = ..., seed: int | None = ...
) -> NDArray[Any]: ...
@overload
def round(x: _Tensor, format: str | Format, *, overflow: str = ..., seed: int | None = ...) -> _Tensor: ...
def round(x: Any, format: str | Format, *, overflow: str = "infinity", seed: int | None = None) -> Any:
    """The nearest value of a format, ties to even (IEEE 754-2019, 4.3.1; e8m0, whose values have no last digit: up).

    Naive code, for fp16 and a float32 array: ``x.astype(np.float16).astype(np.float32)``. Unlike casts, float64 is
    rounded once: torch and ml_dtypes go by way of float32.

    Args:
        x: a float, int or Fraction; a numpy array; a torch tensor.
        format: a format or its name.
        overflow: ``"infinity"`` or ``"saturate"``, for what lies beyond ``max`` (see `OVERFLOW`).
        seed: an int for stochastic rounding: to either neighbour with probability ``1 - distance / gap``, in steps of
            2^-30 (2^-62 for numbers and float64). A hash of seed, value and place decides, so a call repeats.

    Returns:
        For a number: a float. For an array or a tensor: a new one of its shape, in float64 for float64 and for
        integers, else in float32. -0 keeps its sign, subnormals are exact, NaN stays NaN: quiet, without payload,
        also for formats that have no code for it. In e8m0 zero and negative numbers are NaN.

    Raises:
        UnknownNameError: an unknown format or overflow behavior.
        UsageError: a type that cannot be rounded exactly; a seed other than an int; saturating to a format wider than
            the array's own.

    Example:
        >>> round(0.1, "bf16"), round(70000.0, "fp16"), round(70000.0, "fp16", overflow="saturate")
        (0.10009765625, inf, 65504.0)
    """
    form = named(format)
    if overflow not in OVERFLOW:
        raise unknown_name("overflow behavior", str(overflow), OVERFLOW)
    if seed is not None and type(seed) is not int:
        raise UsageError(f"round: seed={seed!r} is not an integer. Use None for the nearest value, or 0.")
    for framework, (array_types, module) in _FRAMEWORKS.items():
        loaded = sys.modules.get(framework)
        if loaded is not None and any(isinstance(x, getattr(loaded, one, ())) for one in array_types):
            return importlib.import_module(module).round_array(x, form, overflow, seed)
    exact, sign = magnitude(x)
    if x != x or not (form.signed or x > 0):
        return math.copysign(math.nan, sign)
    if exact is not None:
        quantum = _quantum(exact, form)
        if seed is None:
            exact = (exact / quantum).__round__() * quantum  # Python rounds a Fraction's ties to even
        else:
            random = importlib.import_module("mezzo.core.rounding").random_integer(round(x, "fp64"), seed)
            exact = (int(exact / quantum * 2**62) + random >> 62) * quantum
        if exact <= form.max:
            return math.copysign(max(float(exact), 0.0 if form.signed else form.min), sign)
    if overflow == "saturate" or not (form.has_infinity or form.has_nan):
        return math.copysign(form.max, sign)
    return math.copysign(math.inf if form.has_infinity else math.nan, sign)


def quantize(x: _Tensor, recipe: str, role: str = "input") -> Any:
    """What a block format makes of a torch tensor: codes, scales and values, as the emulated linear layers compute.

    Blocks run along the last dimension, which a product sums over; the other dimensions are rows.

    Args:
        x: a floating-point tensor with elements.
        recipe: ``"mxfp8"``, ``"nvfp4"``, ``"fp8-block"``, ``"fp8"``, another name in `mezzo.core.recipes`, or a TOML
            file.
        role: ``"input"``, ``"weight"`` or ``"gradient"``: they may differ in blocks and rounding.

    Returns:
        A `mezzo.pytorch.block_formats.QuantizedTensor`: `codes`, `scales`, `tensor_scale`, `values` and `factor`.

    Raises:
        UnknownNameError: an unknown recipe or role.
        UsageError: anything but a dense floating-point tensor with elements.

    Example:
        >>> import torch
        >>> q = quantize(torch.tensor([0.1, -0.5, 3.0, 0.02] * 4), "nvfp4")
        >>> q.values[:4].tolist(), q.codes[:4].tolist()
        ([0.0, -0.5, 3.000000238418579, 0.0], [0, 10, 7, 0])
    """
    return importlib.import_module("mezzo.pytorch.block_formats").quantize_tensor(x, recipe, role)


def ulp(x: Number, format: str | Format) -> float:
    """The unit in the last place at ``x``: the gap between the format's numbers in x's binade.

    As `math.ulp`: at 0 the smallest subnormal; infinite where ``x`` is infinite or overflows; NaN at NaN.

    >>> ulp(1, "bf16"), ulp(0, "fp16") == 2**-24, ulp(70000, "fp16")
    (0.0078125, True, inf)
    """
    rounded = round(x, format, overflow="infinity")
    if not math.isfinite(rounded):
        return math.nan if x != x else math.inf
    return float(_quantum(magnitude(x)[0] or Fraction(0), named(format)))


def magnitude(x: Number) -> tuple[Fraction | None, int]:
    """A number's magnitude, exactly (None for an infinity or a NaN), and its sign as +1 or -1."""
    if isinstance(x, float):
        return (Fraction(abs(x)) if math.isfinite(x) else None), int(math.copysign(1, x))
    if isinstance(x, (int, Fraction)):
        return abs(Fraction(x)), -1 if x < 0 else 1
    raise UsageError(
        f"cannot round {type(x).__name__} {str(x)[:40]!r}. Use a float, an int, a Fraction, a numpy array or a torch "
        "tensor. For a list: numpy.asarray(x)."
    )


def _quantum(x: Fraction, form: Format) -> Fraction:
    """The gap between the format's numbers in the binade of a magnitude, as if it had no largest number."""
    return Fraction(2) ** (max(floor_log2(x) if x else form.minexp, form.minexp) - form.nmant)


def floor_log2(x: Fraction) -> int:
    """``floor(log2(x))`` of a positive number, exactly."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if x >= Fraction(2) ** guess else guess - 1


@dataclass(frozen=True)
class Bits:
    """One code point of a format: its fields as stored, and the number they stand for."""

    sign: int
    exponent: int
    mantissa: int
    format: Format

    @property
    def code(self) -> int:
        """The pattern as one integer."""
        return ((self.sign << self.format.nexp) + self.exponent << self.format.nmant) + self.mantissa

    @property
    def kind(self) -> str:
        """``"zero"``, ``"subnormal"``, ``"normal"``, ``"infinity"`` or ``"nan"``."""
        if self.exponent == 0 and self.format.signed:
            return "subnormal" if self.mantissa else "zero"
        if self.exponent < (1 << self.format.nexp) - 1 or not self.format.has_nan:
            return "normal"
        if self.format.has_infinity:
            return "nan" if self.mantissa else "infinity"
        return "nan" if self.mantissa == (1 << self.format.nmant) - 1 else "normal"

    @property
    def value(self) -> float:
        """The number that the fields stand for, exactly; NaN and -0 keep their sign."""
        leading = 1 << self.format.nmant if self.exponent or not self.format.signed else 0
        unit = max(self.exponent, int(self.format.signed)) - self.format.bias - self.format.nmant
        special = {"infinity": math.inf, "nan": math.nan}.get(self.kind)
        value = math.ldexp(leading + self.mantissa, unit) if special is None else special
        return -value if self.sign else value

    @property
    def fields(self) -> tuple[str, str, str]:
        """Sign, exponent and mantissa as binary digits; empty where the format has no such field."""
        form = self.format
        sign = str(self.sign) if form.signed else ""
        return sign, f"{self.exponent:0{form.nexp}b}", f"{self.mantissa:0{form.nmant}b}" if form.nmant else ""

    def __str__(self) -> str:
        return " ".join(field for field in self.fields if field)


def bits(x: Number, format: str | Format, *, overflow: str = "infinity") -> Bits:
    """A number's bit pattern in a format, after rounding. See `round` for the arguments.

    >>> bits(1.0, "bf16").exponent, hex(bits(1.0, "bf16").code)
    (127, '0x3f80')
    """
    form = named(format)
    rounded = round(x, form, overflow=overflow)
    exact, sign = magnitude(rounded)
    if math.isnan(rounded) and not form.has_nan:
        raise UsageError(f"{form} has no code for NaN: all its codes are numbers.")
    if exact is None:
        quiet = 1 << (form.nmant - 1) if form.has_infinity else (1 << form.nmant) - 1
        code = ((1 << form.nexp) - 1 << form.nmant) + (quiet if math.isnan(rounded) else 0)
    else:
        # Of a normal number the leading 1 in its units adds the 1 that is missing in the exponent field.
        quantum = _quantum(exact, form)
        field = floor_log2(quantum) + form.nmant - form.minexp
        code = (field << form.nmant) + int(exact / quantum) - (not form.signed)
    return _pattern(code | int(sign < 0 and form.signed) << (form.bits - 1), form)


def decode(code: int | Bits, format: str | Format) -> float:
    """The value of a bit pattern: the inverse of `bits`.

    >>> decode(0x3F80, "bf16"), decode(0xFF, "e4m3fn")
    (1.0, nan)

    Raises:
        UsageError: a pattern with more bits than the format, or a negative one.
    """
    return (code if isinstance(code, Bits) else _pattern(code, named(format))).value


def _pattern(code: int, form: Format) -> Bits:
    last = (1 << form.bits) - 1
    if not 0 <= code <= last:
        raise UsageError(f"{code:#x} is not a code of {form}: its {form.bits} bits hold 0 to {last:#x}.")
    field, mantissa = divmod(code, 1 << form.nmant)
    return Bits(*divmod(field, 1 << form.nexp), mantissa, form)
