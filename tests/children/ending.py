"""A training on two gloo ranks that an error on one of them ends.

Arguments: rank, a file for the ranks to meet at, and the words of a case: `sharded` for `fully_shard`, `scaler` for
`mezzo.GradScaler`, `first` for the first of three steps instead of the last, `caught` to catch the other rank's error.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mezzo

RANK, MEETING, WORDS = int(sys.argv[1]), sys.argv[2], sys.argv[3].split()


def loss_of(model: Any, *, fails: bool) -> Tensor:
    if fails and "data" in WORDS:
        raise ValueError("planted in the data")
    if fails and "apart" in WORDS:
        return torch.ones(2, requires_grad=True).sum()
    loss = model(torch.ones(2, 4)).float().square().mean()
    return loss.detach() if fails and "detached" in WORDS else loss


def main() -> None:
    store = dist.FileStore(MEETING, 2)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=2)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model = fully_shard(net) if "sharded" in WORDS else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = mezzo.GradScaler()
    mp = mezzo.MixedPrecision(model, optimizer, "bf16") if "scaler" not in WORDS else None
    for number in range(3):
        fails = RANK == 1 and number == (0 if "first" in WORDS else 2)
        if mp is None:
            with mezzo.autocast("fp16"):
                loss = loss_of(model, fails=fails)
            if loss.requires_grad:
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        else:
            with mp.autocast():
                loss = loss_of(model, fails=fails)
            mp.step(loss)


if "caught" in WORDS:
    try:
        main()
    except (RuntimeError, ValueError) as error:
        sys.exit(f"caught {type(error).__name__}: {error}")
main()
