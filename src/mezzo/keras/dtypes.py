"""Keras's names of floating dtypes, and the number formats that they stand for. Nothing of Keras is imported."""

from __future__ import annotations

from mezzo.core.formats import named

NAMES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3fn",
    "float8_e5m2": "e5m2",
}
"""Keras's name of a dtype -> Mezzo's of its format."""

SIXTEEN_BITS = frozenset(dtype for dtype, name in NAMES.items() if named(name).storage_bits == 16)
"""The dtypes that a mixed policy computes in."""

NARROW = frozenset(dtype for dtype, name in NAMES.items() if named(name).storage_bits < 32)
"""Those that lose what FP32 holds: the above, and 8 bits."""


def significant_bits(dtype: str) -> int:
    """Of a dtype's numbers, with the leading 1 that is not stored: 11 of float16, 8 of bfloat16."""
    return named(NAMES[dtype]).nmant + 1
