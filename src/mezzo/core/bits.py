"""The bit pattern of a number, split into what each part of it means."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

from mezzo.core.errors import UsageError
from mezzo.core.formats import Format, Number, exactly, power_of_two
from mezzo.core.rounding import is_nan, pattern, round_number, split


@dataclass(frozen=True)
class Bits:
    """One code point of a format: its three fields, and the number they stand for.

    Args:
        sign: 0 or 1.
        exponent: the field as stored, with its bias.
        mantissa: the field as stored, without the leading 1.
        format: the format they are the fields of.
    """

    sign: int
    exponent: int
    mantissa: int
    format: Format

    def __post_init__(self) -> None:
        widths = {"sign": 1, "exponent": self.format.nexp, "mantissa": self.format.nmant}
        for field, width in widths.items():
            value, last = getattr(self, field), (1 << width) - 1
            if not 0 <= value <= last:
                raise UsageError(f"{field} {value} does not fit {self.format}: it is 0 to {last}")

    @classmethod
    def from_code(cls, code: int, format: Format) -> Bits:
        """The fields of a code point given as one integer.

        Raises:
            UsageError: the integer is negative or has more bits than the format.
        """
        last = (1 << format.bits) - 1
        if not 0 <= code <= last:
            raise UsageError(f"{code:#x} is no {format}: its {format.bits} bits hold 0 to {last:#x}")
        return cls(
            sign=code >> (format.bits - 1),
            exponent=code >> format.nmant & ((1 << format.nexp) - 1),
            mantissa=code & ((1 << format.nmant) - 1),
            format=format,
        )

    @property
    def code(self) -> int:
        """The pattern as one integer."""
        return ((self.sign << self.format.nexp) + self.exponent << self.format.nmant) + self.mantissa

    @property
    def kind(self) -> str:
        """``"zero"``, ``"subnormal"``, ``"normal"``, ``"infinity"`` or ``"nan"``."""
        if self.exponent == 0:
            return "subnormal" if self.mantissa else "zero"
        if self.exponent < (1 << self.format.nexp) - 1:
            return "normal"
        if self.format.has_infinity:
            return "nan" if self.mantissa else "infinity"
        return "nan" if self.mantissa == (1 << self.format.nmant) - 1 else "normal"

    @property
    def value(self) -> Number:
        """The number that the fields stand for, exactly; NaN and -0 keep their sign."""
        sign = -1 if self.sign else 1
        if self.kind in ("nan", "infinity"):
            return math.copysign(math.nan if self.kind == "nan" else math.inf, sign)
        if self.kind == "zero":
            return math.copysign(0.0, sign)
        leading = 0 if self.kind == "subnormal" else 1 << self.format.nmant
        unit = power_of_two(max(self.exponent, 1) - self.format.bias - self.format.nmant)
        return exactly(sign * (leading + self.mantissa) * unit)

    @property
    def fields(self) -> tuple[str, str, str]:
        """Sign, exponent and mantissa as binary digits."""
        return (
            str(self.sign),
            format(self.exponent, f"0{self.format.nexp}b"),
            format(self.mantissa, f"0{self.format.nmant}b"),
        )

    def __str__(self) -> str:
        return " ".join(self.fields)


def encode(x: Number | Decimal, form: Format, overflow: str) -> Bits:
    """The bit pattern of the value that a number is rounded to. See `mezzo.formats.bits`."""
    rounded = round_number(x, form, overflow)
    exact, sign = split(rounded)
    if is_nan(rounded):
        top = (1 << form.nexp) - 1
        quiet = 1 << (form.nmant - 1) if form.has_infinity else (1 << form.nmant) - 1
        return Bits(int(sign < 0), top, quiet, form)
    code = pattern(math.inf if exact is None else exact, form) if exact != 0 else 0
    return Bits.from_code(code | int(sign < 0) << (form.bits - 1), form)
