"""The contenders of the optimizer benchmarks: AdamW of torch, of Mezzo in its modes, and of other libraries, by name.

All use the same numbers (`HYPER`). Weights are FP32 or bf16; gradients have the format of the weights. The other
libraries are an extra: ``pip install -e '.[peers]'``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

HYPER: Mapping[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
BASELINE = "torch fused, FP32"
FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Contender:
    """One optimizer in one mode.

    Args:
        summary: the stored formats, for a table.
        dtype: of weights and gradients.
        build: parameters -> optimizer.
        up_to: the largest size that it is run at, where larger ones last too long.
        devices: the device types that it exists for.
        kernels: what ``MEZZO_KERNELS`` is while it is built and runs; None leaves the choice to Mezzo.
        compiles: its first step compiles something, so that step is timed in separate processes.
    """

    summary: str
    dtype: torch.dtype
    build: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
    up_to: str = "128M"
    devices: tuple[str, ...] = ("cpu", "cuda")
    kernels: str | None = None
    compiles: bool = False

    @contextmanager
    def environment(self) -> Iterator[None]:
        """The environment that it runs in."""
        before = os.environ.get("MEZZO_KERNELS")
        if self.kernels is not None:
            os.environ["MEZZO_KERNELS"] = self.kernels
        try:
            yield
        finally:
            if self.kernels is not None:
                del os.environ["MEZZO_KERNELS"]
                if before is not None:
                    os.environ["MEZZO_KERNELS"] = before


def _torch(
    dtype: torch.dtype, *, up_to: str = "128M", devices: tuple[str, ...] = ("cpu", "cuda"), **how: Any
) -> Contender:
    summary = f"{'FP32' if dtype is FP32 else 'bf16'} weights and states" + (
        "" if dtype is FP32 else ", no masters"
    )
    return Contender(summary, dtype, partial(torch.optim.AdamW, **HYPER, **how), up_to=up_to, devices=devices)


def _mezzo(
    summary: str, dtype: torch.dtype, masters: str, state: str, kernels: str | None = None
) -> Contender:
    def build(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        adamw = importlib.import_module("mezzo.optim").AdamW
        made: torch.optim.Optimizer = adamw(params, **HYPER, masters=masters, state=state)
        return made

    slow = kernels == "reference"
    return Contender(
        summary, dtype, build, up_to="16M" if slow else "128M", kernels=kernels, compiles=not slow
    )


def _peer(
    module: str,
    name: str,
    summary: str,
    *,
    devices: tuple[str, ...] = ("cpu", "cuda"),
    compiles: bool = False,
    **how: Any,
) -> Contender:
    def build(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(importlib.import_module(module), name)(params, **HYPER, **how)
        return made

    return Contender(summary, BF16, build, devices=devices, compiles=compiles)


CONTENDERS: dict[str, Contender] = {
    BASELINE: _torch(FP32, fused=True),
    "torch foreach, FP32": _torch(FP32, foreach=True),
    "torch for-loop, FP32": _torch(FP32, foreach=False, up_to="1M", devices=("cpu",)),
    "torch fused, bf16": _torch(BF16, fused=True),
    "torch foreach, bf16": _torch(BF16, foreach=True),
    "mezzo, FP32 weights": _mezzo("exact: FP32 weights and states", FP32, "fp32", "fp32"),
    "mezzo fp32/fp32": _mezzo("exact: bf16 weights, FP32 masters and states", BF16, "fp32", "fp32"),
    "mezzo split/fp32": _mezzo("exact: bf16 weights, int16 remainders, FP32 states", BF16, "split", "fp32"),
    "mezzo split/bf16": _mezzo(
        "bf16 weights, int16 remainders, bf16 states (stochastic)", BF16, "split", "bf16"
    ),
    "mezzo split8/int8": _mezzo("lean: bf16 weights, int8 remainders, 8-bit states", BF16, "split8", "int8"),
    "mezzo none/int8": _mezzo("bf16 weights (stochastic), no masters, 8-bit states", BF16, "none", "int8"),
    "mezzo split/fp32, fallback": _mezzo(
        "without numba: torch operations", BF16, "split", "fp32", "reference"
    ),
    "mezzo split8/int8, fallback": _mezzo(
        "without numba: torch operations", BF16, "split8", "int8", "reference"
    ),
    "optimi foreach, bf16": _peer(
        "optimi", "AdamW", "torch-optimi: bf16 weights, states and Kahan terms", foreach=True
    ),
    "optimi triton, bf16": _peer(
        "optimi", "AdamW", "torch-optimi: bf16 weights, states and Kahan terms", triton=True
    ),
    "torchao _AdamW, bf16": _peer(
        "torchao.optim",
        "_AdamW",
        "torchao: bf16 weights (stochastic) and states",
        bf16_stochastic_round=True,
        compiles=True,
    ),
    "torchao AdamW8bit, bf16": _peer(
        "torchao.optim",
        "AdamW8bit",
        "torchao: bf16 weights (stochastic), 8-bit states",
        bf16_stochastic_round=True,
        compiles=True,
    ),
    "flashoptim AdamW": _peer(
        "flashoptim",
        "FlashAdamW",
        "flashoptim: bf16 weights, int8 corrections, 8-bit states",
        devices=("cuda",),
    ),
}
PACKAGES = ("numba", "triton", "torch-optimi", "torchao", "flashoptim")


def state_of(optimizer: torch.optim.Optimizer, param: Tensor) -> Mapping[str, Any]:
    """The optimizer's state of a parameter."""
    state: Mapping[str, Any] = optimizer.state[param]
    return state


def master_of(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    """The FP32 value that the optimizer uses: the master, or the weight if there is no master."""
    if hasattr(optimizer, "master"):
        master: Tensor = optimizer.master(param)
        return master
    value = param.detach().float()
    kahan = state_of(optimizer, param).get("kahan_comp")
    return value if kahan is None else value + kahan.float()
