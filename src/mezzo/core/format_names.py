"""Other names of the number formats. This module and its callers in core cannot import torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "float64": "fp64",
        "float32": "fp32",
        "float16": "fp16",
        "half": "fp16",
        "bfloat16": "bf16",
        "float8_e4m3fn": "e4m3fn",
        "e4m3": "e4m3fn",
        "float8_e5m2": "e5m2",
    }
)
"""Other names of the formats, those of torch's dtypes among them."""


def format_name(value: object) -> str:
    """The format's own name for an alias or a `torch.dtype`; any other value as text.

    >>> format_name("bfloat16"), format_name("fp8")
    ('bf16', 'fp8')
    """
    text = str(value).removeprefix("torch.")
    return ALIASES.get(text, str(value))


def dtype_name(value: object) -> str:
    """The format's name for a `torch.dtype`; any other value as text."""
    return format_name(value) if str(value).startswith("torch.") else str(value)
