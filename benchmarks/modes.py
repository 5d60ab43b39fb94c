"""Count the bytes per parameter of every optimizer in every mode, from live tensors after two steps."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from rich.console import Console
from torch import nn

from live import parts

NUMEL = 2**18
MASTERS = ("fp32", "split", "split8", "none")
STATES = ("fp32", "bf16", "int8")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam": {},
    "SGD": {"lr": 1e-3},
    "SGD, momentum": {"lr": 1e-3, "momentum": 0.9},
}


def _bytes(name: str, dtype: torch.dtype, masters: str, state: str) -> dict[str, float]:
    optim = importlib.import_module("mezzo.optim")
    param = nn.Parameter(torch.randn(NUMEL).mul_(0.02).to(dtype))
    optimizer = getattr(optim, name.partition(",")[0])(
        [param], **OPTIMIZERS[name], masters=masters, state=state
    )
    for _ in range(2):
        param.grad = torch.randn(NUMEL).mul_(1e-3).to(dtype)
        optimizer.step()
    held = parts(optimizer)
    return {
        **{key: round(count / NUMEL, 3) for key, count in held.items()},
        "total": round(sum(held.values()) / NUMEL, 3),
    }


def count(console: Console) -> dict[str, Any]:
    """Mode -> optimizer -> bytes per parameter; a mode is ``masters/state``, FP32 weights are ``weights/state``.

    By the reference kernels: what is stored is the same, and nothing is compiled for it.
    """
    before = os.environ.get("MEZZO_KERNELS")
    os.environ["MEZZO_KERNELS"] = "reference"
    console.print("bytes per parameter of each mode")
    rows = [("FP32 weights", torch.float32, "fp32", state) for state in STATES]
    rows += [(masters, torch.bfloat16, masters, state) for masters in MASTERS for state in STATES]
    try:
        return {
            f"{label}/{state}": {name: _bytes(name, dtype, masters, state) for name in OPTIMIZERS}
            for label, dtype, masters, state in rows
        }
    finally:
        del os.environ["MEZZO_KERNELS"]
        if before is not None:
            os.environ["MEZZO_KERNELS"] = before
