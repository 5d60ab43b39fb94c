"""The contenders of the training-step benchmark: FP32, torch.amp, and Mezzo in several modes, by name.

All train the same `Workload` with torch's fused AdamW and the same hyperparameters; `mezzo.MixedPrecision` replaces
its kernel if weights are stored in 16 bits. The loss is inside the region.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import mezzo
from models import Workload, with_fused_loss

Step = Callable[[], float]
Build = Callable[[Workload], Step]

EAGER, COMPILED, FP16 = "eager", "compiled", "fp16"
MODES = (EAGER, COMPILED, FP16)
BASELINE: Mapping[str, str] = {EAGER: "amp-bf16", COMPILED: "amp-bf16", FP16: "fp32"}
"""The contender whose time is the divisor, in each mode."""


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Args:
        summary: in a legend.
        build: a workload -> its training step, which returns the loss.
        modes: in which it runs.
        rows: the workloads for which it exists; empty for all.
        prepare: what it makes of the workload before it trains.
    """

    summary: str
    build: Build
    modes: tuple[str, ...] = (EAGER, COMPILED)
    rows: tuple[str, ...] = ()
    prepare: Callable[[Workload], Workload] = lambda work: work

    def __call__(self, work: Workload) -> Step:
        """A step on the workload, whose objects become the contender's."""
        return self.build(self.prepare(work))

    def runs(self, row: str, mode: str) -> bool:
        """Whether it is a contender of that row in that mode."""
        return mode in self.modes and (not self.rows or row in self.rows)


def _optimizer(work: Workload) -> torch.optim.Optimizer:
    return torch.optim.AdamW(work.model.parameters(), lr=work.lr, fused=True)


def fp32(work: Workload) -> Step:
    """Plain FP32."""
    optimizer = _optimizer(work)

    def step() -> float:
        loss = work.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _loop(region: Callable[[str], Any], scaler: Callable[[str], Any] = lambda device: None) -> Build:
    """The loop of torch.amp's own documentation, with whichever region and scaler it is given."""

    def build(work: Workload) -> Step:
        optimizer = _optimizer(work)
        device = work.inputs.device.type
        scaling = scaler(device)

        def step() -> float:
            with region(device):
                loss = work.loss()
            if scaling is None:
                loss.backward()
                optimizer.step()
            else:
                scaling.scale(loss).backward()
                scaling.step(optimizer)
                scaling.update()
            optimizer.zero_grad()
            return loss.item()

        return step

    return build


def short(precision: str, masters: str | None = None, state: str | None = None) -> Build:
    """The loop of `mezzo.MixedPrecision`."""

    def build(work: Workload) -> Step:
        mp = mezzo.MixedPrecision(
            work.model, _optimizer(work), precision=precision, masters=masters, state=state
        )

        def step() -> float:
            with mp.autocast():
                loss = work.loss()
            result = mp.step(loss)
            return result.loss or 0.0

        return step

    return build


CONTENDERS: Mapping[str, Contender] = {
    "fp32": Contender("FP32", fp32, MODES),
    "amp-bf16": Contender("torch.amp, bf16", _loop(lambda device: torch.autocast(device, torch.bfloat16))),
    "mezzo-bf16": Contender(
        "mezzo.autocast in torch.amp's loop", _loop(lambda device: mezzo.autocast("bf16", device))
    ),
    "short-bf16": Contender("Mezzo, FP32 weights", short("bf16")),
    "split-bf16": Contender("Mezzo, split weights", short("bf16", "split")),
    "lean-bf16": Contender("Mezzo, lean: split8, 8-bit states", short("bf16", "split8", "int8"), (EAGER,)),
    "recompute": Contender(
        "Mezzo, split weights, GELU recomputed",
        short("bf16,recompute=gelu", "split"),
        (EAGER,),
        ("text-gpt", "gpt", "fine-tune", "lm-32k"),
    ),
    "fused-loss": Contender(
        "Mezzo, split weights, LinearCrossEntropy",
        short("bf16", "split"),
        (EAGER, COMPILED),
        ("gpt", "lm-32k"),
        with_fused_loss,
    ),
    "mezzo-fp16": Contender(
        "mezzo.autocast and mezzo.GradScaler, fp16",
        _loop(lambda device: mezzo.autocast("fp16", device), lambda device: mezzo.GradScaler(device)),
        (FP16,),
    ),
    "short-fp16": Contender("Mezzo, FP32 weights, fp16", short("fp16"), (FP16,)),
    "amp-fp16": Contender(
        "torch.amp, fp16",
        _loop(
            lambda device: torch.autocast(device, torch.float16),
            lambda device: torch.amp.GradScaler(device),
        ),
        (FP16,),
    ),
}


def compiled(work: Workload, name: str) -> Workload:
    """The same with model and loss under `torch.compile`, which caches for this contender alone.

    Dynamo keeps what it compiled with a function's code, and tries one after another at each call: contenders that
    shared a code object would pay for each other's, and run into the limit of recompilations.
    """
    loss_of = work.loss_of
    assert isinstance(loss_of, types.FunctionType)
    code = loss_of.__code__.replace(co_name=f"{loss_of.__name__}_{name.replace('-', '_')}")
    own = types.FunctionType(code, loss_of.__globals__, code.co_name, loss_of.__defaults__)
    return replace(work, loss_of=torch.compile(own))
