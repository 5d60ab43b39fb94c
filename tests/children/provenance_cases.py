"""Cases of `two_ranks.py`: rank 1 overflows in the second step under DistributedDataParallel, and both say where."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo

PLANTED = {"forward": lambda x: x * 300 * 300, "backward": lambda x: x + torch.sqrt(x * 0)}


class Planted(nn.Module):
    fault = ""

    def forward(self, x: Tensor) -> Tensor:
        return PLANTED.get(self.fault, lambda x: x)(x)


def case(rank: int, fault: str, trace: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), Planted(), nn.Linear(7, 3))
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    mp = mezzo.MixedPrecision(wrapped, optimizer, "fp16", loss_scale=64, trace=trace)
    told: dict[str, Any] = {"skips": [], "warned": []}
    for step in range(3):
        net[1].fault = now = fault if (rank, step) == (1, 1) else ""
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * rank + step))
        with mp.autocast():
            out = wrapped(x).float()
            loss = out.square().mean() + (torch.log(out * 0).mean() if now == "loss" else 0.0)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            told["skips"].append(mp.step(loss).skipped)
        told["warned"] += [str(one.message) for one in warned if "was skipped" in str(one.message)]
    for finding in mp.findings:
        told |= {"module": finding.module, "op": finding.op, "note": finding.note}
    mp.close()
    return told | {"weights": [float(v).hex() for p in net.parameters() for v in p.detach().flatten()]}


def found(rank: int, fault: str) -> dict[str, Any]:
    """Three steps with the tracer; the weights without it."""
    return case(rank, fault, True) | {"untraced": case(rank, fault, False)["weights"]}


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    f"fault in {fault}": lambda rank, fault=fault: found(rank, fault)
    for fault in ("forward", "backward", "loss")
}
