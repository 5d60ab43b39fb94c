"""Format names and the torch dtypes that store them; and a warning of a version of torch that was not tested."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType

import torch

from mezzo.core.errors import unknown_name
from mezzo.core.formats import format_name
from mezzo.core.version import untested_torch

if _untested := untested_torch(torch.__version__):  # autocast, MixedPrecision and a run import this
    warnings.warn(_untested, stacklevel=2)

_STORED = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {format_name(name): getattr(torch, name) for name in _STORED}
)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *SIXTEEN_BITS)  # what kernels read; Triton's number them in this order


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype that stores a format, for instance ``"bf16"`` -> ``torch.bfloat16``."""
    if name not in DTYPES:
        raise unknown_name("storage format", name, DTYPES)
    return DTYPES[name]


def name_of(dtype: torch.dtype) -> str:
    """The format name of a torch dtype; torch's own name where Mezzo has none (``torch.int64`` -> ``"int64"``)."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))
