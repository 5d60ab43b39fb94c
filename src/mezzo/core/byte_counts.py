"""Byte counts: read from text such as 4GiB, and written as in reports."""

from __future__ import annotations

import re

from mezzo.core.errors import UsageError

_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _UNITS |= {f"{_prefix}B": 1000**_power, f"{_prefix}IB": 1024**_power}
_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(value: int | str, option: str = "") -> int:
    """The bytes in a number or a text, with units of 1000 (GB) or 1024 (GiB); errors begin with `option`.

    >>> parse_bytes("4 GiB"), parse_bytes("1.5GB"), parse_bytes("800 B"), parse_bytes(7)
    (4294967296, 1500000000, 800, 7)
    """
    match = _FORM.fullmatch(str(value).strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise UsageError(
            f"{option}{value!r} is not a number of bytes. Examples: 4GiB (1024^3), 4GB (1000^3), 800MB, 4294967296"
        )
    count = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if isinstance(value, str) and not match[2] and count < 1_000_000:
        raise UsageError(f"{option}{value!r} has no unit. Write {value}GiB, {value}MB, or {value}B for bytes")
    if count < 1:
        raise UsageError(f"{option}{value!r} is less than 1 byte. Example: 4GiB")
    return count


def written_bytes(count: int, typed: str = "") -> str:
    """A byte count to three digits, in units of 1000; after the user's own text, if that was `typed` otherwise.

    >>> written_bytes(581_234_567), written_bytes(999), written_bytes(999_600), written_bytes(16 * 1024**2, "16MiB")
    ('581 MB', '999 B', '1 MB', '16MiB (16.8 MB)')
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    written = f"{value:.3g} {units[0]}"
    return written if typed.replace(" ", "") in ("", written.replace(" ", "")) else f"{typed} ({written})"
