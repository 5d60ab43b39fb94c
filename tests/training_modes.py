"""How weights can be stored, as rows for the tests of MixedPrecision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mezzo
from mezzo.pytorch.optim.optimizers import AdamW
from training_steps import (  # noqa: F401
    INF,
    NAN,
    OPTIMIZERS,
    batch,
    everything,
    network,
    nobody_owns_anything,
    run,
    same,
    who_decides,
)

Make = Callable[[Any], torch.optim.Optimizer]

ADAMW: Make = lambda p: torch.optim.AdamW(p, lr=0.05)  # noqa: E731

# masters=, precision, the optimizer, state=
MODES: dict[str, tuple[str, str, Make, str | None]] = {
    "split": ("split", "bf16", ADAMW, None),
    "split8 int8": ("split8", "bf16", ADAMW, "int8"),
    "split sgd": ("split", "bf16", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "bf16"),
    "masters bf16": ("fp32", "bf16", ADAMW, None),
    "masters fp16": ("fp32", "fp16", lambda p: torch.optim.Adam(p, lr=0.05), None),
    "masters fp16 rmsprop": ("fp32", "fp16", lambda p: torch.optim.RMSprop(p, lr=0.01), None),
    "masters bf16 rmsprop": ("fp32", "bf16", lambda p: torch.optim.RMSprop(p, lr=0.01), None),
    "given split": ("split", "bf16", lambda p: AdamW(p, lr=0.05, masters="split"), None),
    "given fp16": ("fp32", "fp16", lambda p: AdamW(p, lr=0.05), None),
    "fp32 int8": ("auto", "bf16", ADAMW, "int8"),
}


def made(mode: str, model: nn.Module | None = None, **arguments: Any) -> Any:
    masters, precision, optimizer, state = MODES[mode]
    model = network() if model is None else model
    return mezzo.MixedPrecision(
        model, optimizer(model.parameters()), precision, masters=masters, state=state, **arguments
    )
