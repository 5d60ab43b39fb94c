"""What the cases of several gloo ranks share. A case runs on all ranks at once and raises where something is wrong.

Arguments of a process: its rank, a file for the ranks to meet at, their number, and whatever its cases need.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from leaving import leave
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

RANK, MEETING, WORLD = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
INF = float("inf")


def data(seed: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))


def gathered(mine: Any) -> list[Any]:
    """What each rank calls this with."""
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, mine)
    return found


def alike(mine: Any) -> None:
    """Check that every rank has the same, to the bit."""
    first, *others = map(repr, gathered(mine))
    assert all(other == first for other in others)


def whole(net: nn.Module) -> list[float]:
    """All weights, those in shards too."""
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return [x for p in full for x in p.detach().double().flatten().tolist()]


def run(cases: dict[str, Callable[[], Any]]) -> NoReturn:
    """Print case -> true, or what it returned, or what was wrong, with the values of local variables."""
    patience = timedelta(seconds=120)  # a case that fails on one rank leaves the others in a collective
    store = dist.FileStore(MEETING, WORLD)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD, timeout=patience)
    results: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            results[name] = case() or True
        except (Exception, CheckpointException) as error:
            told = traceback.TracebackException.from_exception(error, limit=-2, capture_locals=True)
            results[name] = "".join(told.format())[-3000:]
        dist.barrier()
    leave(results)
