"""One of two gloo ranks: trains with a statistical loss scale on data of its own, and prints what it got, as JSON.

Arguments: rank, a file for the ranks to meet at.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from leaving import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.pytorch.distributed import agreed_largest


def trained(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    # Small inputs and no bias: the gradients of outputs, which nobody averages, are larger than the weights'.
    net = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False))
    model = DistributedDataParallel(net)
    mp = mezzo.MixedPrecision(
        model,
        torch.optim.SGD(net.parameters(), lr=0.01),
        "fp16",
        loss_scale=mezzo.StatisticalLossScale(init=256.0, warm_up=2),
    )
    told = []
    for step in range(4):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * rank + step)) * 0.01
        with mp.autocast():
            loss = model(x).float().sum() * (1 + 7 * rank)
        mp.step(loss)
        told.append([float(mp._observing.largest).hex(), mp.loss_scale])
    mp.close()
    return {"told": told, "own": float(loss.detach())}


def main() -> None:
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    cases = {
        "DDP": trained(rank),
        "number": str(float(agreed_largest(torch.tensor(float(rank))))),
        "NaN": str(float(agreed_largest(torch.tensor(float("nan") if rank == 0 else 1.0)))),
    }
    leave(cases)


main()
