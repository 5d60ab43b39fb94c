"""One of two gloo ranks: trains a few steps in each case, and prints what it got, as JSON, with every bit.

Arguments: rank, a file for the ranks to meet at.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from leaving import leave
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.core.errors import UsageError


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def data(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * rank + step))


def hexed(net: nn.Module) -> list[str]:
    return [float(value).hex() for p in net.parameters() for value in p.detach().float().flatten()]


def alone(rank: int, *, release: bool) -> dict[str, Any]:
    """Nobody averages gradients here: only found_inf and the norm are the ranks' in common."""
    net = model()
    mp = mezzo.MixedPrecision(
        net,
        torch.optim.AdamW(net.parameters()),
        "fp16",
        masters="fp32",
        clip_norm=0.01,
        release_gradients=release,
        loss_scale=256,
    )
    told = []
    for step in range(3):
        x = data(rank, step) * (float("inf") if (rank, step) == (1, 1) else 1.0)
        with mp.autocast():
            loss = net(x).float().square().mean()
        result = mp.step(loss)
        told.append([result.stepped, str(result.grad_norm)])
    return {"told": told, "steps": float(mp.optimizer.state[net[0].weight]["step"])}


def averaged(rank: int, *, accumulate: int) -> dict[str, Any]:
    """bf16 weights under DDP, lowered before they are wrapped."""
    net = model()
    mezzo.lower_weights(net, "bf16")
    wrapped = DistributedDataParallel(net)
    optimizer = mezzo.optim.AdamW(net.parameters(), lr=0.01, masters="split")
    mp = mezzo.MixedPrecision(wrapped, optimizer, "bf16", accumulate=accumulate, clip_norm=1.0)
    dtypes = set()
    for step in range(2 * accumulate):
        with mp.autocast():
            loss = wrapped(data(rank, step)).float().square().mean()
        result = mp.step(loss)
        if not result.updated:
            dtypes.add(str(mp._gradients.of(net[0].weight).dtype))
            assert net[0].weight.grad is None
    assert net[0].weight.grad_dtype is torch.bfloat16
    return {"weights": hexed(net), "norm": str(result.grad_norm), "dtypes": sorted(dtypes)}


def refused(rank: int) -> dict[str, Any]:
    net = DistributedDataParallel(model())
    before = hexed(net)
    told = []
    for arguments in ({"masters": "split"}, {"release_gradients": True}):
        try:
            mezzo.MixedPrecision(net, torch.optim.AdamW(net.parameters()), "bf16", **arguments)
        except UsageError as error:
            told.append(str(error))
    return {"told": told, "same": hexed(net) == before, "dtype": str(net.module[0].weight.dtype)}


def main() -> None:
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    cases = {
        "alone": alone(rank, release=False),
        "alone, released": alone(rank, release=True),
        "averaged": averaged(rank, accumulate=1),
        "averaged, accumulated": averaged(rank, accumulate=3),
        "refused": refused(rank),
    }
    leave(cases)


main()
