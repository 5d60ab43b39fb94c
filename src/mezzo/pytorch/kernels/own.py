"""Mezzo's own kernels behind PyTorch's ops: 16 bits in, FP32 arithmetic, and no FP32 copy of what was read.

`OWN` says where each is. A kernel takes the op's own arguments, with a 16-bit first tensor; a region hands FP32 and
FP64 tensors to PyTorch (`mezzo.pytorch.region.actions`). Which op has one on which device, and that its arithmetic
is FP32's, is `mezzo.core.rules.OWN_KERNEL`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mezzo.pytorch.kernels import backend

_HERE = "mezzo.pytorch.kernels"

#: Op, by its ATen name -> "module:function".
OWN: Mapping[str, str] = MappingProxyType(
    {
        "cross_entropy_loss": f"{_HERE}.cross_entropy:cross_entropy_loss",
        "instance_norm": f"{_HERE}.composed:instance_norm",
        "layer_norm": f"{_HERE}.layer_norm:layer_norm",
        "rms_norm": f"{_HERE}.rms_norm:rms_norm",
        "softmax": f"{_HERE}.composed:softmax",
    }
)


def load(op: str) -> Callable[..., Any]:
    """The kernel of an op in `OWN`; its module is imported now."""
    module, _, name = OWN[op].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def serves(device_type: str) -> bool:
    """Whether the kernels can run on a kind of device: on CUDA they need Triton, on a CPU nothing.

    Without Numba a CPU runs their reference, in FP32 all the same.
    """
    if device_type == "cpu":
        return True
    forced = os.environ.get(backend.KERNELS)
    return device_type == "cuda" and (bool(forced) or backend.is_installed("triton"))
