"""Measure how far a contender's weights and masters are from AdamW in FP64 after 20 steps on the same gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from contenders import HYPER, Contender, master_of
from shapes import parameters

STEPS = 20


def gradients(like: Tensor) -> Iterator[Tensor]:
    """One per step: noise of 1e-3 around a constant of that size for each element, representable in bf16."""
    draw = torch.Generator().manual_seed(1)
    mean = torch.randn(like.shape, generator=draw)
    for _ in range(STEPS):
        noisy = (mean + torch.randn(like.shape, generator=draw)) * 1e-3
        yield noisy.to(device=like.device, dtype=torch.bfloat16)


def _run(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> None:
    for gradient in gradients(param):
        param.grad = gradient.to(param.dtype)
        optimizer.step()


def truth(device: str) -> tuple[Tensor, Tensor]:
    """The weights before and after 20 steps of torch's for-loop AdamW in FP64."""
    (param,) = parameters("1M", "one", torch.float64, device)
    before = param.detach().clone()
    _run(torch.optim.AdamW([param], foreach=False, **HYPER), param)
    return before, param.detach()


def distances(contenders: Mapping[str, Contender], device: str, console: Console) -> dict[str, Any]:
    """Root mean square of what is wrong, over that of what the weights moved: of the masters and of the weights.

    0 is exact; 1 is the error of masters that never moved. `master` equals `weight` where there is no master.
    """
    before, after = truth(device)
    moved = (after - before).square().mean().sqrt()
    found: dict[str, Any] = {}
    for name, contender in contenders.items():
        console.print(f"distance from FP64: {name}")
        try:
            (param,) = parameters("1M", "one", contender.dtype, device)
            with contender.environment(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a peer's own
                optimizer = contender.build([param])
                _run(optimizer, param)
                values = {"weight": param.detach(), "master": master_of(optimizer, param)}
            found[name] = {
                key: float((value.double() - after).square().mean().sqrt() / moved)
                for key, value in values.items()
            }
        except Exception as error:  # whatever a contender does, the others run
            found[name] = {"raised": f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"}
    return found
